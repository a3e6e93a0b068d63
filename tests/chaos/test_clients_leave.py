"""Clients leave at any moment, and nothing of their requests stays behind."""

import asyncio
import random

import pytest

from tests.support import samples
from tests.support.faults import FaultInjector
from tests.support.live import Stack, audio, eventually, image, video
from tests.support.load import FACES, Clients, Question
from tests.support.vitals import num_threads_and_files, open_work, temporary_files

SEED = 4
NUM_REQUESTS = 300
AT_ONCE = 8
SETTLE_S = 5.0

PARTS = (
    ("tell me a story",),
    (image(samples.png(7)), "what is it?"),
    (audio(samples.wav(0.6)), "what do you hear?"),
    (video(samples.mp4()), "what happens?"),
    (image(samples.png(8)), audio(samples.wav(0.4)), "?"),
)
QUESTIONS = [Question(f"question {i}", parts, num_tokens=48) for i, parts in enumerate(PARTS)]


@pytest.mark.check
@pytest.mark.timeout(600)
async def test_three_hundred_that_leave_at_any_moment_leave_nothing(pair: Stack) -> None:
    chance = random.Random(SEED)
    turn = asyncio.Semaphore(AT_ONCE)
    async with Clients.opened(pair.rest_url, pair.grpc_address) as clients:
        await FaultInjector(pair, SEED).recovered()
        for face in FACES:
            for question in QUESTIONS:
                assert (await clients.ask(question, face, salt="warm")).error == ""
        # As many at once as later, so that connections that stay open are open before.
        crowd = (clients.ask(q, f, salt=f"crowd {f}") for q in QUESTIONS for f in FACES)
        assert {answer.error for answer in await asyncio.gather(*crowd)} == {""}
        longest_s = 1.5 * max(
            [(await clients.ask(q, "grpc", salt=f"long {q.name}")).seconds for q in QUESTIONS]
        )
        await asyncio.to_thread(_settled, pair)
        files, threads = temporary_files(pair), num_threads_and_files(pair)

        async def ask_and_leave(number: int) -> bool:
            """Whether the request was left before its end."""
            question, face = chance.choice(QUESTIONS), chance.choice(FACES)
            # Most often early, where there are more things to leave behind.
            patience_s = longest_s * chance.random() ** 2
            salt = f"leave {number}" if chance.random() < 0.7 else ""
            async with turn:
                try:
                    async with asyncio.timeout(patience_s):
                        await clients.ask(question, face, salt=salt)
                except TimeoutError:
                    return True
            return False

        left = await asyncio.gather(*map(ask_and_leave, range(NUM_REQUESTS)))
        assert sum(left) > NUM_REQUESTS // 2
        await asyncio.to_thread(_settled, pair, SETTLE_S)
    assert temporary_files(pair) == files
    after = num_threads_and_files(pair)
    assert after["threads"] <= threads["threads"] + 4  # a pool may keep a thread more
    assert after["files"] <= threads["files"] + 24  # connections to the store are kept open


def _settled(stack: Stack, seconds: float = 30.0) -> None:
    """Gauges add up floats; what rounding leaves is nothing."""

    def is_settled() -> bool:
        return all(abs(amount) < 1e-6 for amount in open_work(stack).values())

    try:
        eventually("nothing stays behind", is_settled, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {open_work(stack)}") from None
