"""Weights in the layout of our own matrix product, for CPUs: panels of 64 outputs."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mimo.nn.native import load_function, load_kernel

PANEL = 64

_SOURCE = Path(__file__).with_name("panels.cpp")
_FUNCTIONS = {torch.bfloat16: "linear_bfloat16", torch.float32: "linear_float32"}


def in_panels(weight: Tensor) -> Tensor:
    """[..., out, in] -> [..., out / 64, in / n, 64, n], zeros where outputs end.

    n is 2 for bfloat16, whose instructions multiply pairs, and 1 for float32. Raises ValueError for
    an odd number of bfloat16 inputs.
    """
    *others, num_outputs, num_inputs = weight.shape
    together = 4 // weight.itemsize
    if num_inputs % together:
        raise ValueError(f"{weight.dtype} inputs come in pairs, got {num_inputs}")
    padded = F.pad(weight, (0, 0, 0, -num_outputs % PANEL))
    panels = padded.view(*others, -1, PANEL, num_inputs // together, together)
    return panels.transpose(-3, -2).contiguous()


class Panels:
    """A copy of a weight [out, in], float32 or bfloat16, for inference.

    Sums are float32 and rounded once. The bits of a row do not depend on the other rows.
    """

    def __init__(self, weight: Tensor) -> None:
        with torch.no_grad():
            self._panels = in_panels(weight)
        self._num_outputs, self._num_inputs = weight.shape
        self._dtype = weight.dtype

    @staticmethod
    def prepare() -> None:
        """Have the kernel compiled. Raises KernelUnavailable."""
        load_kernel(_SOURCE)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., in], bias: [out] -> [..., out]."""
        assert x.dtype == self._dtype and x.shape[-1] == self._num_inputs
        assert bias is None or (bias.dtype == self._dtype and bias.is_contiguous())
        rows = x.reshape(-1, self._num_inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = rows.new_empty(rows.shape[0], self._num_outputs)
        _kernel(self._dtype)(
            *(rows.shape[0], self._num_inputs, self._num_outputs, rows.stride(0)),
            *(rows.data_ptr(), self._panels.data_ptr()),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y.view(*x.shape[:-1], self._num_outputs)


@lru_cache
def _kernel(dtype: torch.dtype) -> "ctypes._NamedFuncPointer":
    types = [*[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 4, ctypes.c_int]
    return load_function(_SOURCE, _FUNCTIONS[dtype], types)
