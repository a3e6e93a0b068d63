"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        return F.rms_norm(x, (x.shape[-1],), eps=self.eps) * self.weight
