"""Which queries meet which keys, worked out once for all layers that share a batch.

Segments of one shape form a group and share a call; a long segment goes alone, in tiles of queries
with the keys that they can see. All of it follows from lengths, windows and block tables, so that a
layer of a decode step is left with a handful of products.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mimo.nn.attention.base import AttentionNeeds, Paged, Sink, Varlen
from mimo.nn.attention.mask import Mask
from mimo.nn.attention.segment import (
    CachedKeys,
    Keys,
    PackedKeys,
    Rows,
    Segment,
    group_by_shape,
    query_rows,
    trim,
)

QUERY_CHUNK = 128
MAX_SCORES = 1 << 24  # scores held by one call; 64 MiB in float32
MAX_CACHED_KEYS = 1536  # of one call on a CPU: copies of more leave the core's cache before use


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries ``first_query:last_query`` of every segment against kept keys, ``first_key`` on.

    ``mask`` is None when every query sees every key. Those of long segments are large and wait
    until they are needed; the others are there.
    """

    first_query: int
    last_query: int
    first_key: int
    keys: Rows  # B * S of them
    mask: Mask | Tensor | None


@dataclass(frozen=True, slots=True)
class Group:
    """Segments of one shape."""

    segments: tuple[Segment, ...]
    queries: Rows  # B * q_len of them
    tiles: tuple[Tile, ...]
    is_plain: bool  # one long segment, and torch's fused kernel computes just this

    @property
    def q_len(self) -> int:
        return self.segments[0].q_len


@dataclass(frozen=True, slots=True)
class Plan:
    """``order`` [T] puts the groups' outputs, one after the other, back in the order of the packed
    queries; None where they are in it."""

    groups: tuple[Group, ...]
    order: Tensor | None


@lru_cache(maxsize=8)
def make_plan(needs: AttentionNeeds, meta: Varlen | Paged, device: torch.device) -> Plan:
    """Remembered, because the layers of a step ask for the same."""
    with torch.inference_mode(False):  # what is remembered must serve under autograd, too
        groups = tuple(_groups(needs, meta, device))
        starts = [segment.query_start for group in groups for segment in group.segments]
        if starts == sorted(starts):
            return Plan(groups, None)
        rows = torch.arange(sum(meta.q_lens), device=device)
        return Plan(groups, torch.cat([rows[group.queries] for group in groups]).argsort())


def _groups(needs: AttentionNeeds, meta: Varlen | Paged, device: torch.device) -> Iterator[Group]:
    keys: Keys
    if isinstance(meta, Paged):
        k_lens, keys = meta.context_lens, CachedKeys(meta, device)
    else:
        k_lens, keys = meta.k_lens, PackedKeys(meta.k_lens, device)
    segments = list(trim(meta.q_lens, k_lens, needs.left))
    for (q_len, num_keys), members in group_by_shape(segments, QUERY_CHUNK).items():
        # The tiles of a long segment follow from its own history, so it goes alone.
        scores = needs.num_heads * q_len * num_keys
        size = 1 if q_len > QUERY_CHUNK else max(1, MAX_SCORES // scores)
        if isinstance(meta, Paged) and device.type == "cpu":
            size = min(size, max(1, MAX_CACHED_KEYS // num_keys))
        for start in range(0, len(members), size):
            group = tuple(members[start : start + size])
            queries = query_rows(group, device)
            if _is_plain(needs, group[0]):
                whole = Tile(0, q_len, 0, keys.rows(group, 0, num_keys), None)
                yield Group(group, queries, (whole,), is_plain=True)
            else:
                tiles = tuple(_tiles(needs, group, num_keys, keys, device))
                yield Group(group, queries, tiles, is_plain=False)


def _is_plain(needs: AttentionNeeds, segment: Segment) -> bool:
    """Whether the fused kernel computes just this, and the segment is long enough to gain."""
    sees_all = needs.keys_after is None or (needs.causal and segment.history == 0)
    return (
        segment.q_len > QUERY_CHUNK
        and sees_all
        and needs.left is None
        and needs.sink is Sink.NONE
        and needs.head_dim == needs.v_head_dim
    )


def _tiles(
    needs: AttentionNeeds,
    group: Sequence[Segment],
    num_keys: int,
    keys: Keys,
    device: torch.device,
) -> Iterator[Tile]:
    """Short segments are a single tile over all kept keys."""
    q_len, history = group[0].q_len, group[0].history
    is_long = q_len > QUERY_CHUNK
    for start in range(0, q_len, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, q_len)
        first, last = 0, num_keys
        if is_long and needs.left is not None:
            first = max(0, history + start - needs.left)
        if is_long and needs.keys_after is not None:
            last = min(num_keys, history + stop + needs.keys_after)
        offsets = tuple(s.history + start - first for s in group)
        ends = tuple(min(s.k_len, last) - first for s in group)
        wide = torch.promote_types(needs.dtype, torch.float32)
        mask = Mask.of(
            offsets, ends, (stop - start, last - first), needs.left, needs.keys_after, wide, device
        )
        built = mask if mask is None or is_long else mask.tensor()
        yield Tile(start, stop, first, keys.rows(group, first, last), built)
