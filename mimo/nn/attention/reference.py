"""The obviously right backend: one segment at a time, every score, at least float32."""

from itertools import accumulate

import torch
from torch import Tensor

from mimo.nn.attention.base import AttentionNeeds, Paged, Sink, Varlen


class ReferenceBackend:
    """Dense masked softmax. Memory grows with the square of a segment; for tests and probes."""

    name = "reference"

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
        k_starts = accumulate(meta.k_lens, initial=0)
        keys = [
            (k[start : start + k_len], v[start : start + k_len])
            for start, k_len in zip(k_starts, meta.k_lens, strict=False)
        ]
        return self._packed(needs, q, keys, meta.q_lens, sinks)

    def paged(
        self,
        needs: AttentionNeeds,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: Paged,
        sinks: Tensor | None,
    ) -> Tensor:
        keys = []
        for table, context_len in zip(meta.block_tables, meta.context_lens, strict=True):
            blocks = table[: -(-context_len // meta.block_size)].long()
            k = k_cache[blocks].flatten(0, 1)[:context_len]  # [S, K, H]
            v = v_cache[blocks].flatten(0, 1)[:context_len]
            keys.append((k, v))
        return self._packed(needs, q, keys, meta.q_lens, sinks)

    def _packed(
        self,
        needs: AttentionNeeds,
        q: Tensor,
        keys: list[tuple[Tensor, Tensor]],
        q_lens: tuple[int, ...],
        sinks: Tensor | None,
    ) -> Tensor:
        outputs = [
            self._segment(needs, queries, k, v, sinks)
            for queries, (k, v) in zip(torch.split(q, list(q_lens)), keys, strict=True)
        ]
        return torch.cat(outputs) if outputs else q.new_empty(0, needs.num_heads, needs.v_head_dim)

    def _segment(
        self, needs: AttentionNeeds, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """q: [q_len, N, H], k: [k_len, K, H], v: [k_len, K, Hv] -> [q_len, N, Hv]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        group = needs.num_heads // needs.num_kv_heads
        k = k.to(wide).repeat_interleave(group, dim=1)  # [k_len, N, H]
        v = v.to(wide).repeat_interleave(group, dim=1)  # [k_len, N, Hv]
        scores = torch.einsum("qnh,knh->nqk", q.to(wide), k) * needs.scale

        key = torch.arange(k.shape[0], device=q.device)[None, :]
        query = key[:, k.shape[0] - q.shape[0] :].T  # the last q_len positions
        visible = torch.ones_like(scores[0], dtype=torch.bool)
        if needs.causal:
            visible &= key <= query
        if needs.left is not None:
            visible &= key >= query - needs.left
        if needs.right is not None:
            visible &= key <= query + needs.right
        scores = scores.masked_fill(~visible, float("-inf"))

        if needs.sink is Sink.KEY0:
            assert sinks is not None
            first = scores[..., :1] + sinks.to(wide)[:, None, None]
            scores = torch.cat((first, scores[..., 1:]), dim=-1)
        if needs.sink is Sink.COLUMN:
            assert sinks is not None
            column = sinks.to(wide)[:, None, None].expand(-1, q.shape[0], 1)
            weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)  # [N, q_len, k_len]
        return torch.einsum("nqk,knh->qnh", weights, v).to(q.dtype)
