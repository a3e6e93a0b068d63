"""Exact attention on every device, in memory linear in the length of a segment.

Segments of one shape share a call. Long segments go through in tiles: a chunk of queries against
the keys it can see. Long segments without mask and sink use torch's fused kernel.

The bits of a segment depend on nothing but the segment: shapes, padding and memory layout of every
product follow from its own lengths, and the items of a batched product do not mix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mimo.nn.attention.base import AttentionNeeds, Paged, Sink, Varlen
from mimo.nn.attention.mask import Mask
from mimo.nn.attention.plan import Group, Plan, Tile, make_plan
from mimo.nn.attention.segment import Rows, Segment


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
        return _attend(needs, make_plan(needs, meta, q.device), q, k, v, sinks)

    def paged(
        self,
        needs: AttentionNeeds,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: Paged,
        sinks: Tensor | None,
    ) -> Tensor:
        plan = make_plan(needs, meta, q.device)
        return _attend(needs, plan, q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), sinks)


def _attend(
    needs: AttentionNeeds, plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    """q: [T, N, H], k: [S, K, H], v: [S, K, Hv] -> [T, N, Hv]."""
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [K, S, ..]
    outputs = [_attend_group(needs, group, q[group.queries], k, v, sinks) for group in plan.groups]
    if not outputs:
        return q.new_empty(0, needs.num_heads, needs.v_head_dim)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if plan.order is None else out.index_select(0, plan.order)


def _attend_group(
    needs: AttentionNeeds, group: Group, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    """q: [B * q_len, N, H], k: [K, S, H], v: [K, S, Hv] -> [B * q_len, N, Hv]."""
    if group.is_plain:
        keys = group.tiles[0].keys
        return _fused(needs, q, _read(k, keys), _read(v, keys))
    q = q.view(len(group.segments), group.q_len, needs.num_heads, needs.head_dim)
    outputs = [_attend_tile(needs, group.segments, tile, q, k, v, sinks) for tile in group.tiles]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)  # [B, q_len, N, Hv]
    return out.reshape(-1, needs.num_heads, needs.v_head_dim)


def _attend_tile(
    needs: AttentionNeeds,
    segments: Sequence[Segment],
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """q: [B, q_len, N, H], k: [K, S, H], v: [K, S, Hv] -> [B, Q, N, Hv] of the tile's queries."""
    k, v = _read(k, tile.keys), _read(v, tile.keys)  # [K, B * S, ..]
    bias = tile.mask.tensor() if isinstance(tile.mask, Mask) else tile.mask
    if needs.sink is Sink.KEY0 and tile.first_key == 0:
        assert sinks is not None
        bias = _add_at_first_key(bias, sinks, segments, k.shape[1] // len(segments))
    column = sinks if needs.sink is Sink.COLUMN else None
    chunk = q[:, tile.first_query : tile.last_query]
    return _softmax_product(chunk, k, v, bias, column, needs.scale)


def _read(x: Tensor, rows: Rows) -> Tensor:
    """[K, S, H] -> [K, B * S, H] of the rows."""
    return x[:, rows] if isinstance(rows, slice) else x.index_select(1, rows)


def _fused(needs: AttentionNeeds, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [q_len, N, H], k and v: [K, k_len, H] -> [q_len, N, H]."""
    # Expanded here, because not every kernel behind this function knows grouped heads, and the one
    # that knows everything holds all q_len x k_len scores.
    group = needs.num_heads // needs.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=0).unsqueeze(0) for x in (k, v))  # [1, N, k_len, H]
    q = q.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=needs.causal, scale=needs.scale)
    return out[0].transpose(0, 1)


def _softmax_product(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, column: Tensor | None, scale: float
) -> Tensor:
    """Softmax attention in at least float32, one matrix product per kv head and segment.

    q: [B, Q, N, H], k: [K, B * S, H], v: [K, B * S, Hv]; bias: [B or 1, N or 1, Q, S] is added to
    the scores, column: [N] is one more logit of every query -> [B, Q, N, Hv]
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, v_head_dim = k.shape[0], k.shape[1] // batch, v.shape[2]
    group = num_heads // num_kv_heads
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)

    # Copies, never views: the layout of an operand selects the kernel, and with it the last bits.
    k = k.to(wide).contiguous().view(num_kv_heads * batch, num_keys, head_dim)
    v = v.to(wide).contiguous().view(num_kv_heads * batch, num_keys, v_head_dim)
    q = q.to(wide).view(batch, num_queries, num_kv_heads, group, head_dim) * scale
    q = q.permute(2, 0, 3, 1, 4).reshape(num_kv_heads * batch, group * num_queries, head_dim)

    scores = torch.bmm(q, k.transpose(1, 2))  # [K*B, g*Q, S]
    if bias is not None or column is not None:
        by_head = (num_kv_heads, batch, group, num_queries)
        scores = scores.view(*by_head, num_keys)
        if bias is not None:
            scores = scores + _by_kv_head(bias, num_kv_heads)
        if column is not None:
            logits = column.to(wide).view(num_kv_heads, 1, group, 1, 1).expand(*by_head, 1)
            scores = torch.cat((scores, logits), dim=-1)
        scores = scores.view(num_kv_heads * batch, group * num_queries, -1)
    weights = scores.softmax(dim=-1)
    out = torch.bmm(weights[..., :num_keys], v)  # [K*B, g*Q, Hv]
    out = out.to(dtype).view(num_kv_heads, batch, group, num_queries, v_head_dim)
    return out.permute(1, 3, 0, 2, 4).reshape(batch, num_queries, num_heads, v_head_dim)


def _by_kv_head(bias: Tensor, num_kv_heads: int) -> Tensor:
    """[B or 1, N or 1, Q, S] -> [K or 1, B or 1, g or 1, Q, S]."""
    if bias.shape[1] == 1:
        return bias.unsqueeze(0)
    batch, _, num_queries, num_keys = bias.shape
    return bias.view(batch, num_kv_heads, -1, num_queries, num_keys).transpose(0, 1)


def _add_at_first_key(
    mask: Tensor | None, sinks: Tensor, group: Sequence[Segment], num_keys: int
) -> Tensor:
    """The mask, or nothing, with ``sinks`` [N] at the key that is its segment's first.

    -> [B, N, Q or 1, S]
    """
    wide = torch.promote_types(sinks.dtype, torch.float32)
    has_first = [[float(segment.skipped == 0)] for segment in group]
    at_first = torch.tensor(has_first, dtype=wide, device=sinks.device) * sinks.to(wide)  # [B, N]
    bias = F.pad(at_first[:, :, None, None], (0, num_keys - 1))  # [B, N, 1, S]
    return bias if mask is None else mask + bias
