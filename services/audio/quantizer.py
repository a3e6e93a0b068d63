"""Residual vector quantisation: each codebook names the part its predecessors left unexplained."""

import torch
from torch import Tensor, nn

from services.audio.config import AudioTokenizerConfig, Rounding


class ResidualQuantizer(nn.Module):
    """Codebooks, coarse first. Their rows are data, not weights: no gradient flows into them."""

    def __init__(self, config: AudioTokenizerConfig) -> None:
        super().__init__()
        self._rounding = config.audio_codebook_round
        self.codebooks = nn.ParameterList(
            nn.Parameter(torch.empty(size, config.d_model), requires_grad=False)
            for size in config.codebook_size
        )

    @torch.no_grad()
    def encode(self, features: Tensor, num_codebooks: int | None = None) -> Tensor:
        """Nearest rows, level by level. features: [T, D] -> codes: [T, C] int64.

        ``num_codebooks`` stops early; the levels before are not affected. Distances use the
        expanded square in float32 because the published codes were made so: near ties depend on
        it. Exact ties take the first row.
        """
        residual = features.float()  # [T, D]
        codes = []
        for level in range(num_codebooks or len(self.codebooks)):
            rows = self.rows(level)  # [V, D]
            distance = (
                residual.square().sum(dim=1, keepdim=True)
                - 2 * residual @ rows.T
                + rows.square().sum(dim=1)
            )  # [T, V]
            code = distance.argmin(dim=1)  # [T]
            residual = residual - rows[code]
            codes.append(code)
        return torch.stack(codes, dim=1)  # [T, C]

    def rows(self, level: int) -> Tensor:
        """A codebook as the arithmetic sees it: float32, through bfloat16 by default. [V, D]."""
        codebook: Tensor = self.codebooks[level]
        return codebook.bfloat16().float() if self._rounding is Rounding.BF16 else codebook.float()
