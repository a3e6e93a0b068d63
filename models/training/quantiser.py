"""Training through the residual quantiser, and making its codebooks.

The service's quantiser names the nearest rows and lets no gradient through. Here a gradient passes
it as if it were the identity (van den Oord et al., 2017), and the codebooks follow the features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from models.training.parallel import ALONE, Ranks
from services.audio.quantizer import ResidualQuantizer

_DECAY = 0.99  # of the running counts and sums behind the codebooks
_COMMITMENT = 0.25
_RARE = 0.02  # a row used less often per batch than this is not moved


def dequantise(quantiser: ResidualQuantizer, codes: Tensor) -> Tensor:
    """The features that codes stand for. codes: [T, C] -> [T, D] float32."""
    rows = [quantiser.rows(level)[codes[:, level]] for level in range(codes.shape[1])]
    return torch.stack(rows).sum(dim=0)


def straight_through(quantiser: ResidualQuantizer, features: Tensor) -> tuple[Tensor, Tensor]:
    """Quantised features whose gradient is that of ``features``, and the loss that keeps features
    near their codes. features: [T, D] -> [T, D], scalar."""
    quantised = dequantise(quantiser, quantiser.encode(features))  # [T, D]
    commitment = _COMMITMENT * F.mse_loss(features, quantised)
    return features + (quantised - features).detach(), commitment


@torch.no_grad()
def kmeans_codebooks(
    quantiser: ResidualQuantizer, features: Tensor, rounds: int, generator: torch.Generator
) -> float:
    """Fill the codebooks, level by level, with the centres of what the levels before left over.

    features: [T, D]. Returns the share of the variance that no level explains.
    """
    residual = features.float()
    for level, codebook in enumerate(quantiser.codebooks):
        codebook.copy_(_kmeans(residual, len(codebook), rounds, generator))
        rows = quantiser.rows(level)
        residual = residual - rows[_nearest(residual, rows)]
    return float(residual.var(dim=0).sum() / features.var(dim=0).sum())


def _kmeans(points: Tensor, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm; a centre without points moves to a random one. -> [count, D]."""

    def some(number: int) -> Tensor:
        return points[torch.randint(len(points), (number,), generator=generator)]

    centres = some(count)
    for _ in range(rounds):
        nearest = _nearest(points, centres)
        sizes = torch.bincount(nearest, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = sums / sizes.clamp_min(1)[:, None]
        empty = sizes == 0
        centres[empty] = some(int(empty.sum()))
    return centres


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """[T, D], [V, D] -> [T]."""
    distance = centres.square().sum(dim=1) - 2 * points @ centres.T  # [T, V] up to a constant
    return distance.argmin(dim=1)


class CodebookFollower:
    """Moves every row towards the mean of the residuals that it lately stood for."""

    def __init__(self, quantiser: ResidualQuantizer) -> None:
        self._quantiser = quantiser
        self._sums = [codebook.detach().clone() for codebook in quantiser.codebooks]
        self._counts = [torch.ones(len(codebook)) for codebook in quantiser.codebooks]

    @torch.no_grad()
    def follow(self, features: Tensor, ranks: Ranks = ALONE) -> None:
        """features: [T, D]. Codebooks stay the same on all ranks."""
        residual = features.float()
        codes = self._quantiser.encode(features)  # [T, C]
        for level, codebook in enumerate(self._quantiser.codebooks):
            code = codes[:, level]
            used = torch.bincount(code, minlength=len(codebook)).float()
            sums = torch.zeros_like(codebook).index_add_(0, code, residual)
            residual = residual - self._quantiser.rows(level)[code]
            ranks.sum((used, sums), torch.float32)
            self._counts[level].lerp_(used, 1 - _DECAY)
            self._sums[level].lerp_(sums, 1 - _DECAY)
            alive = self._counts[level] > _RARE
            codebook[alive] = (self._sums[level] / self._counts[level][:, None])[alive]

    def state(self) -> dict[str, Tensor]:
        pairs = enumerate(zip(self._sums, self._counts, strict=True))
        return {
            name: tensor
            for level, (sums, counts) in pairs
            for name, tensor in ((f"sums.{level}", sums), (f"counts.{level}", counts))
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        for level in range(len(self._sums)):
            self._sums[level].copy_(state[f"sums.{level}"])
            self._counts[level].copy_(state[f"counts.{level}"])
