"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension.

    Statistics are taken in float32 (float64 for float64 inputs). The normalised value is rounded to
    the activation dtype before it meets the weight, as the published models do.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # [..., D]
        normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return normalised.to(x.dtype) * self.weight
