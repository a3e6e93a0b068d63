"""Held-out questions with their media as files, to be asked of a running system.

Pictures are PNG and sounds are WAV, both exact. Videos are H.264 with AAC sound, as people send
them: whole clips at their real frame rates, of which a server takes the frames it wants.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.progress import Progress

from models.training.corpus import Corpus, processor_config
from models.training.draw import stream
from models.training.examples import Example, Examples
from models.training.gates import DRAFTS, SKILLS
from models.training.media_files import write_video, write_wave
from models.training.skills import MIX, WITH_UNSEEN, Medium
from models.training.synth.video import draw_video


def write_prompts(
    examples: Examples, corpus: Corpus, seed: int, folder: Path, count: int, progress: Progress
) -> None:
    """``count`` prompts per skill: ``prompts.jsonl``, the media that its lines name, and
    ``goals.json``, what a trained model shall reach.

    A line holds skill, part, media [{kind, file}] in their order, question and answer. ``seed`` is
    that of the data sets.
    """
    (folder / "media").mkdir(parents=True, exist_ok=True)
    (folder / "goals.json").write_text(json.dumps(SKILLS | DRAFTS, indent=2) + "\n")
    tasks = [(skill, False) for skill in MIX] + [(skill, True) for skill in WITH_UNSEEN]
    lines = []
    for skill, unseen in progress.track(tasks, description="prompts"):
        for index in range(count):
            example = examples.held_out(skill, index, unseen=unseen)
            name = f"{skill}, unseen" if unseen else skill
            lines.append(json.dumps(_line(name, example, corpus, seed, folder)) + "\n")
    # Last, because a folder without it holds no prompts: an interrupted run leaves none behind.
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


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
    """Write a medium. -> its kind and its file within the folder."""
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
