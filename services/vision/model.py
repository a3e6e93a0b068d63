"""The MiMo-V2.5 vision tower: patches of images and clips -> embeddings for the language model.

A pre-norm transformer over single frames (pairs of video frames): attention never crosses from one
frame to another. A few blocks attend to the whole frame; the others see a one-dimensional band of
neighbours, half of them along the rows of 2x2 units and half along the columns, with a learned sink
per head. At the end each unit of four patches becomes one token.

Module attributes carry the checkpoint's tensor names without the prefix ``visual.``.
"""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimo.nn.attention import AttentionSelector, BoundAttention
from mimo.nn.attention.base import AttentionNeeds, Sink, Varlen
from mimo.nn.mlp import SwiGLU
from mimo.nn.norm import RMSNorm
from mimo.nn.rotary import apply_rotary, rotary_frequencies, rotary_table
from services.vision.config import NORM_EPS, ROPE_THETA, MergerNorm, SinkMode, VisionTowerConfig
from services.vision.window import Grid, PatchLayout, reorder

SINKS = {SinkMode.KEY0: Sink.KEY0, SinkMode.COLUMN: Sink.COLUMN}

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each [P, H / 2], float32 or wider


class VisionTower(nn.Module):
    """The whole tower. Plain and differentiable.

    Parameters are made in ``dtype`` on torch's current default device, so that a loader can build
    them on "meta"; ``device`` is where the arithmetic will run. ``merger_biases`` names those of
    the merger's layers ``ln_q``, ``mlp.0`` and ``mlp.2`` that have a bias; published ones do not.
    """

    def __init__(
        self,
        config: VisionTowerConfig,
        selector: AttentionSelector,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        merger_biases: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(
            Block(config, i, _select(config, i, selector, dtype, device))
            for i in range(config.depth)
        )
        self.merger = Merger(config, merger_biases)
        self.to(dtype)
        # Never narrower than float32, and no buffer: casting the module must not round it.
        wide = torch.promote_types(dtype, torch.float32)
        self._inv_freq = rotary_frequencies(config.head_dim // 2, ROPE_THETA, wide).to(device)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode packed items. patches: [P, C * T * P * P] in row order -> [M, out_hidden_size].

        ``grids`` are the items' (t, h, w); together they have P patches. Tokens come out in the
        items' order, t * h * w / 4 for each.
        """
        unit_size = self.config.merge_factor
        layout = PatchLayout.of(grids, self.config.spatial_merge_size, patches.device)
        segments = Varlen(q_lens=layout.segment_lens, k_lens=layout.segment_lens)
        by_rows = self._rotary(layout.positions)
        cos, sin = (reorder(table, layout.column_order, unit_size) for table in by_rows)
        by_columns = (cos, sin)

        hidden = self.patch_embed(patches)  # [P, D]
        in_columns = False
        for index, block in enumerate(self.blocks):
            if self.config.is_column_order(index) != in_columns:
                in_columns = not in_columns
                order = layout.column_order if in_columns else layout.row_order
                hidden = reorder(hidden, order, unit_size)  # [P, D]
            hidden = block(hidden, by_columns if in_columns else by_rows, segments)  # [P, D]
        if in_columns:
            hidden = reorder(hidden, layout.row_order, unit_size)  # [P, D]
        tokens: Tensor = self.merger(hidden)  # [M, out_hidden_size]
        return tokens

    def _rotary(self, positions: Tensor) -> Rotary:
        """Rotary tables of patches at (row, column): [P, 2] -> two of [P, H / 2].

        The first half of the angles turns with the row, the second with the column, both through
        the same H / 4 frequencies. Time is not encoded: every frame starts afresh.
        """
        cos, sin = rotary_table(positions.flatten(), self._inv_freq)  # [2 P, H / 4]
        return cos.view(len(positions), -1), sin.view(len(positions), -1)


class PatchEmbed(nn.Module):
    """A convolution whose stride is its kernel, that is one matrix product per patch."""

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        size = config.patch_size
        kernel = (config.temporal_patch_size, size, size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, kernel, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """[P, C * T * P * P] -> [P, D]"""
        weight = self.proj.weight.flatten(1)  # [D, C * T * P * P]
        return F.linear(patches.to(weight.dtype), weight)


class Block(nn.Module):
    def __init__(self, config: VisionTowerConfig, index: int, attention: BoundAttention) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS)
        self.attn = Attention(config, attention, has_sink=config.has_sink(index))
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=True)

    def forward(self, hidden: Tensor, rotary: Rotary, segments: Varlen) -> Tensor:
        """[P, D] -> [P, D]"""
        hidden = hidden + self.attn(self.norm1(hidden), rotary, segments)
        hidden = hidden + self.mlp(self.norm2(hidden))
        return hidden


class Attention(nn.Module):
    """Grouped-query attention inside each segment; full or banded as ``attention`` was bound."""

    def __init__(
        self, config: VisionTowerConfig, attention: BoundAttention, *, has_sink: bool
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_key_value_heads
        self.attention = attention
        num_parts = self.num_heads + 2 * self.num_kv_heads  # rows are all of q, then k, then v
        self.qkv = nn.Linear(config.hidden_size, num_parts * config.head_dim)
        self.proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size)
        # A start to train from, never a stand-in for a tensor that a checkpoint lacks: zero means
        # "no sink" to key0 but not to column.
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if has_sink else None  # [N]

    def forward(self, x: Tensor, rotary: Rotary, segments: Varlen) -> Tensor:
        """[P, D] -> [P, D]"""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)  # [P, N + 2 K, H]
        qk, v = qkv[:, : -self.num_kv_heads], qkv[:, -self.num_kv_heads :]
        qk = apply_rotary(qk, *rotary)  # [P, N + K, H]
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        heads = self.attention(q, k, v, segments, self.sinks)  # [P, N, H]
        out: Tensor = self.proj(heads.flatten(1))  # [P, D]
        return out


class Merger(nn.Module):
    """Turns each unit of neighbouring patches into one token."""

    def __init__(self, config: VisionTowerConfig, biases: Collection[str]) -> None:
        super().__init__()
        width = config.hidden_size * config.merge_factor
        if config.vision_merger_norm is MergerNorm.RMS:
            self.ln_q: nn.Module = RMSNorm(config.hidden_size, NORM_EPS)
        else:
            self.ln_q = nn.LayerNorm(config.hidden_size, NORM_EPS, bias="ln_q" in biases)
        self.mlp = nn.Sequential(
            nn.Linear(width, width, bias="mlp.0" in biases),
            nn.GELU(),
            nn.Linear(width, config.out_hidden_size, bias="mlp.2" in biases),
        )
        self.width = width

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, D] -> [M, out_hidden_size]"""
        tokens: Tensor = self.mlp(self.ln_q(hidden).reshape(-1, self.width))
        return tokens


def _select(
    config: VisionTowerConfig,
    index: int,
    selector: AttentionSelector,
    dtype: torch.dtype,
    device: str,
) -> BoundAttention:
    """The attention of one block: over the whole segment, or a band with a sink."""
    is_full = config.is_full(index)
    band = None if is_full else config.visual_token_window_size
    needs = AttentionNeeds(
        num_heads=config.num_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        causal=False,
        left=band,
        right=band,
        sink=SINKS[config.vision_sinks] if config.has_sink(index) else Sink.NONE,
        paged=False,
        dtype=dtype,
        device=device,
    )
    return selector.select(needs, "full" if is_full else "band")
