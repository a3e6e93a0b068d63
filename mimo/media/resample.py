"""Sample-rate conversion by a Hann-windowed sinc, the kernel the audio tokenizer was trained with.

The ratio ``target / source`` is reduced to ``n / o``. Output sample ``f * n + p`` is the kernel of
phase ``p`` applied around input sample ``f * o + p * o / n``; a phase has ``n`` possible values, so
there are ``n`` kernels. Only taps within six zero crossings differ from zero. Storing just those
keeps the table small (at most ``n`` times a few dozen values) for any pair of rates, coprime ones
included.
"""

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

ZERO_CROSSINGS = 6
ROLLOFF = 0.99

# Output samples computed at once, about: bounds the gathered taps to a few MB.
_BLOCK_SAMPLES = 1 << 15

Waveform = NDArray[np.float32]


def resample(waveform: NDArray[Any], source_rate: int, target_rate: int) -> Waveform:
    """Convert mono samples [N] to ``ceil(N * target_rate / source_rate)`` float32 samples."""
    resampler = Resampler(source_rate, target_rate)
    return np.concatenate([resampler.push(waveform), resampler.finish()])


def resampled_length(num_samples: int, source_rate: int, target_rate: int) -> int:
    """How many samples ``resample`` returns."""
    return -(-num_samples * target_rate // source_rate)


class Resampler:
    """Resamples a stream piece by piece. How it is cut does not change the result."""

    def __init__(self, source_rate: int, target_rate: int) -> None:
        divisor = math.gcd(source_rate, target_rate)
        self._source, self._target = source_rate // divisor, target_rate // divisor
        self._is_identity = self._source == self._target
        self._num_pushed = 0
        self._num_made = 0
        if self._is_identity:
            return
        starts, kernels = _kernels(self._source, self._target)
        # Whole frames of phases are computed together, so small ratios get several frames a block.
        self._frames = max(1, _BLOCK_SAMPLES // self._target)
        shift = np.arange(self._frames)[:, None] * self._source
        self._starts = (shift + starts).ravel()  # [frames * n]
        self._kernels = np.tile(kernels, (self._frames, 1))  # [frames * n, taps]
        # The buffer begins with the zeros that the first kernels see before the signal.
        self._buffer: Waveform = np.zeros(_margin(self._source, self._target), np.float32)

    def push(self, waveform: NDArray[Any]) -> Waveform:
        """Take more samples [N]; returns the output samples that are final by now."""
        samples = np.asarray(waveform, np.float32)
        self._num_pushed += len(samples)
        if self._is_identity:
            return samples
        self._buffer = np.concatenate([self._buffer, samples])
        return self._drain()

    def finish(self) -> Waveform:
        """The rest of the output. Push nothing afterwards."""
        if self._is_identity:
            return np.zeros(0, np.float32)
        missing = resampled_length(self._num_pushed, self._source, self._target) - self._num_made
        blocks = -(-missing // len(self._starts))
        padding = blocks * self._frames * self._source + self._starts[-1] + self._kernels.shape[1]
        self._buffer = np.concatenate([self._buffer, np.zeros(padding, np.float32)])
        return self._drain()[:missing]

    def _drain(self) -> Waveform:
        """Compute every whole block the buffer holds the taps of."""
        taps = self._kernels.shape[1]
        block_reach = int(self._starts[-1]) + taps
        step = self._frames * self._source
        made = []
        offset = 0
        while offset + block_reach <= len(self._buffer):
            windows = sliding_window_view(self._buffer[offset : offset + block_reach], taps)
            made.append(np.einsum("ij,ij->i", windows[self._starts], self._kernels))
            offset += step
        self._buffer = self._buffer[offset:]
        output = np.concatenate(made) if made else np.zeros(0, np.float32)
        self._num_made += len(output)
        return output


def _margin(source: int, target: int) -> int:
    """Input samples a kernel reaches before its centre."""
    return math.ceil(ZERO_CROSSINGS * source / (min(source, target) * ROLLOFF))


def _kernels(source: int, target: int) -> tuple[NDArray[np.intp], Waveform]:
    """First tap (relative to the padded frame) and kernel [n, taps] of every phase."""
    cutoff = min(source, target) * ROLLOFF
    margin = _margin(source, target)
    phase = np.arange(target)
    centre = phase * source // target
    index = centre[:, None] + np.arange(-margin, margin + 1)  # [n, taps], input samples
    time = (index / source - phase[:, None] / target) * cutoff
    inside = np.abs(time) < ZERO_CROSSINGS
    window = np.cos(np.pi * time / (2 * ZERO_CROSSINGS)) ** 2
    kernels = np.where(inside, np.sinc(time) * window * cutoff / source, 0.0)
    return centre.astype(np.intp), kernels.astype(np.float32)
