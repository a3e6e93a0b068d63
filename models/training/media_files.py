"""Sounds and videos as files, as people send them."""

import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from models.training.synth.sound import SAMPLE_RATE

_QUALITY = "18"  # H.264's constant rate factor: small losses, like a careful upload


def write_wave(path: Path, samples: NDArray[np.int16]) -> None:
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(SAMPLE_RATE)
        sound.writeframes(samples.astype("<i2").tobytes())


def write_video(
    path: Path, frames: NDArray[np.uint8], rate: float, sound: NDArray[np.int16] | None
) -> None:
    """frames: [frames, height, width, 3], with even sides."""
    with av.open(str(path), "w") as container:
        picture = container.add_stream("libx264", rate=Fraction(rate), options={"crf": _QUALITY})
        picture.height, picture.width = frames.shape[1:3]
        picture.pix_fmt = "yuv420p"
        track = None
        if sound is not None:
            track = container.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        for frame in frames:
            container.mux(picture.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(picture.encode())
        if track is not None and sound is not None:
            values = (sound.astype(np.float32) / 32_768)[None]
            samples = av.AudioFrame.from_ndarray(values, format="fltp", layout="mono")
            samples.sample_rate = SAMPLE_RATE
            container.mux(track.encode(samples))
            container.mux(track.encode())
