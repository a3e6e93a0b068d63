"""Held-out accuracy and draft acceptance, teacher-forced.

An answer is right when every one of its tokens is the most probable one after the right tokens
before it, which is what greedy generation gives, in one forward pass for many examples.
"""

from collections.abc import Sequence
from itertools import takewhile

import torch
from rich.progress import Progress
from torch import Tensor

from mimo.cli.score import Score
from models.training.batch import Batch, Encoded
from models.training.examples import Example, Examples
from models.training.networks import Networks
from models.training.skills import MIX, WITH_UNSEEN

_BATCH = 32


def evaluate(
    networks: Networks, examples: Examples, encoded: Encoded, count: int, progress: Progress
) -> dict[str, Score]:
    """Scores by skill; skills with unknown fonts or voices appear a second time. Drafts are those
    of right answers."""
    tasks = [(skill, False) for skill in MIX] + [(skill, True) for skill in WITH_UNSEEN]
    scores = {}
    for skill, unseen in progress.track(tasks, description="evaluate"):
        drawn = [examples.held_out(skill, i, unseen=unseen) for i in range(count)]
        name = f"{skill}, unseen" if unseen else skill
        scores[name] = _evaluate(networks, drawn, encoded)
    return scores


@torch.inference_mode()
def _evaluate(networks: Networks, drawn: Sequence[Example], encoded: Encoded) -> Score:
    depths = len(networks.mtp.layers)
    score = Score()
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
            score.count_answer(example.turn.exchange.part, number not in wrong)
            if number not in wrong:
                _draft(example, batch.starts[number], drafts, score)
    return score


def _draft_hits(
    networks: Networks, batch: Batch, x: Tensor, hidden: Tensor, depth: int
) -> dict[int, bool]:
    """Whether block ``depth`` is right, by packed row."""
    after = batch.tokens_after(x, depth)
    drafted = networks.mtp.layer(depth, after, hidden, batch.positions, batch.attend)
    answers = batch.answers(depth + 1)
    hits = networks.decoder.logits(drafted[answers.rows]).argmax(dim=-1) == answers.targets
    return dict(zip(answers.rows.tolist(), hits.tolist(), strict=True))


def _draft(example: Example, first_row: int, drafts: list[dict[int, bool]], score: Score) -> None:
    """Replay drafting on a right answer: the token at ``known`` exists, the blocks read the row
    before it and guess what follows."""
    known, last = example.start, len(example.ids) - 1
    while known < last:
        row = first_row + known - 1
        made = drafts[: last - known]
        held = sum(takewhile(bool, (hits[row] for hits in made)))
        emitted = min(held + 1, last - known)
        score.count_rounds(1, emitted, [1] * len(made), [1] * held)
        known += emitted
