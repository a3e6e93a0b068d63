"""The mel front end against librosa with every parameter spelled out; its defaults differ."""

import numpy as np
import pytest
import torch

from services.audio.config import AudioTokenizerConfig
from services.audio.mel import LogMel, mel_filters
from tests.support.tiny_audio import tokenizer_fields

pytestmark = [pytest.mark.check, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CONFIG = AudioTokenizerConfig.from_checkpoint(tokenizer_fields(n_mels=128))


def test_filterbank_equals_librosas():
    librosa = pytest.importorskip("librosa", reason="needs the extra `oracles`")
    expected = librosa.filters.mel(
        sr=24000, n_fft=960, n_mels=128, fmin=0, fmax=12000, htk=True, norm=None
    )
    np.testing.assert_allclose(mel_filters(CONFIG).numpy(), expected.T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_samples", [960, 5000, 24000])
def test_log_mel_equals_librosas(num_samples):
    librosa = pytest.importorskip("librosa", reason="needs the extra `oracles`")
    wave = np.random.default_rng(0).standard_normal(num_samples).astype(np.float32) * 0.1
    power = librosa.feature.melspectrogram(
        y=wave,
        sr=24000,
        n_fft=960,
        win_length=960,
        hop_length=240,
        window="hann",
        center=True,
        pad_mode="reflect",
        power=1.0,
        n_mels=128,
        fmin=0,
        fmax=12000,
        htk=True,
        norm=None,
    )
    expected = np.log(np.maximum(power, 1e-7)).T
    found = LogMel(CONFIG)(torch.from_numpy(wave)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
