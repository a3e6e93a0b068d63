"""Codebooks by k-means, and gradients through them."""

import torch

from models import config
from models.training.ctc import ctc_decode
from models.training.quantiser import (
    CodebookFollower,
    dequantise,
    kmeans_codebooks,
    straight_through,
)
from services.audio.config import AudioTokenizerConfig
from services.audio.quantizer import ResidualQuantizer


def quantiser(levels: int = 2, size: int = 4) -> ResidualQuantizer:
    fields = config.audio_tokenizer_config() | {
        "num_quantizers": levels,
        "codebook_size": [size],
        "d_model": 4,
        "encoder_attention_heads": 1,
    }
    made = ResidualQuantizer(AudioTokenizerConfig.from_checkpoint(fields))
    with torch.no_grad():
        for level, codebook in enumerate(made.codebooks):
            codebook.copy_(torch.randn(codebook.shape, generator=_seed(level)))
    return made


def _seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_the_gradient_passes_as_if_nothing_were_there() -> None:
    made = quantiser()
    features = torch.randn(5, 4, generator=_seed(9)).requires_grad_()
    quantised, commitment = straight_through(made, features)
    assert torch.equal(quantised.detach(), features.detach() + (
        dequantise(made, made.encode(features.detach())) - features.detach()
    ))  # fmt: skip
    weights = torch.randn(5, 4, generator=_seed(10))
    (quantised * weights).sum().backward()
    assert features.grad is not None and torch.equal(features.grad, weights)
    assert commitment > 0


def test_the_commitment_pulls_features_to_their_codes() -> None:
    made = quantiser()
    features = torch.randn(5, 4, generator=_seed(9)).requires_grad_()
    _, before = straight_through(made, features)
    before.backward()
    assert features.grad is not None
    _, after = straight_through(made, features.detach() - 0.5 * features.grad)
    assert after < before


def test_codebooks_explain_more_with_every_level() -> None:
    points = torch.randn(400, 4, generator=_seed(0))
    rest = [
        kmeans_codebooks(quantiser(levels, size=8), points, 10, _seed(1)) for levels in (1, 2, 4)
    ]
    assert 1 > rest[0] > rest[1] > rest[2]
    made = quantiser(4, size=8)
    kmeans_codebooks(made, points, 10, _seed(1))
    error = points - dequantise(made, made.encode(points))
    assert float(error.var(dim=0).sum() / points.var(dim=0).sum()) < 0.2


def test_codebooks_follow_features_that_drift() -> None:
    made = quantiser(levels=1)
    points = torch.randn(200, 4, generator=_seed(0))
    kmeans_codebooks(made, points, 10, _seed(1))
    follower = CodebookFollower(made)
    drifted = points + 0.5
    before = (drifted - dequantise(made, made.encode(drifted))).square().mean()
    for _ in range(100):
        follower.follow(drifted)
    after = (drifted - dequantise(made, made.encode(drifted))).square().mean()
    assert after < before


def test_the_best_path_merges_repetitions_and_drops_blanks() -> None:
    best = torch.tensor([0, 3, 3, 0, 3, 1, 0])
    logits = torch.nn.functional.one_hot(best, 4).float()
    assert ctc_decode(logits) == [2, 2, 0]
