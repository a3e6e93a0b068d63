"""Asking questions with known answers, many at once, and counting what comes back."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mimo.cli.chat import stream_answer
from mimo.cli.client import Answer, ChatClient
from mimo.cli.prompts import Prompt
from mimo.cli.score import Score
from mimo.errors import MimoError

MAX_FAILURES = 20  # then the system is not worth measuring
MAX_TOKENS = 96  # no right answer is that long


@dataclass
class Outcome:
    """Scores by skill, in the order of the prompts; failed requests are in none of them."""

    scores: dict[str, Score]
    failures: list[tuple[Prompt, MimoError]] = field(default_factory=list)
    seconds: float = 0.0


async def ask_all(
    client: ChatClient,
    prompts: Sequence[Prompt],
    concurrency: int,
    advance: Callable[[], None] = lambda: None,
) -> Outcome:
    """Ask everything, greedily, skills mixed as in real traffic but always in the same order.

    ``advance`` is called after each. A request that fails is noted and the rest goes on. Raises the
    last MimoError once more than MAX_FAILURES have failed.
    """
    outcome = Outcome({prompt.skill: Score() for prompt in prompts})
    waiting = iter(random.Random(0).sample(prompts, len(prompts)))

    async def ask_in_turn() -> None:
        for prompt in waiting:
            if len(outcome.failures) > MAX_FAILURES:
                return
            try:
                text, answer = await _ask(client, prompt)
            except MimoError as error:
                outcome.failures.append((prompt, error))
            else:
                _count(outcome.scores[prompt.skill], prompt, text, answer)
            advance()

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(ask_in_turn())
    if len(outcome.failures) > MAX_FAILURES:
        raise outcome.failures[-1][1]
    outcome.seconds = time.monotonic() - began
    return outcome


async def _ask(client: ChatClient, prompt: Prompt) -> tuple[str, Answer]:
    options = {"temperature": 0, "max_tokens": MAX_TOKENS}
    return await stream_answer(client, [prompt.turn()], options, quiet=True)


def _count(score: Score, prompt: Prompt, text: str, answer: Answer) -> None:
    """Add an answer to its skill's score.

    Rounds are those that checked a draft or, where the decoder went on without drafts, as many as
    it takes to explain the tokens that no draft gave.
    """
    score.count_answer(prompt.part, prompt.is_right(text))
    speculation = answer.report["speculation"]
    drafted, accepted = speculation["drafted"], speculation["accepted"]
    emitted = answer.usage["completion_tokens"] - 1
    score.count_rounds(max(sum(drafted[:1]), emitted - sum(accepted)), emitted, drafted, accepted)
