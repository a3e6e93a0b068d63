"""Held-out questions with their media as files, to be asked of a running system.

Pictures are PNG and sounds are WAV, both exact. Videos are H.264 with AAC sound, as people send
them: whole clips at their real frame rates, of which a server takes the frames it wants.
"""

import json
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.training.corpus import Corpus, processor_config
from models.training.draw import stream
from models.training.examples import Example, Examples
from models.training.skills import MIX, WITH_UNSEEN, Medium
from models.training.synth.sound import SAMPLE_RATE
from models.training.synth.video import draw_video

_QUALITY = "18"  # H.264's constant rate factor: small losses, like a careful upload


def write_prompts(examples: Examples, corpus: Corpus, seed: int, folder: Path, count: int) -> None:
    """``count`` prompts per skill: ``prompts.jsonl`` and the media that its lines name.

    A line holds skill, part, media [{kind, file}] in their order, question and answer. ``seed`` is
    that of the data sets.
    """
    (folder / "media").mkdir(parents=True, exist_ok=True)
    tasks = [(skill, False) for skill in MIX] + [(skill, True) for skill in WITH_UNSEEN]
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as lines:
        for skill, unseen in tasks:
            for index in range(count):
                example = examples.held_out(skill, index, unseen=unseen)
                name = f"{skill}, unseen" if unseen else skill
                line = _line(name, example, corpus, seed, folder)
                lines.write(json.dumps(line) + "\n")


def _line(skill: str, example: Example, corpus: Corpus, seed: int, folder: Path) -> dict[str, Any]:
    exchange = example.turn.exchange
    return {
        "skill": skill,
        "part": exchange.part,
        "media": [_write(medium, corpus, seed, folder) for medium in example.turn.media],
        "question": exchange.question,
        "answer": exchange.answer,
    }


def _write(medium: Medium, corpus: Corpus, seed: int, folder: Path) -> dict[str, str]:
    """Write a medium unless it is there. -> its kind and its file within the folder."""
    content = corpus[medium.name, medium.split].arrays[medium.index]
    name = f"media/{medium.name}-{medium.split}-{medium.index}"
    match medium.name:
        case "sounds":
            file = f"{name}.wav"
            write_wave(folder / file, content)
            return {"kind": "audio", "file": file}
        case "videos":
            sound = None
            if medium.sound is not None:
                name += f"-{medium.sound.index}"
                sound = corpus[medium.sound.name, medium.sound.split].arrays[medium.sound.index]
            rng = stream(seed, medium.name, medium.split, medium.index)
            frames, facts = draw_video(rng, processor_config(), every_frame=True)
            file = f"{name}.mp4"
            write_video(folder / file, frames, facts["rate"], sound)
            return {"kind": "video", "file": file}
    file = f"{name}.png"
    Image.fromarray(np.array(content)).save(folder / file)
    return {"kind": "image", "file": file}


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
