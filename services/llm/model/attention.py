"""Grouped-query attention of the decoder, and the seam through which keys and values are kept."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mimo.nn.attention import AttentionSelector, BoundAttention
from mimo.nn.attention.base import AttentionNeeds, Sink, Varlen
from mimo.nn.linear import Linear
from mimo.nn.rotary import apply_rotary, rotary_frequencies, rotary_table
from services.llm.model.config import DecoderConfig, LayerSpec


class Attend(Protocol):
    """Where a step's keys and values go, and which ones its queries see.

    The model computes q, k and v of the step's tokens and never knows where the earlier ones are.
    """

    def __call__(
        self,
        layer: int,
        attention: BoundAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """q: [T, N, H], k: [T, K, H], v: [T, K, Hv], sinks: [N] -> [T, N, Hv].

        ``layer`` is :attr:`LayerSpec.index`: 0..L-1 for the main model, L+n for the MTP block n.
        """


class FullSequences:
    """Attend without a cache: every packed segment is a whole sequence."""

    def __init__(self, q_lens: tuple[int, ...]) -> None:
        self._segments = Varlen(q_lens=q_lens, k_lens=q_lens)

    def __call__(
        self,
        layer: int,
        attention: BoundAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        return attention(q, k, v, self._segments, sinks)


class Attention(nn.Module):
    """Attention of one layer, full or sliding.

    The projections are one matrix of rows [q; k; v], heads in their natural order, so that a step
    costs one product instead of three and queries and keys rotate together. A state dict holds them
    apart, as q_proj, k_proj and v_proj.
    """

    def __init__(
        self,
        config: DecoderConfig,
        spec: LayerSpec,
        selector: AttentionSelector,
        *,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__()
        wide = torch.promote_types(torch.float32, dtype)
        self.spec = spec
        self.value_scale = config.attention_value_scale
        self.qk_heads = spec.num_heads + spec.num_kv_heads
        self.qkv_rows = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.v_head_dim,
        )
        self.qkv_proj = Linear(
            config.hidden_size, sum(self.qkv_rows), bias=config.attention_bias, dtype=dtype
        )
        self.o_proj = Linear(
            spec.num_heads * spec.v_head_dim, config.hidden_size, bias=False, dtype=dtype
        )
        self.attention_sink_bias = (
            nn.Parameter(torch.zeros(spec.num_heads, dtype=wide)) if spec.has_sink else None
        )
        self.attention = selector.select(
            AttentionNeeds(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                v_head_dim=spec.v_head_dim,
                scale=spec.head_dim**-0.5,
                causal=True,
                left=config.swa_visible - 1 if spec.sliding else None,
                right=0,
                sink=Sink.COLUMN if spec.has_sink else Sink.NONE,
                paged=True,
                dtype=dtype,
                device=device,
            ),
            "window" if spec.sliding else "full",
        )
        self.register_state_dict_post_hook(_split_qkv)
        self.register_load_state_dict_pre_hook(_join_qkv)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x: [T, D], cos and sin: [T, rotary_dim / 2] -> [T, D]."""
        spec = self.spec
        q_rows, k_rows, v_rows = self.qkv_rows
        qk, v = self.qkv_proj(x).split_with_sizes((q_rows + k_rows, v_rows), dim=-1)
        qk = apply_rotary(qk.view(-1, self.qk_heads, spec.head_dim), cos, sin)
        q, k = qk.split_with_sizes((spec.num_heads, spec.num_kv_heads), dim=1)  # [T, N or K, H]
        # Scaled before it is stored: whoever reads the cache sees what attention sees.
        v = v.view(-1, spec.num_kv_heads, spec.v_head_dim) * self.value_scale
        out = attend(spec.index, self.attention, q, k, v, self.attention_sink_bias)  # [T, N, Hv]
        return self.o_proj(out.flatten(1))


def _split_qkv(attention: Attention, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for kind in ("weight", "bias"):
        fused = state.pop(f"{prefix}qkv_proj.{kind}", None)
        if fused is not None:
            parts = fused.split(attention.qkv_rows)  # views
            names = _qkv_names(prefix, kind)
            state.update(zip(names, parts, strict=True))


def _join_qkv(attention: Attention, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for kind in ("weight", "bias"):
        names = _qkv_names(prefix, kind)
        if all(name in state for name in names):
            state[f"{prefix}qkv_proj.{kind}"] = torch.cat([state.pop(name) for name in names])


def _qkv_names(prefix: str, kind: str) -> list[str]:
    return [f"{prefix}{part}_proj.{kind}" for part in "qkv"]


class Rotary(nn.Module):
    """Rotation angles of one kind of layer."""

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        # Neither a parameter nor a buffer: casting the model must not round the frequencies, and
        # building it on "meta" must not lose them.
        wide = torch.promote_types(torch.float32, dtype)
        self.inv_freq = rotary_frequencies(spec.rotary_dim, spec.rope_theta, wide).to(device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [T] -> cos, sin: [T, rotary_dim / 2]."""
        return rotary_table(positions, self.inv_freq)
