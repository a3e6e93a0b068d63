"""The media that whole-system tests ask about, as arrays and as files.

Small, so that everything is quick, and different enough that no two share an embedding.
"""

import io

import av
import numpy as np
from numpy.typing import NDArray

from tests.support.media import (
    Pixels,
    Samples,
    gradient,
    image_file,
    numbered_frames,
    tone,
    video_file,
    wav_file,
)

RATE = 24_000  # samples a second, the model's own
FPS = 4

TWO_SECONDS = 2 * FPS  # frames


def picture(number: int = 0, height: int = 64, width: int = 96) -> Pixels:
    """A picture of its own for every number: uint8 [height, width, 3]."""
    return np.roll(gradient(height, width), number * 7, axis=(0, 1))


def png(number: int = 0, height: int = 64, width: int = 96) -> bytes:
    return image_file(picture(number, height, width), "PNG")


def bmp(number: int = 0, height: int = 64, width: int = 96) -> bytes:
    return image_file(picture(number, height, width), "BMP")


def sound(seconds: float = 1.0, hertz: float = 440.0) -> Samples:
    return tone(seconds, RATE, hertz)


def wav(seconds: float = 1.0, hertz: float = 440.0) -> bytes:
    """16-bit mono."""
    return wav_file(sound(seconds, hertz), RATE)


def mp4(num_frames: int = TWO_SECONDS, sound_s: float | None = 1.5, hertz: float = 330.0) -> bytes:
    """A video of ``num_frames`` frames, four a second, silent when ``sound_s`` is None."""
    track = None if sound_s is None else sound(sound_s, hertz)
    return video_file(numbered_frames(num_frames, 64, 64), rate=FPS, sound=track, sound_rate=RATE)


def frames_of(video: bytes, indices: tuple[int, ...]) -> Pixels:
    """Frames of a video in the order they are shown, decoded from the start: [F, H, W, 3]."""
    with av.open(io.BytesIO(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack([frames[index] for index in indices])


def sound_of(file: bytes) -> NDArray[np.float32]:
    """The samples of a mono file as floats: [S]."""
    with av.open(io.BytesIO(file)) as container:
        pieces = [frame.to_ndarray()[0] for frame in container.decode(audio=0)]
    samples = np.concatenate(pieces)
    if samples.dtype == np.int16:
        return (samples.astype(np.float32) / 32768).astype(np.float32)
    return samples
