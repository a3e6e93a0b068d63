"""The data sets: made once, stored outside the clone, and checked to be disjoint.

Sample i of a split depends on the seed, the set, the split and i alone, so sets can be made in any
number of processes, and a larger set begins with the smaller one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from rich.progress import Progress

from gateway.media.processor import ProcessorConfig
from mimo.errors import StartupError
from models.config import model_config
from models.tokenizer import build, control_ids
from models.training.draw import stream
from models.training.ragged import Ragged, write_ragged
from models.training.settings import Recipe, Settings
from models.training.synth.handwriting import draw_digit
from models.training.synth.reading import FONTS, UNSEEN_FONTS, draw_reading
from models.training.synth.shapes import draw_picture
from models.training.synth.sound import draw_sound
from models.training.synth.video import draw_video

TRAIN, HELD_OUT, UNSEEN = "train", "held_out", "unseen"  # unseen: fonts, voices and speeds too

SPLITS: dict[str, tuple[str, ...]] = {
    "shapes": (TRAIN, HELD_OUT),
    "texts": (TRAIN, HELD_OUT, UNSEEN),
    "digits": (TRAIN, HELD_OUT),
    "videos": (TRAIN, HELD_OUT),
    "sounds": (TRAIN, HELD_OUT, UNSEEN),
}
HELD_OUT_SPLITS = {
    name: tuple(split for split in splits if split != TRAIN) for name, splits in SPLITS.items()
}

Splits = Mapping[str, Sequence[str]]

_CHUNK = 200  # samples a worker makes at once

Facts = dict[str, Any]
Sample = tuple[NDArray[Any], Facts]


@dataclass(frozen=True)
class DataSet:
    """One split of one set: arrays, and what is known about each."""

    arrays: Ragged
    facts: list[Facts]
    digests: list[str]  # SHA-256 of content

    def __len__(self) -> int:
        return len(self.facts)

    @classmethod
    def open(cls, folder: Path) -> "DataSet":
        """Raises StartupError when the set has not been made."""
        if not (folder / "facts.jsonl").exists():
            raise StartupError(f"{folder} does not exist: run `python -m models.training data`")
        lines = (folder / "facts.jsonl").read_text(encoding="utf-8").splitlines()
        facts = [json.loads(line) for line in lines]
        digests = [fact.pop("digest") for fact in facts]
        return cls(Ragged(folder), facts, digests)


def make(settings: Settings, progress: Progress, splits: Splits = SPLITS) -> None:
    """Make every one of the sets that is not there yet, then check that none leaks into another."""
    with ProcessPoolExecutor(settings.ranks, get_context("spawn")) as pool:
        for name, wanted in splits.items():
            for split in wanted:
                folder = settings.data / name / split
                if not (folder / "facts.jsonl").exists():
                    size = _size(settings.amounts, name, split)
                    _make_split(settings.seed, name, split, size, folder, pool, progress)
    for name, wanted in splits.items():
        made = {split: DataSet.open(settings.data / name / split) for split in wanted}
        if TRAIN in made:
            check_disjoint(made)


def check_disjoint(splits: dict[str, DataSet]) -> None:
    """Raise StartupError when something held out was trained on.

    By content, and by what a sample is made of: an original scan, a string of three characters.
    """
    train, *others = splits
    for identify in (_digests, _sources):
        trained = identify(splits[train])
        for split in others:
            shared = trained & identify(splits[split])
            if shared:
                raise StartupError(f"{split} data was trained on: {sorted(shared)[:3]}")


def _digests(data: DataSet) -> set[str]:
    return set(data.digests)


def _sources(data: DataSet) -> set[str]:
    scans = {f"scan {facts['original']}" for facts in data.facts if "original" in facts}
    return scans | {facts["text"] for facts in data.facts if len(facts.get("text", "")) >= 3}


def _size(amounts: Recipe, name: str, split: str) -> int:
    return int(getattr(amounts, name)) if split == TRAIN else amounts.held_out


def _make_split(
    seed: int,
    name: str,
    split: str,
    size: int,
    folder: Path,
    pool: ProcessPoolExecutor,
    progress: Progress,
) -> None:
    bar = progress.add_task(f"{name}, {split}", total=size)
    arrays: list[NDArray[Any]] = []
    lines: list[str] = []
    starts = range(0, size, _CHUNK)
    stops = (min(start + _CHUNK, size) for start in starts)
    draw = partial(draw_samples, seed, name, split)
    chunks = pool.map(draw, starts, stops)
    for chunk in chunks:
        for array, facts in chunk:
            arrays.append(array)
            lines.append(json.dumps(facts | {"digest": sha256(array.tobytes()).hexdigest()}))
        progress.advance(bar, len(chunk))
    write_ragged(folder, arrays)
    # Last, because a split without it counts as not made.
    (folder / "facts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_samples(seed: int, name: str, split: str, start: int, stop: int) -> Sequence[Sample]:
    """Samples ``start`` to ``stop`` of a split; a function of its arguments, apart from speech,
    in which eSpeak NG varies the last bits."""
    draw = _DRAWERS[name]
    return [draw(split, stream(seed, name, split, index)) for index in range(start, stop)]


@lru_cache(maxsize=1)
def processor_config() -> ProcessorConfig:
    """How the bundled model wants its media prepared."""
    return ProcessorConfig.from_checkpoint(model_config(control_ids(build())))


_DRAWERS: dict[str, Callable[[str, Any], Sample]] = {
    "shapes": lambda split, rng: draw_picture(rng),
    "texts": lambda split, rng: draw_reading(
        rng, UNSEEN_FONTS if split == UNSEEN else FONTS, held_out=split != TRAIN
    ),
    "digits": lambda split, rng: draw_digit(rng, held_out=split != TRAIN),
    "videos": lambda split, rng: draw_video(rng, processor_config()),
    "sounds": lambda split, rng: draw_sound(rng, unseen=split == UNSEEN, taught=split == TRAIN),
}


@dataclass(frozen=True)
class Corpus:
    """Sets of a training run, by name and split."""

    sets: dict[tuple[str, str], DataSet]

    @classmethod
    def open(cls, folder: Path, splits: Splits) -> "Corpus":
        names = [(name, split) for name, wanted in splits.items() for split in wanted]
        return cls({(name, split): DataSet.open(folder / name / split) for name, split in names})

    def __getitem__(self, key: tuple[str, str]) -> DataSet:
        return self.sets[key]
