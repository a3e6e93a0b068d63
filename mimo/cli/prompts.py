"""A folder of questions with known answers: ``prompts.jsonl``, ``media/`` and ``goals.json``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo.cli.client import Attachment, Turn
from mimo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question and its one right answer. ``media`` are kinds and files, in their order."""

    skill: str
    part: str
    question: str
    answer: str
    media: tuple[tuple[str, Path], ...]

    def turn(self) -> Turn:
        """The question with its files. Raises InvalidRequest when one cannot be read."""
        attached = tuple(Attachment.read(kind, path) for kind, path in self.media)
        return Turn("user", self.question, attached)

    def is_right(self, text: str) -> bool:
        return text.strip() == self.answer.strip()


def read_prompts(folder: Path, skills: Sequence[str] = (), limit: int = 0) -> list[Prompt]:
    """The first ``limit`` prompts of each of the ``skills``; no skills are all, 0 is no limit.

    Raises ConfigError when there are none, or none of a skill.
    """
    path = folder / "prompts.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        prompts = [_prompt(json.loads(line), folder) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no list of prompts: {error!r}") from None
    by_skill: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_skill.setdefault(prompt.skill, []).append(prompt)
    if unknown := [skill for skill in skills if skill not in by_skill]:
        raise ConfigError(f"{path} has no {', '.join(unknown)}; it has {', '.join(by_skill)}")
    return [prompt for skill in skills or by_skill for prompt in by_skill[skill][: limit or None]]


def read_goals(folder: Path) -> dict[str, float]:
    """What accuracies and drafts shall reach, by name; empty when the folder has no goals."""
    path = folder / "goals.json"
    if not path.exists():
        return {}
    try:
        return {name: float(goal) for name, goal in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no goals: {error!r}") from None


def _prompt(line: dict[str, Any], folder: Path) -> Prompt:
    media = tuple((str(m["kind"]), folder / m["file"]) for m in line["media"])
    return Prompt(line["skill"], line["part"], line["question"], line["answer"], media)
