"""The transformer inside a group: four code frames look at each other, groups never do."""

import torch
from torch import Tensor, nn

from mimo.nn.mlp import SwiGLU
from mimo.nn.norm import RMSNorm
from mimo.nn.rotary import apply_rotary, rotary_frequencies, rotary_table
from services.audio.config import AudioEncoderConfig

NORM_EPS = 1e-6


class LocalTransformer(nn.Module):
    """Pre-norm layers over [groups, group size, dim]; ``norm`` at the end where configured."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        self._rope_theta = config.rope_theta
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.input_local_layers))
        if config.add_post_norm:
            self.norm: nn.Module = RMSNorm(config.input_local_dim, NORM_EPS)
        else:
            self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: [G, S, D] -> same; S frames per group at positions 0..S-1."""
        # Unlike the tokenizer's, these frequencies stay in float32 whatever the dtype.
        inv_freq = rotary_frequencies(self._head_dim, self._rope_theta).to(x.device)
        cos, sin = rotary_table(torch.arange(x.shape[1], device=x.device), inv_freq)  # [S, H / 2]
        rotary = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotary)
        out: Tensor = self.norm(x)
        return out


class _Layer(nn.Module):
    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.input_local_dim, NORM_EPS)
        self.self_attn = _GroupAttention(config)
        self.post_attention_layernorm = RMSNorm(config.input_local_dim, NORM_EPS)
        self.mlp = SwiGLU(config.input_local_dim, config.input_local_intermediate_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _GroupAttention(nn.Module):
    """All heads of a group in two batched products of a few rows; no kernel pays at this size."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        width = config.input_local_dim
        self._num_heads, self._head_dim = config.input_local_attn_heads, config.head_dim
        self._is_causal = not config.input_full_attention
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        heads = (*x.shape[:2], self._num_heads, self._head_dim)
        q = _rotate(self.q_proj(x).view(heads), rotary)  # [G, S, N, H]
        k = _rotate(self.k_proj(x).view(heads), rotary)
        v = self.v_proj(x).view(heads)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [G, N, S, H]
        scores = q @ k.transpose(-1, -2) * self._head_dim**-0.5  # [G, N, S, S]
        if self._is_causal:
            frames = x.shape[1]
            future = torch.ones(frames, frames, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        out: Tensor = self.o_proj((weights @ v).transpose(1, 2).flatten(2))  # [G, S, D]
        return out


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate every group by the same table. x: [G, S, N, H] -> same."""
    cos, sin = (table.repeat(x.shape[0], 1) for table in rotary)  # [G * S, H / 2]
    return apply_rotary(x.flatten(0, 1), cos, sin).view(x.shape)
