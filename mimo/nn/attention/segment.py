"""Segments of a packed batch, grouped by shape, and where their keys lie."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from mimo.nn.attention.base import Paged

Rows = slice | Tensor  # of packed queries or of keys, int64

KEY_MULTIPLE = 64


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
    segments: Sequence[Segment], longest: int
) -> dict[tuple[int, int], list[Segment]]:
    """Segments by (q_len, padded number of keys).

    Segments with a history of at most ``longest`` queries are padded to a multiple of KEY_MULTIPLE
    keys, so that a batch of decode steps falls into few groups. Those that fill their window are
    equally long as they are.
    """
    groups: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        num_keys = segment.k_len
        if segment.history and segment.q_len <= longest and not segment.skipped:
            num_keys = -(-num_keys // KEY_MULTIPLE) * KEY_MULTIPLE
        groups[segment.q_len, num_keys].append(segment)
    return groups


def query_rows(group: Sequence[Segment], device: torch.device) -> Rows:
    """Packed rows of the queries of equally long segments, one segment after the other."""
    start, q_len = group[0].query_start, group[0].q_len
    if group[-1].query_start - start == (len(group) - 1) * q_len:
        return slice(start, start + len(group) * q_len)
    starts = torch.tensor([segment.query_start for segment in group], device=device)
    return (starts[:, None] + torch.arange(q_len, device=device)).flatten()


class Keys(Protocol):
    """Where the keys and values of a batch lie."""

    def rows(self, group: Sequence[Segment], start: int, stop: int) -> Rows:
        """Rows of the kept keys ``start:stop`` of every segment: B * S of them.

        Positions past a segment's end repeat its last key; the caller masks them.
        """


class PackedKeys:
    """Keys of all segments one after the other."""

    def __init__(self, k_lens: Sequence[int], device: torch.device) -> None:
        self._starts = list(accumulate(k_lens, initial=0))
        self._device = device

    def rows(self, group: Sequence[Segment], start: int, stop: int) -> Rows:
        length = stop - start
        firsts = [self._starts[s.index] + s.skipped + start for s in group]
        is_run = firsts == [firsts[0] + i * length for i in range(len(group))]
        if is_run and all(s.k_len >= stop for s in group):
            return slice(firsts[0], firsts[0] + len(group) * length)
        starts = torch.tensor([self._starts[s.index] for s in group], device=self._device)
        return (starts[:, None] + _positions(group, start, stop, self._device)).flatten()


class CachedKeys:
    """Keys in cache blocks. A row is ``block * block_size + offset``."""

    def __init__(self, meta: Paged, device: torch.device) -> None:
        self._meta = meta
        self._device = device

    def rows(self, group: Sequence[Segment], start: int, stop: int) -> Rows:
        tables, block_size = self._meta.block_tables, self._meta.block_size
        request = [s.index for s in group]
        if request != list(range(len(tables))):
            tables = tables[request]
        position = _positions(group, start, stop, self._device)  # [B, S]
        block = tables.gather(1, position // block_size)
        return (block * block_size + position % block_size).flatten()


def _positions(group: Sequence[Segment], start: int, stop: int, device: torch.device) -> Tensor:
    """Positions of the kept keys ``start:stop``, held at the last key: int64 [B, S]."""
    bounds = [[s.skipped + start for s in group], [s.skipped + s.k_len - 1 for s in group]]
    first, last = torch.tensor(bounds, device=device)[:, :, None]  # [B, 1] each
    return torch.minimum(first + torch.arange(stop - start, device=device), last)
