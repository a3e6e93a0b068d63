"""Draw the demo's picture, sound and video: `python -m models.samples`.

They are of the kinds that the bundled model is trained on. Everything is synthetic, so nobody's
rights are touched and the files stay small. Speech needs eSpeak NG, which varies its last bits.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.training.draw import stream
from models.training.media_files import write_video, write_wave
from models.training.synth.espeak import Samples, espeak
from models.training.synth.shapes import Scene, Shape, render
from models.training.synth.sound import SAMPLE_RATE, beeps

FOLDER = Path(__file__).resolve().parents[1] / "mimo" / "cli" / "samples"

SCENE = Scene(
    "left", (Shape("circle", "red", 0.27, 0.5, 0.18), Shape("square", "blue", 0.73, 0.5, 0.18))
)
SPOKEN = ["four", "seven", "one"]
DIRECTION = "right"
NUM_FRAMES, FRAME_RATE = 16, 8.0
NUM_BEEPS = 2  # in the sound of the video

_WHITE = (255, 255, 255)


def moving() -> list[Shape]:
    """The shape in every frame of the video."""
    places = np.linspace(0.25, 0.75, NUM_FRAMES).tolist()
    return [Shape("square", "green", x, 0.5, 0.17) for x in places]


def picture() -> Image.Image:
    """96 x 96."""
    return render(SCENE.shapes, 96, 96, _WHITE, stream("demo", "picture"))


def speech() -> NDArray[np.int16]:
    sound = espeak().speak(
        " ".join(SPOKEN), voice="en-us", words_per_minute=140, pitch=50, sample_rate=SAMPLE_RATE
    )
    return _recorded(sound)


def clip() -> NDArray[np.uint8]:
    """[frames, 64, 64, 3]."""
    frames = [render((s,), 64, 64, _WHITE, stream("demo", "clip")) for s in moving()]
    return np.stack([np.asarray(frame) for frame in frames])


def sound_track() -> NDArray[np.int16]:
    return _recorded(beeps(stream("demo", "beeps"), NUM_BEEPS))


def write(folder: Path = FOLDER) -> None:
    """Write picture.png, sound.wav and clip.mp4 (H.264 with AAC sound)."""
    folder.mkdir(parents=True, exist_ok=True)
    picture().save(folder / "picture.png", optimize=True)
    write_wave(folder / "sound.wav", speech())
    write_video(folder / "clip.mp4", clip(), FRAME_RATE, sound_track())


def _recorded(sound: Samples) -> NDArray[np.int16]:
    """A tenth of a second of silence on both sides, and a level that does not clip."""
    quiet = SAMPLE_RATE // 10
    return (np.pad(0.8 * sound, quiet) * 32_767).astype(np.int16)


if __name__ == "__main__":
    write()
