"""Linear maps, and weights in the layout of the kernel that multiplies by them.

oneDNN's bfloat16 kernels read a weight in blocks. A plain matrix is brought into that layout by
every product anew, which for few rows costs more than the product; a packed one lies in it for
good. The bits are the same.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_OPERATIONS = ("_is_mkldnn_bf16_supported", "_linear_pointwise", "_reorder_linear_weight")


class Linear(nn.Linear):
    """``nn.Linear`` whose weight can be packed."""

    def pack(self) -> None:
        """From now on for inference alone: neither gradients nor a state dict."""
        self.weight = nn.Parameter(packed(self.weight), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] -> [..., out_features]."""
        return product(input, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [..., in], weight: [out, in], packed or not, bias: [out] -> [..., out]."""
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def packed(weight: Tensor) -> Tensor:
    """A copy of a bfloat16 weight [out, in] on the CPU, for :func:`product` alone."""
    with torch.no_grad():
        copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return copy


def can_pack(dtype: torch.dtype, device: str) -> bool:
    """Whether packing is known here, and pays: in float32 a single row of a small weight would take
    four times as long."""
    if dtype != torch.bfloat16 or torch.device(device).type != "cpu":
        return False
    # Private names: a torch that has others is one that cannot pack.
    if not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATIONS):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weights(module: nn.Module) -> None:
    """Pack every weight below ``module`` that can be; one at a time, so that memory suffices."""
    for each in module.modules():
        if callable(pack := getattr(each, "pack", None)):
            pack()
