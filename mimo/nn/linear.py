"""Linear maps, and weights in the layout of the kernel that multiplies by them.

A plain matrix is brought into the kernel's layout by every product anew, which for few rows costs
more than the product; a packed one lies in it for good.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mimo.nn.native import KernelUnavailable
from mimo.nn.panels import Panels

logger = logging.getLogger(__name__)

_ONEDNN_OPERATIONS = ("_is_mkldnn_bf16_supported", "_linear_pointwise", "_reorder_linear_weight")


class PackedWeight(Protocol):
    """A copy of a weight [out, in], for inference."""

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., in], bias: [out] -> [..., out]."""


Packing = Callable[[Tensor], PackedWeight]


class Linear(nn.Linear):
    """``nn.Linear`` whose weight can be packed."""

    _packed: PackedWeight | None = None

    def pack(self, packing: Packing) -> None:
        """From now on for inference alone: neither gradients nor a state dict."""
        self._packed = packing(self.weight)
        del self.weight

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] -> [..., out_features]."""
        if self._packed is not None:
            return self._packed.product(input, self.bias)
        return F.linear(input, self.weight, self.bias)


class OneDnnWeight:
    """A bfloat16 weight in oneDNN's blocks. The bits are those of the plain product."""

    def __init__(self, weight: Tensor) -> None:
        with torch.no_grad():
            self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return out


def packing_for(dtype: torch.dtype, device: str) -> Packing | None:
    """How weights are best packed here, if at all.

    oneDNN's way where the CPU multiplies matrices by itself (AMX), which our kernel cannot; else
    panels, unless they cannot be compiled.
    """
    if torch.device(device).type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    has_onednn = dtype == torch.bfloat16 and _has_onednn()
    if has_onednn and _has_amx():
        return OneDnnWeight
    try:
        Panels.prepare()
    except KernelUnavailable as error:
        logger.warning("products are slower than they could be on this CPU: %s", error)
        return OneDnnWeight if has_onednn else None
    return Panels


def pack_weights(module: nn.Module, packing: Packing) -> None:
    """Pack every weight below ``module`` that can be; one at a time, so that memory suffices."""
    for each in list(module.modules()):
        if callable(pack := getattr(each, "pack", None)):
            pack(packing)


def _has_amx() -> bool:
    # The oldest torch that we accept may not tell; our kernel serves such a machine, too.
    ask = getattr(torch.cpu, "get_capabilities", None)
    return ask is not None and bool(ask().get("amx_bf16"))


def _has_onednn() -> bool:
    # Private names: a torch that has others is one that cannot pack so.
    operations = torch.ops.mkldnn
    return all(hasattr(operations, name) for name in _ONEDNN_OPERATIONS) and bool(
        operations._is_mkldnn_bf16_supported()
    )
