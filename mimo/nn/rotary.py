"""Rotary position embeddings (Su et al., 2021), half-split pairs: dim j turns with dim j + R/2."""

import torch
from torch import Tensor


def rotary_frequencies(dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """``theta ** (-2j / dim)`` for j in 0..dim/2-1. -> [dim/2].

    Always on the CPU, also under ``torch.device("meta")``: frequencies are computed, never loaded.
    Raises ValueError unless ``dim`` is even and positive.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary dimensions must be even and positive, got {dim}")
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    return torch.pow(theta, -exponent).to(dtype)


def rotary_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``position * frequency``, in the dtype of the frequencies.

    positions: [T], inv_freq: [R/2] -> ([T, R/2], [T, R/2])
    """
    angles = positions.to(inv_freq.dtype)[:, None] * inv_freq  # [T, R/2]
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of every head; the others pass through.

    The rotation runs in the wider dtype of ``x`` and the table, so a float32 table keeps bfloat16
    heads exact until the final rounding. x: [T, N, H], cos and sin: [T, R/2] -> [T, N, H]
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R/2]
    turning, rest = x.split_with_sizes((2 * half, x.shape[-1] - 2 * half), dim=-1)
    first, second = turning.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)
