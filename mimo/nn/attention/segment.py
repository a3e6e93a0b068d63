"""Segments of a packed batch, grouped by shape, and the keys they read."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from mimo.nn.attention.base import Paged


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment without the leading keys that none of its queries can see."""

    index: int
    query_start: int  # row of its first query in the packed queries
    q_len: int
    k_len: int  # keys kept
    skipped: int  # keys dropped in front

    @property
    def history(self) -> int:
        """Position of the first query among the kept keys."""
        return self.k_len - self.q_len


def trim(q_lens: Sequence[int], k_lens: Sequence[int], left: int | None) -> Iterator[Segment]:
    """The segments that have queries, without the keys beyond ``left`` of the first one."""
    starts = accumulate(q_lens, initial=0)
    for index, (start, q_len, k_len) in enumerate(zip(starts, q_lens, k_lens, strict=False)):
        skipped = 0 if left is None else max(0, k_len - q_len - left)
        if q_len:
            yield Segment(index, start, q_len, k_len - skipped, skipped)


def group_by_shape(
    segments: Sequence[Segment], key_multiple: int, longest: int
) -> dict[tuple[int, int], list[Segment]]:
    """Segments by (q_len, padded number of keys).

    Segments with a history of at most ``longest`` queries are padded to a multiple of
    ``key_multiple`` keys, so that a batch of decode steps falls into few groups.
    """
    groups: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        num_keys = segment.k_len
        if segment.history and segment.q_len <= longest:
            num_keys = -(-num_keys // key_multiple) * key_multiple
        groups[segment.q_len, num_keys].append(segment)
    return groups


def are_adjacent(group: Sequence[Segment]) -> bool:
    """Whether the queries of equally long segments are one run of packed rows."""
    first = group[0]
    return group[-1].query_start - first.query_start == (len(group) - 1) * first.q_len


def queries(q: Tensor, group: Sequence[Segment]) -> Tensor:
    """[T, N, H] -> [B, q_len, N, H]."""
    start, q_len = group[0].query_start, group[0].q_len
    if are_adjacent(group):
        return q[start : start + len(group) * q_len].view(len(group), q_len, *q.shape[1:])
    return torch.stack([q[s.query_start : s.query_start + q_len] for s in group])


class Keys(Protocol):
    """Keys and values of a batch, wherever they lie."""

    def read(self, group: Sequence[Segment], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Kept keys ``start:stop`` of every segment: [B, S, K, H] and [B, S, K, Hv].

        Positions past a segment's end repeat its last key; the caller masks them.
        """


class PackedKeys:
    """Keys of all segments one after the other. k: [S, K, H], v: [S, K, Hv]."""

    def __init__(self, k: Tensor, v: Tensor, k_lens: Sequence[int]) -> None:
        self._k, self._v = k, v
        self._starts = list(accumulate(k_lens, initial=0))

    def read(self, group: Sequence[Segment], start: int, stop: int) -> tuple[Tensor, Tensor]:
        batch, length = len(group), stop - start
        rows = [self._starts[s.index] + s.skipped + start for s in group]
        is_run = rows == [rows[0] + i * length for i in range(batch)]
        if is_run and all(s.k_len >= stop for s in group):
            run = slice(rows[0], rows[0] + batch * length)
            k, v = self._k[run], self._v[run]
            return k.view(batch, length, *k.shape[1:]), v.view(batch, length, *v.shape[1:])
        position = _positions(tuple(group), start, stop, self._k.device)  # [B, S]
        starts = torch.tensor([self._starts[s.index] for s in group], device=self._k.device)
        row = (starts[:, None] + position).flatten()
        return _gather(self._k, row, batch), _gather(self._v, row, batch)


class CachedKeys:
    """Keys in cache blocks. k_cache: [num_blocks, block_size, K, H], v_cache likewise with Hv."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor, meta: Paged) -> None:
        self._k, self._v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        self._tables, self._block_size = meta.block_tables, meta.block_size

    def read(self, group: Sequence[Segment], start: int, stop: int) -> tuple[Tensor, Tensor]:
        position = _positions(tuple(group), start, stop, self._k.device)  # [B, S]
        request = [s.index for s in group]
        tables = (
            self._tables if request == list(range(len(self._tables))) else self._tables[request]
        )
        block = tables.gather(1, position // self._block_size)  # [B, S]
        slot = (block * self._block_size + position % self._block_size).flatten()
        return _gather(self._k, slot, len(group)), _gather(self._v, slot, len(group))


@lru_cache(maxsize=16)
def _positions(group: tuple[Segment, ...], start: int, stop: int, device: torch.device) -> Tensor:
    """Positions of the kept keys ``start:stop``, held at the last key: int64 [B, S].

    Remembered because every layer of a step asks for the same.
    """
    with torch.inference_mode(False):
        first = torch.tensor([s.skipped for s in group], device=device)[:, None]
        last = torch.tensor([s.skipped + s.k_len - 1 for s in group], device=device)[:, None]
        return torch.minimum(first + torch.arange(start, stop, device=device), last)


def _gather(x: Tensor, rows: Tensor, batch: int) -> Tensor:
    """[S, K, H], [B * S] -> [B, S, K, H]."""
    return x.index_select(0, rows).view(batch, -1, *x.shape[1:])
