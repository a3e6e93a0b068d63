"""Log-mel spectrogram: magnitude STFT, HTK triangles without area norm, natural log.

No level normalisation happens anywhere, so a gain of the waveform shifts every bin. Samples of
silence give ln(1e-7) = -16.118095.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from services.audio.config import AudioTokenizerConfig

LOG_FLOOR = 1e-7
BLOCK_FRAMES = 6000  # frames per STFT call; bounds memory: 23 MB of spectrum


class LogMel:
    """Waveform to log-mel frames, in float32 on one device.

    Deliberately not a module: casting the model to another dtype must not touch the front end.
    """

    def __init__(self, config: AudioTokenizerConfig, device: torch.device | str = "cpu") -> None:
        self._nfft = config.nfft
        self._hop_length = config.hop_length
        self._window = torch.hann_window(config.window_size, device=device)  # periodic
        self._filters = mel_filters(config).to(device)

    @property
    def min_samples(self) -> int:
        """Reflection needs more samples than it mirrors; shorter clips are padded with zeros."""
        return self._nfft // 2 + 1  # 481

    def num_frames(self, num_samples: int) -> int:
        """Frames of a clip: one per hop, centred, the last at or before the clip's end."""
        return 1 + max(num_samples, self.min_samples) // self._hop_length

    def __call__(self, waveform: Tensor) -> Tensor:
        """waveform: [samples] float32, mono, not empty -> [F, mels]."""
        samples = F.pad(waveform, (0, max(0, self.min_samples - len(waveform))))
        num_frames = self.num_frames(len(samples))
        margin = self._nfft // 2
        samples = F.pad(samples[None], (margin, margin), mode="reflect")[0]
        blocks = []
        for start in range(0, num_frames, BLOCK_FRAMES):
            count = min(BLOCK_FRAMES, num_frames - start)
            first = start * self._hop_length
            block = samples[first : first + (count - 1) * self._hop_length + self._nfft]
            blocks.append(self._magnitude(block) @ self._filters)  # [f, mels]
        return torch.cat(blocks).clamp_min(LOG_FLOOR).log()  # [F, mels]

    def _magnitude(self, samples: Tensor) -> Tensor:
        spectrum = torch.stft(
            samples,
            n_fft=self._nfft,
            hop_length=self._hop_length,
            win_length=len(self._window),
            window=self._window,
            center=False,
            return_complex=True,
        )  # [bins, f]
        return spectrum.abs().T  # [f, bins]


def mel_filters(config: AudioTokenizerConfig) -> Tensor:
    """Triangles over the STFT's bins, equally spaced on the HTK mel scale. -> [bins, mels]."""
    bins = torch.linspace(0, config.sampling_rate // 2, config.nfft // 2 + 1)  # [bins] Hz
    mels = torch.linspace(_to_mel(config.fmin), _to_mel(config.fmax), config.n_mels + 2)
    corners = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)  # [mels + 2] Hz
    distance = corners[None, :] - bins[:, None]  # [bins, mels + 2]
    width = corners.diff()  # [mels + 1]
    rising = -distance[:, :-2] / width[:-1]
    falling = distance[:, 2:] / width[1:]
    return torch.minimum(rising, falling).clamp_min(0)


def _to_mel(hertz: float) -> float:
    return 2595.0 * math.log10(1.0 + hertz / 700.0)
