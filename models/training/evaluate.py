"""Held-out accuracy and draft acceptance, teacher-forced.

An answer is right when every one of its tokens is the most probable one after the right tokens
before it, which is what greedy generation gives, in one forward pass for many examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from models.training.batch import Batch, Encoded
from models.training.examples import Example, Examples
from models.training.networks import Networks
from models.training.skills import MIX, WITH_UNSEEN

UNPREDICTABLE = ("copy", "reverse", "reading")  # answers that no draft can foresee

_BATCH = 32


@dataclass(slots=True)
class Result:
    """Counts of one skill. ``drafted`` and ``accepted`` are by draft position, of right answers."""

    right: int = 0
    total: int = 0
    parts: dict[str, list[int]] = field(default_factory=dict)  # part -> [right, total]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: int = 0
    rounds: int = 0  # of drafting and verifying

    @property
    def accuracy(self) -> float:
        return self.right / max(1, self.total)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round: accepted drafts and the one that the model adds itself."""
        return self.emitted / max(1, self.rounds)

    def count(self, example: Example, is_right: bool) -> None:
        for tally in (self.parts.setdefault(example.turn.exchange.part, [0, 0]),):
            tally[0] += is_right
            tally[1] += 1
        self.right += is_right
        self.total += 1


def evaluate(
    networks: Networks, examples: Examples, encoded: Encoded, count: int, progress: Progress
) -> dict[str, Result]:
    """Results by skill; skills with unknown fonts or voices appear a second time."""
    tasks = [(skill, False) for skill in MIX] + [(skill, True) for skill in WITH_UNSEEN]
    results = {}
    for skill, unseen in progress.track(tasks, description="evaluate"):
        drawn = [examples.held_out(skill, i, unseen=unseen) for i in range(count)]
        name = f"{skill}, unseen" if unseen else skill
        results[name] = _evaluate(networks, drawn, encoded)
    return results


def report(results: dict[str, Result]) -> dict[str, Any]:
    """The figures as ``mimo eval --json`` prints them, and accuracy by part of each skill."""
    drafts = max((len(r.drafted) for r in results.values()), default=0)
    drafted = [sum(r.drafted[n] for r in results.values()) for n in range(drafts)]
    accepted = [sum(r.accepted[n] for r in results.values()) for n in range(drafts)]
    return {
        "skills": {
            name: {
                "accuracy": round(result.accuracy, 4),
                "n": result.total,
                "acceptance_length": round(result.acceptance_length, 3),
                "parts": {part: f"{a}/{b}" for part, (a, b) in sorted(result.parts.items())},
            }
            for name, result in results.items()
        },
        "acceptance_length": round(mean_acceptance(results), 3),
        "acceptance_length_predictable": round(mean_acceptance(results, UNPREDICTABLE), 3),
        "acceptance_by_position": [
            round(a / max(1, d), 4) for a, d in zip(accepted, drafted, strict=True)
        ],
    }


def mean_acceptance(results: dict[str, Result], without: Sequence[str] = ()) -> float:
    """Mean over skills of the tokens per round."""
    lengths = [
        result.acceptance_length
        for name, result in results.items()
        if result.rounds and name.split(",")[0] not in without
    ]
    return sum(lengths) / max(1, len(lengths))


def table(results: dict[str, Result]) -> Table:
    table = Table(title="held-out accuracy")
    for column in ("skill", "right", "of", "tokens per round", "parts"):
        table.add_column(column)
    for name, result in results.items():
        parts = ", ".join(f"{part} {a}/{b}" for part, (a, b) in sorted(result.parts.items()))
        table.add_row(
            name,
            f"{100 * result.accuracy:.1f} %",
            str(result.total),
            f"{result.acceptance_length:.2f}",
            parts,
        )
    return table


@torch.inference_mode()
def _evaluate(networks: Networks, drawn: Sequence[Example], encoded: Encoded) -> Result:
    depths = len(networks.mtp.layers)
    result = Result(drafted=[0] * depths, accepted=[0] * depths)
    ordered = sorted(drawn, key=lambda e: len(e.ids))
    for start in range(0, len(ordered), _BATCH):
        batch = Batch.of(ordered[start : start + _BATCH], encoded)
        x = batch.embed(networks)
        hidden = networks.decoder(x, batch.positions, batch.attend)
        answers = batch.answers(depth=0)
        hits = networks.decoder.logits(hidden[answers.rows]).argmax(dim=-1) == answers.targets
        wrong = set(answers.owners[~hits].tolist())
        drafts = [_draft_hits(networks, batch, x, hidden, depth) for depth in range(depths)]
        for number, example in enumerate(batch.examples):
            result.count(example, number not in wrong)
            if number not in wrong:
                _draft(example, batch.starts[number], drafts, result)
    return result


def _draft_hits(
    networks: Networks, batch: Batch, x: Tensor, hidden: Tensor, depth: int
) -> dict[int, bool]:
    """Whether block ``depth`` is right, by packed row."""
    after = batch.tokens_after(x, depth)
    drafted = networks.mtp.layer(depth, after, hidden, batch.positions, batch.attend)
    answers = batch.answers(depth + 1)
    hits = networks.decoder.logits(drafted[answers.rows]).argmax(dim=-1) == answers.targets
    return dict(zip(answers.rows.tolist(), hits.tolist(), strict=True))


def _draft(example: Example, first_row: int, drafts: list[dict[int, bool]], result: Result) -> None:
    """Replay drafting on a right answer: the token at ``known`` exists, the blocks read the row
    before it and guess what follows."""
    known, last = example.start, len(example.ids) - 1
    while known < last:
        accepted = 0
        for depth, hits in enumerate(drafts):
            if known + 1 + depth > last:
                break
            result.drafted[depth] += 1
            if not hits[first_row + known - 1]:
                break
            result.accepted[depth] += 1
            accepted += 1
        emitted = min(accepted + 1, last - known)
        result.emitted += emitted
        result.rounds += 1
        known += emitted
