"""Attention over cached keys as a kernel of our own, for CPUs."""

import ctypes
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mimo.nn.attention.base import AttentionNeeds, Paged, Sink, Varlen
from mimo.nn.attention.sdpa import SdpaBackend
from mimo.nn.native import KernelUnavailable, load_function, load_kernel

_SOURCE = Path(__file__).with_name("native.cpp")
_FUNCTIONS = {torch.bfloat16: "attend_bfloat16", torch.float32: "attend_float32"}
_LANES = 16
_MAX_HEAD_DIM = 512
_SIZES = (
    "num_rows num_heads num_kv_heads head_dim v_head_dim block_size left"
    " q_row table_row k_block k_offset k_head v_block v_offset v_head"
).split()
_ONE_BLOCK = 1 << 31  # keys; a packed segment is a block of any length


class _Shape(ctypes.Structure):
    """The kernel's struct of this name."""

    _fields_ = [*((name, ctypes.c_int64) for name in _SIZES), ("scale", ctypes.c_float)]


class NativeBackend:
    """Reads cached keys where they lie, without copies, masks or padding.

    The bits of a row depend on its own query and keys alone: not on the batch, nor on how a prompt
    was cut into steps. Only layers with a cache are taken. Gradients of packed keys are left to
    torch; over a cache there are none.
    """

    name = "native"

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        if not needs.paged:
            return "it is for layers with a cache"
        if torch.device(needs.device).type != "cpu":
            return "it is for CPUs"
        if needs.dtype not in _FUNCTIONS:
            return f"it has no {needs.dtype}"
        if needs.keys_after != 0 or needs.sink is Sink.KEY0:
            return "it is for causal layers without a sink at the first key"
        dims = (needs.head_dim, needs.v_head_dim)
        if any(dim % _LANES or dim > _MAX_HEAD_DIM for dim in dims):
            return f"heads of {dims} are not multiples of {_LANES} up to {_MAX_HEAD_DIM}"
        try:
            load_kernel(_SOURCE)
        except KernelUnavailable as error:
            return str(error)
        return None

    def varlen(
        self,
        needs: AttentionNeeds,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: Varlen,
        sinks: Tensor | None,
    ) -> Tensor:
        operands = (q, k, v) if sinks is None else (q, k, v, sinks)
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            return SdpaBackend().varlen(needs, q, k, v, meta, sinks)
        starts = [[start] for start in accumulate(meta.k_lens, initial=0)][:-1]
        tables = torch.tensor(starts, dtype=torch.int32).view(-1, 1)
        blocks = Paged(meta.q_lens, meta.k_lens, tables, _ONE_BLOCK)
        # [S, 1, K, ..]: a block may begin with any key.
        k, v = (x.contiguous().unsqueeze(1) for x in (k, v))
        return self.paged(needs, q, k, v, blocks, sinks)

    def paged(
        self,
        needs: AttentionNeeds,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: Paged,
        sinks: Tensor | None,
    ) -> Tensor:
        assert q.dtype == k_cache.dtype == v_cache.dtype == needs.dtype
        assert k_cache.stride(-1) == v_cache.stride(-1) == meta.block_tables.stride(-1) == 1
        if q.stride()[1:] != (needs.head_dim, 1):
            q = q.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        requests, positions = _rows(meta)  # [T] each
        out = q.new_empty(q.shape[0], needs.num_heads, needs.v_head_dim)
        shape = _Shape(
            *(q.shape[0], needs.num_heads, needs.num_kv_heads, needs.head_dim, needs.v_head_dim),
            *(meta.block_size, -1 if needs.left is None else needs.left),
            *(q.stride(0), meta.block_tables.stride(0)),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            needs.scale,
        )
        _kernel(needs.dtype)(
            ctypes.byref(shape),
            *(x.data_ptr() for x in (q, k_cache, v_cache, meta.block_tables, requests, positions)),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


@lru_cache
def _kernel(dtype: torch.dtype) -> "ctypes._NamedFuncPointer":
    types = [ctypes.POINTER(_Shape), *[ctypes.c_void_p] * 8, ctypes.c_int]
    return load_function(_SOURCE, _FUNCTIONS[dtype], types)


@lru_cache(maxsize=8)
def _rows(meta: Paged) -> tuple[Tensor, Tensor]:
    """Request and position of every query, int32 [T]; remembered for the layers of a step."""
    longest = max(meta.context_lens, default=0)
    assert longest <= meta.block_tables.shape[1] * meta.block_size, "block tables are too short"
    requests = [i for i, q_len in enumerate(meta.q_lens) for _ in range(q_len)]
    spans = zip(meta.q_lens, meta.context_lens, strict=True)
    positions = [p for q_len, stop in spans for p in range(stop - q_len, stop)]
    arrays = np.array([*requests, *positions], np.int32).reshape(2, -1)
    return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])
