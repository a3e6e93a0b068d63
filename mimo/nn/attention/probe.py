"""A small ragged case that a backend must answer like the reference before it serves a layer."""

import torch
from torch import Tensor

from mimo.nn.attention.base import AttentionBackend, AttentionNeeds, Paged, Sink, Varlen
from mimo.nn.attention.reference import ReferenceBackend

# Largest accepted difference; outputs are of order one.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}

_BLOCK_SIZE = 16
_MAX_LENGTH = 300


def probe(backend: AttentionBackend, needs: AttentionNeeds) -> str | None:
    """Why the backend must not serve this layer, or None when it agrees with the reference.

    An exception of the backend is such a reason too: a kernel that does not load on this machine
    must not stop a process that can do without it.
    """
    reaches = [reach for reach in (needs.left, needs.right) if reach is not None]
    long = min(max(reaches, default=64) + 70, _MAX_LENGTH)
    q_lens = (long, 1, 3, 5)
    k_lens = (long, long, 40, 5) if needs.causal else q_lens  # causal layers continue a history
    try:
        difference = _varlen_difference(backend, needs, q_lens, k_lens)
        if needs.paged:
            difference = max(difference, _paged_difference(backend, needs, q_lens, k_lens))
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    if not difference <= TOLERANCES[needs.dtype]:  # a NaN is a failure
        return f"differs from the reference by {difference:.3g}"
    return None


def _varlen_difference(
    backend: AttentionBackend,
    needs: AttentionNeeds,
    q_lens: tuple[int, ...],
    k_lens: tuple[int, ...],
) -> float:
    q, k, v, sinks = _inputs(needs, sum(q_lens), sum(k_lens))
    meta = Varlen(q_lens, k_lens)
    expected = ReferenceBackend().varlen(needs, q, k, v, meta, sinks)
    return _difference(backend.varlen(needs, q, k, v, meta, sinks), expected)


def _paged_difference(
    backend: AttentionBackend,
    needs: AttentionNeeds,
    q_lens: tuple[int, ...],
    k_lens: tuple[int, ...],
) -> float:
    max_blocks = -(-max(k_lens) // _BLOCK_SIZE)
    num_blocks = max_blocks * len(k_lens)
    q, k, v, sinks = _inputs(needs, sum(q_lens), num_blocks * _BLOCK_SIZE)
    k, v = (x.view(num_blocks, _BLOCK_SIZE, *x.shape[1:]) for x in (k, v))
    tables = torch.arange(num_blocks, dtype=torch.int32, device=needs.device).flip(0)
    meta = Paged(q_lens, k_lens, tables.view(len(k_lens), max_blocks), _BLOCK_SIZE)
    expected = ReferenceBackend().paged(needs, q, k, v, meta, sinks)
    return _difference(backend.paged(needs, q, k, v, meta, sinks), expected)


def _inputs(
    needs: AttentionNeeds, num_queries: int, num_keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Seeded q [T, N, H], k [S, K, H], v [S, K, Hv] and sinks [N] that no backend can overlook."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(needs.device, needs.dtype)

    q = normal(num_queries, needs.num_heads, needs.head_dim)
    k = normal(num_keys, needs.num_kv_heads, needs.head_dim)
    v = normal(num_keys, needs.num_kv_heads, needs.v_head_dim)
    if needs.sink is Sink.NONE:
        return q, k, v, None
    return q, k, v, 2 + normal(needs.num_heads)


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    return float((actual.double() - expected.double()).abs().max())
