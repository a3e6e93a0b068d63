"""`mimo eval` without a system: what is asked, counted and reported."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mimo.cli import score
from mimo.cli.client import Answer, Piece, Turn
from mimo.cli.measure import MAX_FAILURES, ask_all
from mimo.cli.prompts import Prompt, read_goals, read_prompts
from mimo.cli.score import Score
from mimo.errors import ConfigError, InvalidRequest, Overloaded


def prompt(question: str, skill: str = "copy", part: str = "any") -> Prompt:
    return Prompt(skill, part, question, f"right {question}", ())


class Oracle:
    """Knows every answer but those about a "stone", and refuses what is "heavy". Each answer has
    5 tokens after its first, in three rounds: 2 drafts held, then 1 of 2, then none was made."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.options: dict[str, Any] = {}
        self.at_once = self.most_at_once = 0

    async def ask(self, turns: Sequence[Turn], **options: Any) -> AsyncIterator[Piece | Answer]:
        question = turns[0].text
        self.asked.append(question)
        self.options = options
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)  # let the others come in
        self.at_once -= 1
        if "heavy" in question:
            raise Overloaded(f"{question} is too much")
        yield Piece("wrong" if "stone" in question else f" right {question}\n")
        usage = {"completion_tokens": 6}
        speculation = {"drafted": [2, 2], "accepted": [2, 0]}
        yield Answer("stop", usage, {"speculation": speculation})

    async def close(self) -> None:
        pass


async def test_every_question_is_asked_once_and_no_more_than_wanted_at_a_time() -> None:
    oracle = Oracle()
    prompts = [prompt(f"question {number}") for number in range(20)]
    advanced: list[int] = []
    outcome = await ask_all(oracle, prompts, 4, lambda: advanced.append(1))
    assert sorted(oracle.asked) == sorted(p.question for p in prompts)
    assert oracle.most_at_once == 4
    assert len(advanced) == 20
    assert outcome.scores["copy"].right == outcome.scores["copy"].total == 20
    assert oracle.options["temperature"] == 0


async def test_right_answers_are_counted_by_skill_and_part() -> None:
    prompts = [
        prompt("a bird", "shapes", "one"),
        prompt("a stone", "shapes", "one"),
        prompt("two birds", "shapes", "pair"),
        prompt("a stone", "sums"),
    ]
    outcome = await ask_all(Oracle(), prompts, 2)
    assert list(outcome.scores) == ["shapes", "sums"]
    assert outcome.scores["shapes"].parts == {"one": [1, 2], "pair": [1, 1]}
    assert (outcome.scores["sums"].right, outcome.scores["sums"].total) == (0, 1)


async def test_rounds_without_a_draft_are_counted_too() -> None:
    """5 tokens, 2 of them drafts: three rounds, though drafts were checked in two."""
    outcome = await ask_all(Oracle(), [prompt("anything")], 1)
    counted = outcome.scores["copy"]
    assert (counted.rounds, counted.emitted) == (3, 5)
    assert (counted.drafted, counted.accepted) == ([2, 2], [2, 0])


async def test_a_failed_request_is_noted_and_the_rest_goes_on() -> None:
    prompts = [prompt("a heavy one"), prompt("a light one"), prompt("another")]
    outcome = await ask_all(Oracle(), prompts, 1)
    assert [(p.question, str(e)) for p, e in outcome.failures] == [
        ("a heavy one", "a heavy one is too much")
    ]
    assert outcome.scores["copy"].total == 2


async def test_a_system_that_fails_again_and_again_is_given_up() -> None:
    oracle = Oracle()
    with pytest.raises(Overloaded):
        await ask_all(oracle, [prompt("heavy")] * 500, 16)
    assert MAX_FAILURES < len(oracle.asked) <= MAX_FAILURES + 16


async def test_a_missing_file_is_a_failed_request(tmp_path: Path) -> None:
    lost = Prompt("shapes", "one", "a bird", "right a bird", (("image", tmp_path / "lost.png"),))
    outcome = await ask_all(Oracle(), [lost], 1)
    assert isinstance(outcome.failures[0][1], InvalidRequest)


def scores() -> dict[str, Score]:
    easy, hard = Score(), Score()
    for part, is_right in (("one", True), ("one", True), ("pair", False), ("pair", True)):
        easy.count_answer(part, is_right)
    easy.count_rounds(2, 6, [2, 2, 2], [2, 1, 1])
    hard.count_answer("copy", False)
    hard.count_rounds(2, 2, [2], [0])
    return {"shapes": easy, "copy": hard}


def test_the_report_has_the_published_shape() -> None:
    assert score.report(scores()) == {
        "skills": {
            "shapes": {
                "accuracy": 0.75,
                "n": 4,
                "acceptance_length": 3.0,
                "parts": {"one": "2/2", "pair": "1/2"},
            },
            "copy": {"accuracy": 0.0, "n": 1, "acceptance_length": 1.0, "parts": {"copy": "0/1"}},
        },
        "acceptance_length": 2.0,  # the mean over skills, of which copying is not predictable
        "acceptance_length_predictable": 3.0,
        "acceptance_by_position": [0.5, 0.5, 0.5],
    }


def test_a_missed_goal_is_shown() -> None:
    report = score.report(scores())
    goals = {"shapes": 0.7, "shapes: pair": 0.8, "acceptance_length": 2.6}
    figures = score.skill_figures(report) | score.draft_figures(report)
    assert score.missed(goals, figures) == ["shapes: pair", "acceptance_length"]
    screen = io.StringIO()
    Console(file=screen, width=80).print(score.table(report, goals))
    lines = {line.split("│")[1].strip(): line for line in screen.getvalue().splitlines()[3:-1]
             if "│" in line}  # fmt: skip
    assert "75.0%" in lines["shapes"] and "missed" not in lines["shapes"]
    assert "50.0%" in lines["pair"] and "80%" in lines["pair"] and "missed" in lines["pair"]
    assert "goal 2.6, missed" in score.acceptance(report, goals)
    assert "missed" not in score.acceptance(report, {"acceptance_length": 2.0})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [
        {
            "skill": skill,
            "part": "any",
            "media": [{"kind": "image", "file": "media/a.png"}],
            "question": f"{skill} {number}",
            "answer": "yes",
        }
        for skill in ("shapes", "copy")
        for number in range(3)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "prompts.jsonl").write_text(text)
    return tmp_path


def test_prompts_are_read_by_skill_and_up_to_a_limit(folder: Path) -> None:
    assert len(read_prompts(folder)) == 6
    assert [p.question for p in read_prompts(folder, ["copy"], 2)] == ["copy 0", "copy 1"]
    assert read_prompts(folder)[0].media == (("image", folder / "media/a.png"),)


def test_goals_are_optional(folder: Path) -> None:
    assert read_goals(folder) == {}
    (folder / "goals.json").write_text('{"shapes": 0.5}')
    assert read_goals(folder) == {"shapes": 0.5}


def test_a_folder_that_holds_no_prompts_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has shapes, copy"):
        read_prompts(folder, ["juggling"])
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        read_prompts(folder / "nowhere")
    (folder / "prompts.jsonl").write_text('{"skill": "shapes"}\n')
    with pytest.raises(ConfigError, match="no list of prompts"):
        read_prompts(folder)
    (folder / "goals.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no goals"):
        read_goals(folder)
