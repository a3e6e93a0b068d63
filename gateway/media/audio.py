"""Sound, by FFmpeg: samples at the native rate and layout, then mono at the model's rate.

Runs in a media worker. Mixing is the plain mean of the channels and never FFmpeg's, whose mono is
3 dB louder for correlated stereo.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from numpy.typing import NDArray

from gateway.media.container import PacketDecoder, check_codec, find_audio, open_container
from gateway.media.facts import AudioFacts
from gateway.media.faults import beyond, decoding
from gateway.media.limits import Limits
from gateway.media.sniff import Format
from mimo.errors import InvalidRequest, Reason
from mimo.media.resample import Resampler
from mimo.store.keys import AudioDigest

Samples = NDArray[np.float32]

_MAX_AMPLITUDE = 32.0

# Sample format -> (what is silence, full scale).
_SCALES = {
    "u8": (128.0, 1 / 128),
    "s16": (0.0, 1 / (1 << 15)),
    "s32": (0.0, 1 / (1 << 31)),
    "s64": (0.0, 1 / (1 << 63)),
    "flt": (0.0, 1.0),
    "dbl": (0.0, 1.0),
}


def probe_audio(data: bytes, format: Format, limits: Limits) -> AudioFacts:
    """Decode the whole sound track to count and digest it."""
    with decoding("audio"), open_container(data, format, limits) as container:
        stream = _require(find_audio(container))
        track = AudioTrack(stream, limits)
        for packet in container.demux(stream):
            track.add(packet)
        return track.facts()


def decode_waveform(
    data: bytes,
    format: Format,
    *,
    stream_index: int,
    sample_rate: int,
    num_samples: int,
    limits: Limits,
) -> Iterator[Samples]:
    """Mono pieces at ``sample_rate`` that add up to exactly ``num_samples``.

    A clip shorter than that is padded with zeros.
    """
    made = 0
    for piece in _mono(data, format, stream_index, sample_rate, limits):
        piece = piece[: num_samples - made]
        made += len(piece)
        if len(piece):
            yield piece
    if made < num_samples:
        yield np.zeros(num_samples - made, np.float32)


def _mono(
    data: bytes, format: Format, stream_index: int, sample_rate: int, limits: Limits
) -> Iterator[Samples]:
    """Mixed and resampled pieces of about a second. The mean comes first: it is cheaper."""
    resampler: Resampler | None = None
    with decoding("audio"), open_container(data, format, limits) as container:
        stream = _require(container.streams[stream_index])
        track = AudioTrack(stream, limits)
        waiting: list[Samples] = []
        for packet in container.demux(stream):
            waiting += [samples.mean(axis=1, dtype=np.float32) for samples in track.add(packet)]
            if sum(map(len, waiting)) > track.sample_rate:
                resampler = resampler or Resampler(track.sample_rate, sample_rate)
                yield resampler.push(np.concatenate(waiting))
                waiting = []
        resampler = resampler or Resampler(track.facts().sample_rate, sample_rate)
        yield resampler.push(np.concatenate([np.zeros(0, np.float32), *waiting]))
        yield resampler.finish()


class AudioTrack:
    """The samples of one stream as its packets arrive, checked and counted."""

    def __init__(self, stream: AudioStream, limits: Limits) -> None:
        check_codec(stream)
        stream.codec_context.thread_count = 1
        self._stream = stream
        self._limits = limits
        self._decoder = PacketDecoder(stream)
        self._num_samples = 0
        self.sample_rate = self._channels = 0
        self._digest: AudioDigest | None = None

    def add(self, packet: Any) -> list[Samples]:
        """Samples [S, channels] that a packet completes."""
        return [self._take(frame) for frame in self._decoder.decode(packet) if frame.samples]

    def facts(self) -> AudioFacts:
        """What was seen, after the last packet. Raises InvalidRequest when it was nothing."""
        self._decoder.finish()
        if self._digest is None:
            raise InvalidRequest("audio holds no samples", reason=Reason.MEDIA_EMPTY)
        return AudioFacts(
            stream_index=self._stream.index,
            sample_rate=self.sample_rate,
            channels=self._channels,
            num_samples=self._num_samples,
            content_digest=self._digest.hexdigest(),
        )

    def _take(self, frame: AudioFrame) -> Samples:
        channels = frame.layout.nb_channels
        if self._digest is None:
            self._start(frame.sample_rate, channels)
        elif (frame.sample_rate, channels) != (self.sample_rate, self._channels):
            raise InvalidRequest(
                "audio changes its rate or channels midway", reason=Reason.MEDIA_CORRUPT
            )
        self._num_samples += frame.samples
        # A header's length is a guess; the count is not. One second of grace for padding.
        if self._num_samples > (self._limits.max_audio_s + 1) * self.sample_rate:
            raise beyond(
                "audio_duration_s",
                f"over {self._limits.max_audio_s:g}",
                self._limits.max_audio_s,
                f"audio is longer than {self._limits.max_audio_s:g} seconds",
            )
        samples = to_float(frame.to_ndarray(), frame.format.name, channels)
        # NaN compares false, so it fails this too.
        if not (np.abs(samples).max() <= _MAX_AMPLITUDE):
            raise InvalidRequest(
                "audio holds samples that are not finite or far too loud",
                reason=Reason.MEDIA_CORRUPT,
            )
        if self._digest is not None:
            self._digest.update(samples)
        return samples

    def _start(self, sample_rate: int, channels: int) -> None:
        limits = self._limits
        if not limits.min_sample_rate <= sample_rate <= limits.max_sample_rate:
            raise beyond(
                "sample_rate",
                sample_rate,
                f"{limits.min_sample_rate}..{limits.max_sample_rate}",
                f"audio has {sample_rate} samples a second; accepted are "
                f"{limits.min_sample_rate} to {limits.max_sample_rate}",
            )
        if channels > limits.max_audio_channels:
            raise beyond(
                "channels",
                channels,
                limits.max_audio_channels,
                f"audio has {channels} channels; the limit is {limits.max_audio_channels}",
            )
        self.sample_rate, self._channels = sample_rate, channels
        self._digest = AudioDigest(sample_rate, channels)


def to_float(array: NDArray[Any], format: str, channels: int) -> Samples:
    """Samples as FFmpeg stores them -> float32 [S, channels] in -1..1.

    Packed formats arrive as [1, S * channels], planar ones (named with a final p) as [channels, S].
    """
    silence, scale = _SCALES[format.removesuffix("p")]
    samples = array.T if format.endswith("p") else array.reshape(-1, channels)
    samples = samples.astype(np.float64 if samples.itemsize == 8 else np.float32)
    if silence:
        samples = samples - np.float32(silence)
    # Adding zero turns -0.0 into 0.0, so that equal samples have equal bytes and digests.
    return np.ascontiguousarray(samples * samples.dtype.type(scale) + 0, np.float32)


def _require(stream: Any) -> AudioStream:
    if not isinstance(stream, AudioStream):
        raise InvalidRequest("file holds no sound", reason=Reason.MEDIA_EMPTY)
    return stream
