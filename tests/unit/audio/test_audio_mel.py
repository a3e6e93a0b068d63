"""The mel front end: golden values, lengths, and the edges of very short and very long clips."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from services.audio import mel
from services.audio.mel import LogMel, mel_filters
from tests.support.tiny_audio import tokenizer_config

CONFIG = dataclasses.replace(
    tokenizer_config(), n_mels=128, nfft=960, window_size=960, hop_length=240, fmax=12000.0
)


def two_tones() -> torch.Tensor:
    time = torch.arange(24000, dtype=torch.float64) / 24000
    wave = 0.5 * torch.sin(2 * math.pi * 440 * time) + 0.25 * torch.sin(2 * math.pi * 3000 * time)
    return wave.float()


def test_filterbank_matches_its_golden_sums():
    filters = mel_filters(CONFIG)
    assert filters.shape == (481, 128)
    assert int((filters != 0).sum()) == 948
    assert filters.sum().item() == pytest.approx(473.8479, abs=1e-3)
    assert filters[:, 0].nonzero().flatten().tolist() == [1]
    assert filters[1, 0].item() == pytest.approx(0.440879, abs=1e-5)
    assert filters[40, 38].item() == pytest.approx(0.50965, abs=1e-5)
    assert filters[40, 39].item() == pytest.approx(0.49035, abs=1e-5)
    assert (filters.sum(dim=0) > 0).all()  # no filter is empty


def test_log_mel_of_two_tones_matches_its_golden():
    frames = LogMel(CONFIG)(two_tones())
    assert frames.shape == (101, 128) and frames.dtype == torch.float32
    # Far from the tones there is only what float32 rounds off, which differs between processors.
    assert frames.mean().item() == pytest.approx(-6.717493, abs=0.05)
    assert frames.std().item() == pytest.approx(4.398729, abs=0.05)
    assert frames.min().item() == pytest.approx(-12.143516, abs=0.5)
    assert frames.max().item() == pytest.approx(4.690174, abs=1e-3)
    assert divmod(int(frames.argmax()), 128) == (2, 21)


@pytest.mark.parametrize(
    ("frame", "bin_", "value", "tolerance"),
    [
        (0, 0, 1.41245, 1e-3),
        (0, 20, 4.13465, 1e-3),
        (1, 20, 4.42689, 1e-3),
        (50, 0, -6.88984, 1e-2),  # leakage: FFT libraries differ in the last bits
        (50, 20, 4.44580, 1e-3),
        (50, 21, 4.69016, 1e-3),
        (50, 75, -8.89113, 1e-2),
        (50, 127, -11.49737, 0.3),  # rounding and nothing else: -13.2085 in float64
        (100, 20, 4.27219, 1e-3),
        (100, 75, 2.74564, 1e-3),
    ],
)
def test_log_mel_cells_match_their_goldens(frame, bin_, value, tolerance):
    frames = LogMel(CONFIG)(two_tones())
    assert frames[frame, bin_].item() == pytest.approx(value, abs=tolerance)


def test_only_rounding_separates_it_from_float64():
    waveform = np.pad(two_tones().double().numpy(), 480, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(waveform, 960)[::240]  # [F, 960]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(960) / 960)
    spectrum = np.abs(np.fft.rfft(windows * hann))  # [F, bins]
    exact = spectrum @ mel_filters(CONFIG).double().numpy()
    off = np.abs(LogMel(CONFIG)(two_tones()).double().exp().numpy() - exact)
    assert off.max() < 1e-6 * exact.max()
    loud = exact > 1e-3 * exact.max()
    assert loud.sum() > 1000
    assert (off[loud] < 1e-4 * exact[loud]).all()


def test_silence_lies_on_the_floor():
    frames = LogMel(CONFIG)(torch.zeros(2400))
    assert torch.equal(frames, torch.full((11, 128), 1e-7).log())
    assert frames[0, 0].item() == pytest.approx(-16.118095, abs=1e-5)


@pytest.mark.parametrize(
    ("num_samples", "num_frames"),
    [(1, 3), (480, 3), (481, 3), (959, 4), (960, 5), (2400, 11), (24000, 101)],
)
def test_clip_has_one_frame_per_hop_and_one_more(num_samples, num_frames):
    front_end = LogMel(CONFIG)
    assert front_end.num_frames(num_samples) == num_frames
    assert len(front_end(torch.randn(num_samples))) == num_frames


def test_clip_too_short_to_reflect_is_padded_with_zeros_to_481_samples():
    wave = torch.randn(100)
    padded = torch.cat([wave, torch.zeros(381)])
    assert torch.equal(LogMel(CONFIG)(wave), LogMel(CONFIG)(padded))


def test_doubling_the_level_adds_ln_2():
    wave = torch.randn(4800)
    front_end = LogMel(CONFIG)
    torch.testing.assert_close(
        front_end(2 * wave), front_end(wave) + math.log(2), rtol=0, atol=1e-5
    )


def test_long_clip_in_blocks_equals_one_block(monkeypatch):
    wave = torch.randn(24000)
    whole = LogMel(CONFIG)(wave)
    monkeypatch.setattr(mel, "BLOCK_FRAMES", 7)
    torch.testing.assert_close(LogMel(CONFIG)(wave), whole, rtol=0, atol=1e-5)
