"""Norm, rotary embedding and gated feed-forward against their formulas."""

import math

import pytest
import torch

from mimo.nn.mlp import SwiGLU
from mimo.nn.norm import RMSNorm
from mimo.nn.rotary import apply_rotary, rotary_frequencies, rotary_table


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(4, eps=0.5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 0.5, -1.0]))
    out = norm(torch.tensor([[1.0, -2.0, 3.0, 4.0]]))
    rms = math.sqrt(30 / 4 + 0.5)
    torch.testing.assert_close(out, torch.tensor([[1 / rms, -4 / rms, 1.5 / rms, -4 / rms]]))


def test_rms_norm_takes_bfloat16_statistics_in_float32() -> None:
    norm = RMSNorm(512, eps=1e-6).to(torch.bfloat16)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    wide = x.double()
    expected = wide / wide.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    assert torch.equal(norm(x), expected.to(torch.bfloat16))


def test_rms_norm_keeps_float64() -> None:
    norm = RMSNorm(8, eps=1e-6).double()
    x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), expected, rtol=1e-14, atol=0)


def test_frequencies_use_the_rotary_dims_as_denominator() -> None:
    frequencies = rotary_frequencies(64, 10_000.0, dtype=torch.float64)
    assert frequencies.shape == (32,)
    expected = [10_000 ** (-2 * j / 64) for j in (0, 1, 2, 31)]
    assert frequencies[[0, 1, 2, 31]].tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dim", [0, 13, -2])
def test_odd_or_empty_rotary_dims_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="even and positive"):
        rotary_frequencies(dim, 1e4)


def test_frequencies_are_real_under_the_meta_device() -> None:
    with torch.device("meta"):
        assert rotary_frequencies(8, 1e4).device.type == "cpu"


def test_rotation_turns_pairs_half_the_rotary_dims_apart() -> None:
    cos, sin = rotary_table(torch.tensor([3]), rotary_frequencies(4, 100.0, torch.float64))
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]], dtype=torch.float64)
    a, b = 3.0, 3.0 * 0.1
    expected = [
        math.cos(a) * 1 - math.sin(a) * 3,
        math.cos(b) * 2 - math.sin(b) * 4,
        math.cos(a) * 3 + math.sin(a) * 1,
        math.cos(b) * 4 + math.sin(b) * 2,
        5.0,  # beyond the rotary dims
        6.0,
    ]
    assert apply_rotary(x, cos, sin).flatten().tolist() == pytest.approx(expected, rel=1e-14)


def test_scores_depend_on_relative_positions_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 24, generator=generator, dtype=torch.float64)
    frequencies = rotary_frequencies(8, 1e4, torch.float64)

    def score(query_position: int, key_position: int) -> float:
        turned_q = apply_rotary(q, *rotary_table(torch.tensor([query_position]), frequencies))
        turned_k = apply_rotary(k, *rotary_table(torch.tensor([key_position]), frequencies))
        return float((turned_q * turned_k).sum())

    assert score(9, 4) == pytest.approx(score(1009, 1004), rel=1e-9)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)


def test_bfloat16_heads_are_rotated_in_float32() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 2, 8, generator=generator).to(torch.bfloat16)
    cos, sin = rotary_table(torch.arange(5) * 1000, rotary_frequencies(8, 1e4))
    assert cos.dtype is torch.float32
    expected = apply_rotary(x.float(), cos, sin).to(torch.bfloat16)
    assert torch.equal(apply_rotary(x, cos, sin), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_gates_with_silu(bias: bool) -> None:
    torch.manual_seed(5)
    mlp = SwiGLU(4, 6, bias=bias)
    x = torch.randn(3, 4)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    expected = mlp.down_proj(gate / (1 + torch.exp(-gate)) * up)
    torch.testing.assert_close(mlp(x), expected)
    assert ("down_proj.bias" in mlp.state_dict()) == bias
