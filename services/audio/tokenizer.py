"""The audio tokenizer's encoder: mel frames at 100 Hz to code frames at 25 Hz.

Segments of many clips run packed in one tensor. Nothing here lets one segment see another: the
convolutions run over a line with gaps between segments, attention is told the lengths, and the pool
takes its pairs by index.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimo.nn.attention import AttentionNeeds, AttentionSelector, BoundAttention, Sink, Varlen
from mimo.nn.rotary import apply_rotary, rotary_frequencies, rotary_table
from services.audio.config import AudioTokenizerConfig, Rounding
from services.audio.quantizer import ResidualQuantizer
from services.audio.segments import Segment


class AudioTokenizer(nn.Module):
    """Packed mel segments to features, and features to codes."""

    def __init__(
        self,
        config: AudioTokenizerConfig,
        selector: AttentionSelector,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.conv1 = nn.Conv1d(config.n_mels, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.layers = nn.ModuleList(
            _Layer(config, _select(config, index, selector, dtype, device))
            for index in range(config.encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(width)
        self.down_sample_layer = nn.Sequential(
            nn.Conv1d(width, width, kernel_size=2, stride=2, bias=False), nn.GELU()
        )
        self.down_sample_norm = nn.LayerNorm(width)
        self.quantizer = ResidualQuantizer(config)

    def forward(self, mel: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Features before quantisation. mel: [sum of frames, mels] -> [sum of codes, D].

        The segments lie one after the other in ``mel`` and in the result.
        """
        x = self._stem(mel.to(self.conv1.weight.dtype), segments)  # [T, D]
        lengths = tuple(segment.num_positions for segment in segments)
        rotary = self._rotary(lengths, x)
        packing = Varlen(q_lens=lengths, k_lens=lengths)
        skip: Tensor | None = None
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, rotary, packing)
            if number == self.config.encoder_skip_layer_id:
                skip = x
        if skip is not None:
            x = x + skip
        return self._pool(self.layer_norm(x), segments)  # [sum of codes, D]

    def tokenize(
        self, mel: Tensor, segments: Sequence[Segment], num_codebooks: int | None = None
    ) -> Tensor:
        """Codes of packed segments. mel: [sum of frames, mels] -> [sum of codes, C] int64."""
        return self.quantizer.encode(self(mel, segments), num_codebooks)

    def _stem(self, mel: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Two convolutions over all segments at once. -> [T, D], T = sum of ceil(frames / 2)."""
        line = _Line.of(segments, mel.device)
        x = mel.new_zeros(line.length, mel.shape[1]).index_copy(0, line.frames, mel)  # [W, mels]
        x = F.gelu(self.conv1(x.T[None]))  # [1, D, W]
        x = x.masked_fill(~line.visible, 0)  # each segment sees zeros beyond its edge, as if alone
        x = F.gelu(self.conv2(x))  # [1, D, W / 2]
        return x[0].T[line.positions]  # [T, D]

    def _rotary(self, lengths: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines in the activation dtype; positions restart with each segment."""
        inv_freq = rotary_frequencies(self.config.head_dim, self.config.rope_theta)
        if self.config.audio_inv_freq_round is Rounding.BF16:
            # 0.75 instead of 0.749894: over a minute of sound the angles drift by a radian.
            inv_freq = inv_freq.bfloat16().float()
        positions = torch.cat([torch.arange(length) for length in lengths]).to(like.device)  # [T]
        cos, sin = rotary_table(positions, inv_freq.to(like.device))  # [T, H / 2]
        return cos.to(like.dtype), sin.to(like.dtype)

    def _pool(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Join neighbouring positions. x: [T, D] -> [sum of codes, D].

        An odd segment's last position is paired with zeros, or with itself where the segment is
        the shorter one of its call.
        """
        zero = len(x)  # the row appended below
        pairs: list[int] = []
        start = 0
        for segment in segments:
            end = start + segment.num_positions
            pairs.extend(range(start, end))
            if segment.num_positions % 2:
                pairs.append(end - 1 if segment.is_short else zero)
            start = end
        index = torch.tensor(pairs, device=x.device)
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])[index]  # [2 * codes, D]
        out: Tensor = self.down_sample_norm(self.down_sample_layer(x.T[None])[0].T)
        return out


class _Line(NamedTuple):
    """Segments on one time axis of even slots, with at least two empty frames after each.

    The gap isolates both convolutions: the kernel of the first reaches one frame into it, and what
    the first leaves there is masked before the second, whose stride keeps to the even starts.
    """

    length: int  # W, even
    frames: Tensor  # [sum of frames] where the mel frames lie
    visible: Tensor  # [W] frames the second convolution may see
    positions: Tensor  # [T] where the second convolution's outputs lie

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> "_Line":
        slots = [2 * segment.num_positions + 2 for segment in segments]
        starts = [0, *accumulate(slots)]
        visible = torch.zeros(starts[-1], dtype=torch.bool)
        frames, positions = [], []
        for segment, start in zip(segments, starts, strict=False):
            frames.append(torch.arange(start, start + segment.num_frames))
            positions.append(torch.arange(start // 2, start // 2 + segment.num_positions))
            # Padded to a longer neighbour, a segment sees one frame past its end: not zeros but
            # what the first convolution makes of them.
            visible[start : start + segment.num_frames + segment.is_short] = True
        return cls(
            starts[-1],
            torch.cat(frames).to(device),
            visible.to(device),
            torch.cat(positions).to(device),
        )


class _Layer(nn.Module):
    """Pre-norm transformer layer. ``final_layer_norm`` is the checkpoint's name for the second."""

    def __init__(self, config: AudioTokenizerConfig, attention: BoundAttention) -> None:
        super().__init__()
        width, inner = config.d_model, config.encoder_ffn_dim
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.self_attn = _SelfAttention(config, attention)
        self.final_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], packing: Varlen) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), rotary, packing)
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class _SelfAttention(nn.Module):
    def __init__(self, config: AudioTokenizerConfig, attention: BoundAttention) -> None:
        super().__init__()
        width = config.d_model
        self._num_heads, self._head_dim = config.encoder_attention_heads, config.head_dim
        self._attention = attention
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], packing: Varlen) -> Tensor:
        heads = (len(x), self._num_heads, self._head_dim)
        q = apply_rotary(self.q_proj(x).view(heads), *rotary)  # [T, N, H]
        k = apply_rotary(self.k_proj(x).view(heads), *rotary)  # [T, N, H]
        v = self.v_proj(x).view(heads)  # [T, N, H]
        out: Tensor = self.out_proj(self._attention(q, k, v, packing).flatten(1))  # [T, D]
        return out


def _select(
    config: AudioTokenizerConfig,
    layer: int,
    selector: AttentionSelector,
    dtype: torch.dtype,
    device: str,
) -> BoundAttention:
    is_windowed = config.is_windowed(layer)
    left, right = (
        reach if is_windowed and reach >= 0 else None for reach in config.encoder_attn_window_size
    )
    needs = AttentionNeeds(
        num_heads=config.encoder_attention_heads,
        num_kv_heads=config.encoder_attention_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        causal=config.encoder_causal,
        left=left,
        right=right,
        sink=Sink.NONE,
        paged=False,
        dtype=dtype,
        device=device,
    )
    return selector.select(needs, "window" if is_windowed else "full")
