"""All experts of a layer as one kernel of our own, for CPUs."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mimo.nn.native import load_function
from mimo.nn.panels import PANEL, in_panels

_SOURCE = Path(__file__).with_name("experts.cpp")
_FUNCTIONS = {torch.bfloat16: "experts_bfloat16", torch.float32: "experts_float32"}


class _Sizes(ctypes.Structure):
    """The kernel's struct of this name."""

    _fields_ = [
        (name, ctypes.c_int64) for name in "num_rows top_k num_experts hidden inner x_row".split()
    ]


class ExpertPanels:
    """Copies of gate and up [E, 2I, D] and of down [E, D, I], for inference.

    Nothing is rounded in between but the hidden values that the second product reads. The bits of
    a row do not depend on the other rows.
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        with torch.no_grad():
            self._gate_up = in_panels(_interleaved(gate_up))
            self._down = in_panels(down)
        self._num_experts, self._hidden, self._inner = down.shape
        self._dtype = down.dtype

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x: [T, D], topk_ids: [T, k] int64, topk_weights: [T, k] float32 -> [T, D]."""
        assert x.dtype == self._dtype and x.shape[1] == self._hidden
        assert topk_ids.dtype == torch.int64
        x = x if x.stride(1) == 1 else x.contiguous()
        topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.float().contiguous()
        (num_rows, top_k), num_pairs = topk_ids.shape, topk_ids.numel()
        order = topk_ids.new_empty(num_pairs + self._num_experts + 1)
        hidden = x.new_empty(num_pairs, self._inner)
        outs = topk_weights.new_empty(num_pairs, self._hidden)
        y = x.new_empty(num_rows, self._hidden)
        sizes = _Sizes(num_rows, top_k, self._num_experts, self._hidden, self._inner, x.stride(0))
        tensors = (x, topk_ids, topk_weights, self._gate_up, self._down, order, hidden, outs, y)
        _kernel(self._dtype)(
            ctypes.byref(sizes), *(each.data_ptr() for each in tensors), torch.get_num_threads()
        )
        return y


def _interleaved(gate_up: Tensor) -> Tensor:
    """[E, 2I, D], gates before ups -> 32 gates, their 32 ups, and so on; zeros where they end."""
    half = PANEL // 2
    gate, up = (
        F.pad(part, (0, 0, 0, -part.shape[1] % half)).unflatten(1, (-1, half))
        for part in gate_up.chunk(2, dim=1)
    )  # [E, I / 32, 32, D] each
    return torch.cat((gate, up), dim=2).flatten(1, 2)


@lru_cache
def _kernel(dtype: torch.dtype) -> "ctypes._NamedFuncPointer":
    types = [ctypes.POINTER(_Sizes), *[ctypes.c_void_p] * 9, ctypes.c_int]
    return load_function(_SOURCE, _FUNCTIONS[dtype], types)
