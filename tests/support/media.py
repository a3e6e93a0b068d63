"""Tiny media files, made in memory: pictures by Pillow, sound by hand, videos by PyAV."""

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

_PIXEL_FORMATS = {"libx264": "yuv444p", "mjpeg": "yuvj444p", "qtrle": "rgb24"}

Pixels = NDArray[np.uint8]
Samples = NDArray[np.floating[Any]]


def gradient(height: int, width: int) -> Pixels:
    """A picture without any symmetry: uint8 [height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    planes = [(3 * x + 5 * y + 37 * channel) % 256 for channel in range(3)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def image_file(pixels: NDArray[Any], format: str = "PNG", **options: Any) -> bytes:
    """Encode pixels [H, W] or [H, W, 3 or 4]; ``options`` are Pillow's for that format."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **options)
    return buffer.getvalue()


def with_orientation(pixels: Pixels, orientation: int, format: str = "PNG") -> bytes:
    """A picture whose EXIF says how to turn it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return image_file(pixels, format, exif=exif)


def tone(seconds: float, sample_rate: int = 24000, hertz: float = 440.0) -> Samples:
    """A sine of half the full amplitude: [N] float64."""
    time = np.arange(round(seconds * sample_rate)) / sample_rate
    return np.asarray(0.5 * np.sin(2 * np.pi * hertz * time))


def wav_file(samples: Samples, sample_rate: int = 24000, *, floating: bool = False) -> bytes:
    """A WAV of samples [N] or [N, channels] in -1..1, as 16-bit integers or 32-bit floats."""
    frames = samples if samples.ndim == 2 else samples[:, None]
    channels = frames.shape[1]
    if floating:
        body, kind, bits = frames.astype("<f4").tobytes(), 3, 32
    else:
        scaled = np.clip(np.round(frames * 32768), -32768, 32767)
        body, kind, bits = scaled.astype("<i2").tobytes(), 1, 16
    block = channels * bits // 8
    header = struct.pack("<HHIIHH", kind, channels, sample_rate, sample_rate * block, block, bits)
    chunks = b"fmt " + struct.pack("<I", len(header)) + header
    chunks += b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def encoded_audio(
    samples: Samples, sample_rate: int, *, container: str, codec: str, layout: str = "mono"
) -> bytes:
    """Samples [N, channels] through one of FFmpeg's encoders."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        options = {"strict": "experimental"} if codec == "vorbis" else {}
        stream = output.add_stream(codec, rate=sample_rate, layout=layout, options=options)
        _encode_audio(output, stream, samples, sample_rate, layout)
    return buffer.getvalue()


def video_file(
    frames: Sequence[Pixels],
    *,
    rate: int = 30,
    container: str = "mp4",
    codec: str = "libx264",
    sound: Samples | None = None,
    sound_rate: int = 24000,
    sound_codec: str = "aac",
    rotation: int = 0,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    pts: Sequence[int] | None = None,
) -> bytes:
    """A video of frames [H, W, 3] of even sizes; lossless with the default codec but for the
    conversion to 4:4:4. ``rotation`` is counter-clockwise; ``pts`` overrides the frames' times."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=container_options or {}) as output:
        if codec == "libx264" and options is None:
            options = {"crf": "0", "preset": "ultrafast", "x264-params": "log-level=none"}
        stream = output.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = {"libx264": "yuv444p", "mjpeg": "yuvj444p", "qtrle": "rgb24"}.get(
            codec, "yuv420p"
        )
        stream.codec_context.thread_count = 1
        if rotation:
            stream.set_display_rotation(rotation)
        track = None
        if sound is not None:
            track = output.add_stream(sound_codec, rate=sound_rate, layout="mono")
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(format=stream.pix_fmt)
            frame.pts = number if pts is None else pts[number]
            frame.time_base = Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if track is not None and sound is not None:
            _encode_audio(output, track, sound, sound_rate, "mono")
    return buffer.getvalue()


def numbered_frames(count: int, height: int = 48, width: int = 64) -> list[Pixels]:
    """Grey frames whose level tells their number: 0, 10, 20, ... modulo 250."""
    return [np.full((height, width, 3), 10 * n % 250, np.uint8) for n in range(count)]


def _encode_audio(
    output: Any, stream: Any, samples: Samples, sample_rate: int, layout: str
) -> None:
    frames = (samples if samples.ndim == 2 else samples[:, None]).T.astype(
        np.float32
    )  # [channels, N]
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(frames), format="fltp", layout=layout)
    frame.sample_rate = sample_rate
    frame.pts = 0
    resampler = av.AudioResampler(
        format=stream.format, layout=layout, rate=sample_rate, frame_size=stream.frame_size or 1024
    )
    for piece in [*resampler.resample(frame), *resampler.resample(None)]:
        output.mux(stream.encode(piece))
    output.mux(stream.encode(None))
