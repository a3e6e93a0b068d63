"""The sinc resampler: published values, a literal double of the formula, and streaming."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mimo.media.resample import Resampler, resample, resampled_length


def sine(sample_rate: int) -> NDArray[np.float32]:
    return np.sin(2 * np.pi * 440 * np.arange(sample_rate) / sample_rate).astype(np.float32)


def test_sixteen_kilohertz() -> None:
    output = resample(sine(16000), 16000, 24000)
    assert len(output) == 24000
    first = [0.000473, 0.103761, 0.234971, 0.339094, 0.442480, 0.546227]
    np.testing.assert_allclose(output[:6], first, atol=5e-6)
    np.testing.assert_allclose(output[12000:12004], [0.0, 0.114880, 0.228522, 0.338736], atol=5e-6)
    assert output[-1] == pytest.approx(-0.103761, abs=5e-6)
    assert np.square(output, dtype=np.float64).sum() == pytest.approx(12005.3457, abs=0.01)


def test_cd_rate() -> None:
    output = resample(sine(44100), 44100, 24000)
    assert len(output) == 24000
    first = [0.009149, 0.113541, 0.229226, 0.338576, 0.445052, 0.544802]
    np.testing.assert_allclose(output[:6], first, atol=5e-6)


def test_equal_rates_change_nothing() -> None:
    samples = sine(24000)
    assert np.array_equal(resample(samples, 24000, 24000), samples)


@pytest.mark.parametrize("rate", [4000, 8000, 11025, 16000, 22050, 44100, 44101, 48000, 96000])
def test_every_rate_follows_the_formula(rate: int) -> None:
    """44101 Hz shares no factor with 24 kHz: 24,000 different kernels."""
    rng = np.random.default_rng(rate)
    samples = rng.standard_normal(rate // 4).astype(np.float32)
    output = resample(samples, rate, 24000)
    assert len(output) == math.ceil(24000 * len(samples) / rate)
    assert len(output) == resampled_length(len(samples), rate, 24000)
    for index in [0, 1, len(output) - 1, *rng.integers(0, len(output), 40)]:
        assert output[index] == pytest.approx(literal(samples, rate, 24000, index), abs=3e-6)


def literal(samples: NDArray[np.float32], source: int, target: int, index: int) -> float:
    """One output sample, tap by tap, as the definition has it."""
    divisor = math.gcd(source, target)
    o, n = source // divisor, target // divisor
    cutoff = min(o, n) * 0.99
    width = math.ceil(6 * o / cutoff)
    frame, phase = divmod(int(index), n)
    total = 0.0
    for tap in range(-width, width + o):
        position = frame * o + tap
        time = min(max((-phase / n + tap / o) * cutoff, -6.0), 6.0)
        if 0 <= position < len(samples) and abs(time) < 6:
            sinc = math.sin(math.pi * time) / (math.pi * time) if time else 1.0
            kernel = sinc * math.cos(math.pi * time / 12) ** 2 * cutoff / o
            total += kernel * float(samples[position])
    return total


@settings(max_examples=25, deadline=None)
@given(
    rate=st.sampled_from([8000, 24000, 44100, 44101, 48000]),
    cuts=st.lists(st.integers(0, 5000), max_size=8),
)
def test_cutting_the_stream_changes_no_bit(rate: int, cuts: list[int]) -> None:
    samples = np.random.default_rng(0).standard_normal(7001).astype(np.float32)
    borders = [0, *sorted(cuts), len(samples)]
    resampler = Resampler(rate, 24000)
    pieces = [resampler.push(samples[a:b]) for a, b in zip(borders[:-1], borders[1:], strict=True)]
    assert np.array_equal(
        np.concatenate([*pieces, resampler.finish()]), resample(samples, rate, 24000)
    )


def test_nothing_in_nothing_out() -> None:
    assert len(resample(np.zeros(0, np.float32), 44100, 24000)) == 0
