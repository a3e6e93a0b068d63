"""What an evaluation counts, and the figures and the table it makes of that. Pure.

A round is one pass of the decoder that checks drafts: it emits those that hold and one token of its
own. The first token of an answer comes from the prompt and belongs to no round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from rich.table import Table

UNPREDICTABLE = ("copy", "reverse", "reading")  # answers that no draft can foresee

Report = Mapping[str, Any]


@dataclass(slots=True)
class Score:
    """Counts of one skill. ``drafted`` and ``accepted`` are by draft position: how often there was
    a draft, and how often it and all before it held."""

    right: int = 0
    total: int = 0
    parts: dict[str, list[int]] = field(default_factory=dict)  # part -> [right, total]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: int = 0  # tokens of all rounds
    rounds: int = 0

    @property
    def accuracy(self) -> float:
        return self.right / max(1, self.total)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round."""
        return self.emitted / max(1, self.rounds)

    def count_answer(self, part: str, is_right: bool) -> None:
        tally = self.parts.setdefault(part, [0, 0])
        tally[0] += is_right
        tally[1] += 1
        self.right += is_right
        self.total += 1

    def count_rounds(
        self, rounds: int, emitted: int, drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self.rounds += rounds
        self.emitted += emitted
        self.drafted = _added(self.drafted, drafted)
        self.accepted = _added(self.accepted, accepted)


def report(scores: Mapping[str, Score]) -> dict[str, Any]:
    """The figures as ``mimo eval --json`` prints them."""
    drafted: list[int] = []
    accepted: list[int] = []
    for score in scores.values():
        drafted, accepted = _added(drafted, score.drafted), _added(accepted, score.accepted)
    return {
        "skills": {
            name: {
                "accuracy": round(score.accuracy, 4),
                "n": score.total,
                "acceptance_length": round(score.acceptance_length, 3),
                "parts": {part: f"{a}/{b}" for part, (a, b) in sorted(score.parts.items())},
            }
            for name, score in scores.items()
        },
        "acceptance_length": round(_mean_acceptance(scores), 3),
        "acceptance_length_predictable": round(_mean_acceptance(scores, UNPREDICTABLE), 3),
        "acceptance_by_position": [
            round(held / max(1, tried), 4)
            for held, tried in zip_longest(accepted, drafted, fillvalue=0)
        ],
    }


def skill_figures(report: Report) -> dict[str, float]:
    """Accuracies by the names that goals have: "skill", and "skill: part" for its parts."""
    figures: dict[str, float] = {}
    for skill, result in report["skills"].items():
        figures[skill] = result["accuracy"]
        for part, tally in result["parts"].items():
            right, total = map(int, tally.split("/"))
            figures[f"{skill}: {part}"] = right / max(1, total)
    return figures


def draft_figures(report: Report) -> dict[str, float]:
    """Tokens per round, by the names that goals have."""
    return {name: report[name] for name in ("acceptance_length", "acceptance_length_predictable")}


def missed(
    goals: Mapping[str, float], figures: Mapping[str, float], share: float = 1.0
) -> list[str]:
    """Names of the goals, times ``share``, that the figures do not reach."""
    return [name for name, goal in goals.items() if figures.get(name, 0.0) < share * goal]


def table(report: Report, goals: Mapping[str, float]) -> Table:
    """A row for each skill and, where it has several, for each of its parts."""
    table = Table(title="held-out answers that are right as a whole")
    table.add_column("skill")
    for heading in ("right", "of", "tokens per round", "goal"):
        table.add_column(heading, justify="right")
    table.add_column("")
    figures = skill_figures(report)
    for skill, result in report["skills"].items():
        length = f"{result['acceptance_length']:.2f}"
        table.add_row(skill, *_cells(skill, figures, goals, result["n"], length))
        if len(result["parts"]) > 1:
            for part, tally in result["parts"].items():
                name, total = f"{skill}: {part}", int(tally.split("/")[1])
                table.add_row(f"  {part}", *_cells(name, figures, goals, total, ""))
    return table


def acceptance(report: Report, goals: Mapping[str, float]) -> str:
    """How far drafts reach, in words."""
    every, predictable = (
        f"{figure:.2f}{_beside_goal(figure, goals.get(name))}"
        for name, figure in draft_figures(report).items()
    )
    by_position = ", ".join(f"{share:.0%}" for share in report["acceptance_by_position"])
    return (
        f"tokens per round, mean over skills: {every}; "
        f"without {', '.join(UNPREDICTABLE)}: {predictable}\n"
        f"drafts that hold, by position: {by_position or 'none were made'}"
    )


def _beside_goal(figure: float, goal: float | None) -> str:
    if goal is None:
        return ""
    return f" (goal {goal:g})" if figure >= goal else f" (goal {goal:g}, missed)"


def _cells(
    name: str, figures: Mapping[str, float], goals: Mapping[str, float], total: int, length: str
) -> tuple[str, ...]:
    figure, goal = figures[name], goals.get(name)
    if goal is None:
        return f"{figure:.1%}", str(total), length, "", ""
    return f"{figure:.1%}", str(total), length, f"{goal:.0%}", "" if figure >= goal else "missed"


def _mean_acceptance(scores: Mapping[str, Score], without: Sequence[str] = ()) -> float:
    """Mean over skills of the tokens per round."""
    lengths = [
        score.acceptance_length
        for name, score in scores.items()
        if score.rounds and name.split(",")[0] not in without
    ]
    return sum(lengths) / max(1, len(lengths))


def _added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
