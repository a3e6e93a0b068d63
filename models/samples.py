"""Draw the demo's picture, sound and video: `python -m models.samples`.

Everything is synthetic, so nobody's rights are touched and the files stay a few kilobytes.
"""

import wave
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

FOLDER = Path(__file__).resolve().parents[1] / "mimo" / "cli" / "samples"
SAMPLE_RATE = 24_000
FRAMES, FPS, SIDE = 8, 4, 64


def picture() -> Image.Image:
    """A red circle left of a blue square, 96 x 96."""
    image = Image.new("RGB", (96, 96), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((10, 30, 44, 64), fill=(220, 40, 40))
    draw.rectangle((54, 32, 86, 64), fill=(40, 70, 210))
    return image


def beeps(count: int, pitch_hz: float = 880.0) -> np.ndarray:
    """``count`` beeps of 0.15 s with 0.2 s between them. float32 [num_samples] in -1..1."""
    time = np.arange(int(0.15 * SAMPLE_RATE)) / SAMPLE_RATE
    fade = np.minimum(1, np.minimum(time, time[::-1]) / 0.01)
    beep = 0.5 * np.sin(2 * np.pi * pitch_hz * time) * fade
    gap = np.zeros(int(0.2 * SAMPLE_RATE))
    return np.concatenate([gap, *([beep, gap] * count)]).astype(np.float32)


def clip_frames() -> list[np.ndarray]:
    """A green square that moves to the right. uint8 [SIDE, SIDE, 3] each."""
    frames = []
    for index in range(FRAMES):
        image = Image.new("RGB", (SIDE, SIDE), "white")
        left = 4 + index * 5
        ImageDraw.Draw(image).rectangle((left, 24, left + 16, 40), fill=(30, 160, 60))
        frames.append(np.asarray(image))
    return frames


def write(folder: Path = FOLDER) -> None:
    """Write picture.png, sound.wav and clip.mp4 (H.264 with AAC sound)."""
    folder.mkdir(parents=True, exist_ok=True)
    picture().save(folder / "picture.png", optimize=True)
    pcm = (beeps(3) * 32767).astype("<i2")
    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(SAMPLE_RATE)
        sound.writeframes(pcm.tobytes())
    _write_clip(folder / "clip.mp4")


def _write_clip(path: Path) -> None:
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=FPS)
        video.width = video.height = SIDE
        video.pix_fmt = "yuv420p"
        audio = container.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        for frame in clip_frames():
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(video.encode())
        sound = np.resize(beeps(2), FRAMES * SAMPLE_RATE // FPS)[None]
        samples = av.AudioFrame.from_ndarray(sound, format="fltp", layout="mono")
        samples.sample_rate = SAMPLE_RATE
        container.mux(audio.encode(samples))
        container.mux(audio.encode())


if __name__ == "__main__":
    write()
