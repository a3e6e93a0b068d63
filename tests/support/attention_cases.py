"""Ragged batches of attention, and the dense float64 softmax that they must give."""

from dataclasses import dataclass

import numpy as np
import torch

from mimo.nn.attention import AttentionNeeds, Paged, Sink

LENGTHS = (1, 4, 64, 65, 129, 130, 500)
HISTORIES = (0, 3, 70, 1, 0, 200, 37)
MASKS = {
    "full": (False, None, None),
    "band": (False, 64, 64),
    "causal": (True, None, None),
    "causal window": (True, 128, None),
    "short causal window": (True, 7, 0),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass
class Case:
    needs: AttentionNeeds
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None


def make_case(
    mask: str,
    sink: Sink,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    paged: bool = False,
) -> Case:
    """``heads``: query heads, kv heads, head dim, value head dim."""
    causal, left, right = MASKS[mask]
    num_heads, num_kv_heads, head_dim, v_head_dim = heads
    needs = AttentionNeeds(
        num_heads, num_kv_heads, head_dim, v_head_dim, head_dim**-0.5, causal, left, right, sink,
        paged, dtype, "cpu",
    )  # fmt: skip
    k_lens = tuple(n + (h if causal else 0) for n, h in zip(LENGTHS, HISTORIES, strict=True))
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        needs,
        LENGTHS,
        k_lens,
        normal(sum(LENGTHS), num_heads, head_dim),
        normal(sum(k_lens), num_kv_heads, head_dim),
        normal(sum(k_lens), num_kv_heads, v_head_dim),
        None if sink is Sink.NONE else 1 + normal(num_heads),
    )


def dense(case: Case) -> np.ndarray:
    """Segment by segment, head by head, in float64."""
    needs = case.needs
    q, k, v = (x.double().numpy() for x in (case.q, case.k, case.v))
    sinks = np.zeros(needs.num_heads) if case.sinks is None else case.sinks.double().numpy()
    out = np.zeros((q.shape[0], needs.num_heads, needs.v_head_dim))
    q_start = k_start = 0
    for q_len, k_len in zip(case.q_lens, case.k_lens, strict=True):
        positions = np.arange(k_len - q_len, k_len)[:, None]
        distance = np.arange(k_len)[None, :] - positions  # [q_len, k_len]
        visible = np.ones_like(distance, dtype=bool)
        if needs.causal:
            visible &= distance <= 0
        if needs.left is not None:
            visible &= distance >= -needs.left
        if needs.right is not None:
            visible &= distance <= needs.right
        for head in range(needs.num_heads):
            kv_head = head * needs.num_kv_heads // needs.num_heads
            keys, values = (x[k_start : k_start + k_len, kv_head] for x in (k, v))
            scores = q[q_start : q_start + q_len, head] @ keys.T * needs.scale
            if needs.sink is Sink.KEY0:
                scores[:, 0] += sinks[head]
            exponentials = np.where(visible, np.exp(scores), 0.0)
            total = exponentials.sum(axis=1, keepdims=True)
            if needs.sink is Sink.COLUMN:
                total = total + np.exp(sinks[head])
            out[q_start : q_start + q_len, head] = exponentials / total @ values
        q_start, k_start = q_start + q_len, k_start + k_len
    return out


def into_blocks(case: Case, block_size: int = 16) -> tuple[torch.Tensor, torch.Tensor, Paged]:
    """The keys scattered over a cache in reverse order; unwritten slots hold NaN."""
    counts = [-(-k_len // block_size) for k_len in case.k_lens]
    free = list(range(sum(counts)))
    k_cache, v_cache = (
        torch.full((sum(counts) * block_size, *x.shape[1:]), float("nan"), dtype=x.dtype)
        for x in (case.k, case.v)
    )
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    start = 0
    for request, (count, k_len) in enumerate(zip(counts, case.k_lens, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(count)])
        tables[request, :count] = blocks
        position = torch.arange(k_len)
        slots = blocks[position // block_size] * block_size + position % block_size
        k_cache[slots] = case.k[start : start + k_len]
        v_cache[slots] = case.v[start : start + k_len]
        start += k_len
    shape = (sum(counts), block_size)
    meta = Paged(case.q_lens, case.k_lens, tables, block_size)
    return k_cache.unflatten(0, shape), v_cache.unflatten(0, shape), meta
