"""Whoever encodes for others is killed or cancelled, with real encoders; others are answered."""

import asyncio
import contextlib
import os
import random
import signal

import pytest

from tests.support import samples
from tests.support.faults import FaultInjector
from tests.support.live import Stack, image
from tests.support.load import FACES, Answer, Clients, Question

SEED = 8
NUM_KILLS, NUM_CANCELS = 10, 50
NUM_CLIENTS = 6
MAX_DELAY_S = 0.4

# Large enough that an encode takes a while.
PICTURE = Question("picture", (image(samples.png(9, 512, 512)), "what is it?"), num_tokens=4)


@pytest.mark.check
@pytest.mark.timeout(900)
async def test_killed_leaders_are_succeeded(pair: Stack) -> None:
    chance = random.Random(SEED)
    whole = FaultInjector(pair, SEED)
    async with Clients.opened(pair.rest_url, pair.grpc_address) as clients:
        await whole.recovered()
        expected = (await clients.ask(PICTURE, "grpc")).said
        for trial in range(NUM_KILLS):
            waiting = _ask_together(clients, f"kill {trial}")
            await asyncio.sleep(chance.uniform(0.0, MAX_DELAY_S))
            victim = int(chance.choice(pair.processes("vision"))["pid"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            _check(await asyncio.gather(*waiting), expected)
            await whole.recovered(victim)


@pytest.mark.check
@pytest.mark.timeout(300)
async def test_cancelled_leaders_are_succeeded(pair: Stack) -> None:
    chance = random.Random(-SEED)

    def num_encodes() -> float:
        return pair.total("vision", "mimo_encoder_items_total", outcome="encoded")

    async with Clients.opened(pair.rest_url, pair.grpc_address) as clients:
        await FaultInjector(pair, SEED).recovered()
        expected = (await clients.ask(PICTURE, "grpc")).said
        for trial in range(NUM_CANCELS):
            before = num_encodes()
            leader, *others = _ask_together(clients, f"cancel {trial}")
            await asyncio.sleep(chance.uniform(0.0, MAX_DELAY_S))
            leader.cancel()
            _check(await asyncio.gather(*others), expected)
            await asyncio.gather(leader, return_exceptions=True)
            assert num_encodes() - before <= 2


def _ask_together(clients: Clients, salt: str) -> list[asyncio.Task[Answer]]:
    return [
        asyncio.create_task(clients.ask(PICTURE, FACES[number % 2], salt=salt))
        for number in range(NUM_CLIENTS)
    ]


def _check(answers: list[Answer], expected: tuple[list[int], str]) -> None:
    assert [f"{answer.code} {answer.error}" for answer in answers if answer.error] == []
    assert all(answer.said == expected for answer in answers)
