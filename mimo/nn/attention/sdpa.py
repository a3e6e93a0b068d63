"""Exact attention on every device, in memory linear in the length of a segment.

Segments of one shape share a call. Long segments go through in tiles: a chunk of queries against
the keys it can see. Long segments without mask and sink use torch's fused kernel.

The bits of a segment depend on nothing but the segment: shapes, padding and memory layout of every
product follow from its own lengths, and the items of a batched product do not mix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mimo.nn.attention.base import AttentionNeeds, Paged, Sink, Varlen
from mimo.nn.attention.segment import (
    CachedKeys,
    Keys,
    PackedKeys,
    Segment,
    are_adjacent,
    group_by_shape,
    queries,
    trim,
)

QUERY_CHUNK = 128
KEY_MULTIPLE = 64
MAX_SCORES = 1 << 24  # scores held by one call; 64 MiB in float32


class SdpaBackend:
    """Scaled dot-product attention from torch's own products. Differentiable."""

    name = "sdpa"

    def unsupported(self, needs: AttentionNeeds) -> str | None:
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
        segments = trim(meta.q_lens, meta.k_lens, needs.left)
        return _attend(needs, q, PackedKeys(k, v, meta.k_lens), list(segments), sinks)

    def paged(
        self,
        needs: AttentionNeeds,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: Paged,
        sinks: Tensor | None,
    ) -> Tensor:
        segments = trim(meta.q_lens, meta.context_lens, needs.left)
        return _attend(needs, q, CachedKeys(k_cache, v_cache, meta), list(segments), sinks)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries ``first_query:last_query`` of a segment against kept keys ``first_key:last_key``."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int


def _attend(
    needs: AttentionNeeds,
    q: Tensor,
    keys: Keys,
    segments: Sequence[Segment],
    sinks: Tensor | None,
) -> Tensor:
    """q: [T, N, H] -> [T, N, Hv]."""
    pieces: list[tuple[int, Tensor]] = []  # first packed row, outputs of that row and on
    groups = group_by_shape(segments, KEY_MULTIPLE, longest=QUERY_CHUNK)
    for (q_len, num_keys), members in groups.items():
        # The tiles of a long segment follow from its own history, so it goes alone.
        scores = needs.num_heads * q_len * num_keys
        size = 1 if q_len > QUERY_CHUNK else max(1, MAX_SCORES // scores)
        for start in range(0, len(members), size):
            group = members[start : start + size]
            out = _attend_group(needs, queries(q, group), keys, group, num_keys, sinks)
            if are_adjacent(group):
                pieces.append((group[0].query_start, out.flatten(0, 1)))
            else:
                pieces.extend((s.query_start, rows) for s, rows in zip(group, out, strict=True))
    if not pieces:
        return q.new_empty(0, needs.num_heads, needs.v_head_dim)
    pieces.sort(key=lambda piece: piece[0])
    return pieces[0][1] if len(pieces) == 1 else torch.cat([rows for _, rows in pieces])


def _attend_group(
    needs: AttentionNeeds,
    q: Tensor,
    keys: Keys,
    group: Sequence[Segment],
    num_keys: int,
    sinks: Tensor | None,
) -> Tensor:
    """q: [B, q_len, N, H] -> [B, q_len, N, Hv]."""
    if _is_plain(needs, group[0]):
        return _fused(needs, q, *keys.read(group, 0, num_keys))
    outputs = []
    for tile in _tiles(needs, group[0], num_keys):
        k, v = keys.read(group, tile.first_key, tile.last_key)
        mask = _tile_mask(needs, group, tile, q)
        if needs.sink is Sink.KEY0 and tile.first_key == 0:
            assert sinks is not None
            mask = _add_at_first_key(mask, sinks, group, k)
        column = sinks if needs.sink is Sink.COLUMN else None
        chunk = q[:, tile.first_query : tile.last_query]
        outputs.append(_softmax_product(chunk, k, v, mask, column, needs.scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _is_plain(needs: AttentionNeeds, segment: Segment) -> bool:
    """Whether torch's fused kernel computes just this, and the segment is long enough to gain."""
    sees_all = needs.keys_after is None or (needs.causal and segment.history == 0)
    return (
        segment.q_len > QUERY_CHUNK
        and sees_all
        and needs.left is None
        and needs.sink is Sink.NONE
        and needs.head_dim == needs.v_head_dim
    )


def _fused(needs: AttentionNeeds, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [1, q_len, N, H], k and v: [1, k_len, K, H] -> [1, q_len, N, H]."""
    # Expanded here, because not every kernel behind this function knows grouped heads, and the one
    # that knows everything holds all q_len x k_len scores.
    group = needs.num_heads // needs.num_kv_heads
    k = k.transpose(1, 2).repeat_interleave(group, dim=1)  # [1, N, k_len, H]
    v = v.transpose(1, 2).repeat_interleave(group, dim=1)
    q = q.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=needs.causal, scale=needs.scale)
    return out.transpose(1, 2)


def _tiles(needs: AttentionNeeds, segment: Segment, num_keys: int) -> list[_Tile]:
    """The pieces a segment is computed in; short ones are a single piece over all kept keys."""
    q_len, history = segment.q_len, segment.history
    if q_len <= QUERY_CHUNK:
        return [_Tile(0, q_len, 0, num_keys)]
    tiles = []
    for start in range(0, q_len, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, q_len)
        first_key, last_key = 0, num_keys
        if needs.left is not None:
            first_key = max(0, history + start - needs.left)
        if needs.keys_after is not None:
            last_key = min(num_keys, history + stop + needs.keys_after)
        tiles.append(_Tile(start, stop, first_key, last_key))
    return tiles


def _softmax_product(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, column: Tensor | None, scale: float
) -> Tensor:
    """Softmax attention in at least float32, one matrix product per kv head.

    q: [B, Q, N, H], k: [B, S, K, H], v: [B, S, K, Hv]; bias: [B or 1, N or 1, Q, S] is added to the
    scores, column: [N] is one more logit of every query -> [B, Q, N, Hv]
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)

    # Copies, never views: the layout of an operand selects the kernel, and with it the last bits.
    q = q.to(wide).reshape(batch, num_queries, num_kv_heads, group, head_dim)
    q = (q.permute(0, 2, 3, 1, 4) * scale).contiguous()  # [B, K, g, Q, H]
    q = q.view(batch * num_kv_heads, group * num_queries, head_dim)
    k, v = _by_head(k.to(wide)), _by_head(v.to(wide))  # [B*K, S, H], [B*K, S, Hv]

    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, num_heads, num_queries, num_keys)
    if bias is not None:
        scores = scores + bias
    if column is not None:
        logits = column.to(wide).view(1, -1, 1, 1).expand(batch, num_heads, num_queries, 1)
        scores = torch.cat((scores, logits), dim=-1)
    weights = scores.softmax(dim=-1).view(batch * num_kv_heads, group * num_queries, -1)
    out = torch.bmm(weights[..., :num_keys], v)  # [B*K, g*Q, Hv]
    return out.view(batch, num_heads, num_queries, -1).transpose(1, 2).to(dtype)


def _by_head(x: Tensor) -> Tensor:
    """[B, S, K, H] -> contiguous [B*K, S, H]."""
    return x.transpose(1, 2).contiguous().flatten(0, 1)


def _add_at_first_key(
    mask: Tensor | None, sinks: Tensor, group: Sequence[Segment], k: Tensor
) -> Tensor:
    """The mask, or nothing, with ``sinks`` [N] at the key that is its segment's first.

    -> [B, N, Q or 1, S]
    """
    wide = torch.promote_types(sinks.dtype, torch.float32)
    has_first = [[float(segment.skipped == 0)] for segment in group]
    at_first = torch.tensor(has_first, dtype=wide, device=k.device) * sinks.to(wide)  # [B, N]
    bias = F.pad(at_first[:, :, None, None], (0, k.shape[1] - 1))  # [B, N, 1, S]
    return bias if mask is None else mask + bias


def _tile_mask(
    needs: AttentionNeeds, group: Sequence[Segment], tile: _Tile, q: Tensor
) -> Tensor | None:
    """0 where a query sees a key, else minus infinity. [B or 1, 1, Q, S], None if all is seen."""
    num_queries, num_keys = tile.last_query - tile.first_query, tile.last_key - tile.first_key
    # Everything is counted from the tile's first key.
    offsets = tuple(s.history + tile.first_query - tile.first_key for s in group)
    ends = tuple(min(s.k_len - tile.first_key, num_keys) for s in group)
    left, right = needs.left, needs.keys_after
    hides_left = left is not None and max(offsets) + num_queries - 1 - left > 0
    hides_right = right is not None and min(offsets) + right < num_keys - 1
    if not (hides_left or hides_right or min(ends) < num_keys):
        return None
    if len({*zip(offsets, ends, strict=True)}) == 1:
        offsets, ends = offsets[:1], ends[:1]
    wide = torch.promote_types(q.dtype, torch.float32)
    return _mask(offsets, ends, num_queries, num_keys, left, right, wide, q.device)


@lru_cache(maxsize=16)
def _mask(
    offsets: tuple[int, ...],
    ends: tuple[int, ...],
    num_queries: int,
    num_keys: int,
    left: int | None,
    right: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Query i of segment b stands at ``offsets[b] + i`` and the segment ends before ``ends[b]``.

    Remembered because it is the same for the layers of a step and for the inner tiles of a window.
    """
    with torch.inference_mode(False):
        offset, end = torch.tensor([offsets, ends], device=device)[:, :, None, None, None]
        query = offset + torch.arange(num_queries, device=device)[:, None]  # [B, 1, Q, 1]
        key = torch.arange(num_keys, device=device)
        hidden = (key >= end).expand(-1, -1, num_queries, -1)  # [B, 1, Q, S]
        if right is not None:
            hidden = hidden | (key > query + right)
        if left is not None:
            hidden = hidden | (key < query - left)
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return zeros.masked_fill_(hidden, float("-inf"))
