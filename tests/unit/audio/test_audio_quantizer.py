"""Residual quantisation: brute force, ties, rounding of the codebooks, early stop."""

import torch

from services.audio.quantizer import ResidualQuantizer
from tests.support.tiny_audio import randomize, tokenizer_config

UNROUNDED = {"audio_codebook_round": "none"}


def quantizer(switches=None, **changes) -> ResidualQuantizer:
    made = ResidualQuantizer(tokenizer_config(switches, **changes))
    randomize(made, scale=1.0)
    return made


def brute_force(features: torch.Tensor, codebooks: list[torch.Tensor]) -> list[list[int]]:
    """Squared distances in float64, one row against one row at a time."""
    result = []
    for row in features.double():
        residual, codes = row, []
        for codebook in codebooks:
            distances = [float((residual - entry.double()).pow(2).sum()) for entry in codebook]
            codes.append(distances.index(min(distances)))
            residual = residual - codebook[codes[-1]].double()
        result.append(codes)
    return result


def test_codes_equal_brute_force_on_rounded_codebooks():
    made = quantizer()
    features = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    rounded = [codebook.bfloat16().float() for codebook in made.codebooks]
    codes = made.encode(features)
    assert codes.shape == (50, 5) and codes.dtype == torch.int64
    assert codes.tolist() == brute_force(features, rounded)


def test_codes_equal_brute_force_without_rounding():
    made = quantizer(UNROUNDED)
    features = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    assert made.encode(features).tolist() == brute_force(features, list(made.codebooks))


def test_rounding_decides_between_rows_that_only_bf16_makes_equal():
    made = quantizer(codebook_size=[2], num_quantizers=1)
    rows = torch.zeros(2, 16)
    rows[0, 0], rows[1, 0] = 1.001, 1.0  # both are 1.0 in bfloat16
    made.codebooks[0].copy_(rows)
    at_the_second = torch.zeros(1, 16)
    at_the_second[0, 0] = 1.0
    assert made.encode(at_the_second).item() == 0  # a tie, and the first row wins it
    plain = quantizer(UNROUNDED, codebook_size=[2], num_quantizers=1)
    plain.codebooks[0].copy_(rows)
    assert plain.encode(at_the_second).item() == 1


def test_exact_tie_takes_the_first_row():
    made = quantizer(codebook_size=[4], num_quantizers=1)
    made.codebooks[0].copy_(torch.ones(4, 16))
    assert made.encode(torch.randn(3, 16)).flatten().tolist() == [0, 0, 0]


def test_early_stop_leaves_the_first_levels_unchanged():
    made = quantizer()
    features = torch.randn(20, 16)
    assert torch.equal(made.encode(features, 2), made.encode(features)[:, :2])


def test_arithmetic_is_float32_whatever_the_features_are():
    made = quantizer()
    features = torch.randn(20, 16).bfloat16()
    assert torch.equal(made.encode(features), made.encode(features.float()))
