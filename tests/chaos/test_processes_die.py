"""Processes are killed and frozen under steady load, and nobody notices.

The schedule is seeded. Every answer, greedy or sampled with a seed, must be the one that the
undisturbed system gives, token for token, whatever happened on the way.
"""

import asyncio
import random
import time

import numpy as np
import pytest

from mimo.cli.load.loops import closed_loop
from tests.support import samples
from tests.support.faults import PAUSE_S, ROLES, FaultInjector
from tests.support.live import Stack, audio, image, video
from tests.support.load import FACES, Answer, Clients, Question, numbers_until

SEED = 20261129
WORKERS = 4
FIRST_WITH_FAULTS = 1_000_000  # numbers of questions: none twice, so that no cache knows them

PICTURE, OTHER, SOUND = image(samples.png(5)), image(samples.png(6)), audio(samples.wav(0.8))
CLIP = video(samples.mp4())

QUESTIONS = tuple(
    Question(f"{name} {'greedy' if seed is None else 'sampled'}", parts, seed, num_tokens)
    for seed in (None, 11)
    for name, parts, num_tokens in (
        ("text", ("tell me a long story",), 64),
        ("picture", (PICTURE, "what is it?"), 24),
        ("sound", ("what do you hear?", SOUND), 24),
        ("two pictures", (PICTURE, "and", OTHER, "?"), 32),
        ("video", (CLIP, "what happens?"), 16),
        ("everything", (OTHER, SOUND, CLIP, "?"), 16),
    )
)


@pytest.mark.check
@pytest.mark.timeout(900)
async def test_a_minute_of_faults_goes_unnoticed(pair: Stack) -> None:
    await endure(pair, seconds=60.0, times_each_role=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_three_minutes_and_every_role_four_times(pair: Stack) -> None:
    await endure(pair, seconds=180.0, times_each_role=4)


async def endure(stack: Stack, *, seconds: float, times_each_role: int) -> None:
    """At least so long, and longer until every role had its share and both of each pair one."""
    injector = FaultInjector(stack, SEED)
    async with Clients.opened(stack.rest_url, stack.grpc_address) as clients:
        await injector.recovered()
        calm = [await clients.ask(question, "grpc") for question in QUESTIONS]
        assert [answer.error for answer in calm] == [""] * len(QUESTIONS)
        expected = {answer.question.name: answer.said for answer in calm}

        async def ask(number: int) -> Answer:
            chance = random.Random(f"{SEED} {number}")
            # Half of the questions belong to nobody else, so that no cache spares the encoders.
            salt = f"{seconds} {number}" if chance.random() < 0.5 else ""
            return await clients.ask(chance.choice(QUESTIONS), chance.choice(FACES), salt=salt)

        calm_until = asyncio.Event()
        calm_load = asyncio.create_task(
            closed_loop(ask, numbers_until(calm_until), workers=WORKERS)
        )
        await asyncio.sleep(seconds / 6)
        calm_until.set()
        undisturbed = await calm_load

        until = asyncio.Event()
        numbers = numbers_until(until, first=FIRST_WITH_FAULTS)
        load = asyncio.create_task(closed_loop(ask, numbers, workers=WORKERS))
        try:
            began = time.monotonic()
            while not _is_enough(injector, time.monotonic() - began, seconds, times_each_role):
                await asyncio.sleep(PAUSE_S)
                await injector.strike()
        finally:
            until.set()
            answers = await load
    _report(injector, undisturbed, answers)
    _check(undisturbed + answers, expected)


def _is_enough(injector: FaultInjector, spent_s: float, seconds: float, times: int) -> bool:
    by_role, by_victim = injector.by_role(), injector.by_victim()
    is_fair = all(by_role[role] >= times for role in ROLES)
    pairs_had_one = len(by_victim) == 7 or times == 1
    return spent_s >= seconds and is_fair and pairs_had_one


def _check(answers: list[Answer], expected: dict[str, tuple[list[int], str]]) -> None:
    failed = [f"{a.question.name} by {a.face}: {a.code} {a.error}" for a in answers if a.error]
    assert failed == []
    wrong = [
        f"{a.question.name} by {a.face}: {a.said}, expected {expected[a.question.name]}"
        for a in answers
        if a.said != expected[a.question.name]
    ]
    assert wrong == []


def _report(injector: FaultInjector, calm: list[Answer], answers: list[Answer]) -> None:
    """Shown by ``pytest -s``."""
    for _, fault in injector.done:
        print(f"  {fault}")  # noqa: T201
    for name, some in (("calm", calm), ("with faults", answers)):
        times = [answer.seconds for answer in some]
        print(  # noqa: T201
            f"{name}: {len(some)} answers, p50 {np.percentile(times, 50):.2f} s, "
            f"p99 {np.percentile(times, 99):.2f} s, longest {max(times):.2f} s"
        )
