"""From planned rows to the tensors a step runs on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mimo.nn.attention import BoundAttention
from mimo.nn.attention.base import Paged
from services.llm.engine.block_manager import NO_BLOCK
from services.llm.engine.kv_cache import KVCache
from services.llm.engine.request import Request


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``[start, start + num_rows)`` of one request."""

    request: Request
    start: int
    num_rows: int

    @property
    def stop(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed segments: where each row stands and where its keys and values go."""

    segments: tuple[Segment, ...]
    positions: Tensor  # [T] int64
    slot_mapping: dict[str, Tensor]  # by layer group: [T] int64
    paged: dict[str, Paged]  # by layer group

    @property
    def row_starts(self) -> list[int]:
        """Row of each segment's first position."""
        starts, row = [], 0
        for segment in self.segments:
            starts.append(row)
            row += segment.num_rows
        return starts


def build(
    segments: Sequence[Segment], groups: Sequence[str], block_size: int, device: str
) -> Batch:
    """Lay segments out one after another. Their blocks must be reserved."""
    q_lens = tuple(segment.num_rows for segment in segments)
    context_lens = tuple(segment.stop for segment in segments)
    # From flat lists: a step of many short segments would else be many small operations.
    rows = _tensor([row for row, length in enumerate(q_lens) for _ in range(length)], np.int64)
    positions = _tensor([p for s in segments for p in range(s.start, s.stop)], np.int64)  # [T]
    blocks, offsets = positions // block_size, positions % block_size
    slot_mapping, paged = {}, {}
    for group in groups:
        tables = _block_tables(segments, group, block_size)  # [B, max_blocks]
        slots = tables[rows, blocks].long() * block_size + offsets  # [T]
        slot_mapping[group] = slots.to(device)
        paged[group] = Paged(q_lens, context_lens, tables.to(device), block_size)
    return Batch(tuple(segments), positions.to(device), slot_mapping, paged)


class PagedAttend:
    """Attend through the cache: store the step's keys and values, then read by block table."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        self._cache = cache
        self._batch = batch

    def __call__(
        self,
        layer: int,
        attention: BoundAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """q: [T, N, H], k: [T, K, H], v: [T, K, Hv], sinks: [N] -> [T, N, Hv]."""
        group = self._cache.group_of(layer)
        self._cache.write(layer, self._batch.slot_mapping[group], k, v)
        k_cache, v_cache = self._cache.layer(layer)
        return attention(q, k_cache, v_cache, self._batch.paged[group], sinks)


def _block_tables(segments: Sequence[Segment], group: str, block_size: int) -> Tensor:
    """[B, max_blocks] int32. Dropped and padding entries point at block 0: they are never seen."""
    width = max(-(-segment.stop // block_size) for segment in segments)
    flat: list[int] = []
    for segment in segments:
        table = segment.request.block_tables[group][:width]
        flat += table
        flat += [NO_BLOCK] * (width - len(table))
    return _tensor(flat, np.int32).view(-1, width).clamp_(min=0)


def _tensor(values: list[int], dtype: type[np.integer]) -> Tensor:
    """By way of numpy, which reads a list in a quarter of the time."""
    return torch.from_numpy(np.array(values, dtype))
