"""Ten minutes of mixed work, some of it left by its clients, and no process grows."""

import asyncio
import random
import time

import numpy as np
import pytest

from mimo.cli.load.loops import closed_loop
from tests.support import samples
from tests.support.live import Stack, audio, image, video
from tests.support.load import FACES, Clients, Question, numbers_until
from tests.support.vitals import resident_mib

SEED = 7
WORKERS = 6
SECONDS = 600.0
SETTLING_S = 120.0  # caches fill up, allocators find their size
SAMPLE_S = 5.0
MAX_SLOPE = 1.0  # MiB a minute

PARTS = (
    ("tell me a story",),
    (image(samples.png(70)), "what is it?"),
    (audio(samples.wav(0.7)), "what do you hear?"),
    (video(samples.mp4()), "what happens?"),
    (image(samples.png(71)), audio(samples.wav(0.5)), "?"),
)
QUESTIONS = [
    Question(f"question {number} {seed}", parts, seed, num_tokens=32)
    for number, parts in enumerate(PARTS)
    for seed in (None, 3)
]
TENANTS = 8  # each with its own copy of every embedding
SHARE_LEFT = 0.1


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_no_process_grows(pair: Stack) -> None:
    async with Clients.opened(pair.rest_url, pair.grpc_address) as clients:

        async def ask(number: int) -> bool:
            """Whether it ended well; half of the texts are of nobody else."""
            chance = random.Random(f"{SEED} {number}")
            question, face = chance.choice(QUESTIONS), chance.choice(FACES)
            salt = f"tenant {chance.randrange(TENANTS)}"
            if len(question.parts) == 1 and chance.random() < 0.5:
                salt = f"own {number}"
            patience_s = 2 * chance.random() if chance.random() < SHARE_LEFT else None
            try:
                async with asyncio.timeout(patience_s):
                    return not (await clients.ask(question, face, salt=salt)).error
            except TimeoutError:
                return True

        until = asyncio.Event()
        load = asyncio.create_task(closed_loop(ask, numbers_until(until), workers=WORKERS))
        try:
            await asyncio.sleep(SETTLING_S)
            slopes = await _slopes(pair, SECONDS - SETTLING_S)
        finally:
            until.set()
            answers = await load
    shown = ", ".join(f"{name} {slope:+.2f}" for name, slope in slopes.items())
    print(f"{len(answers)} requests; MiB a minute: {shown}")  # noqa: T201
    assert all(answers)
    assert max(slopes.values()) < MAX_SLOPE, slopes


async def _slopes(stack: Stack, seconds: float) -> dict[str, float]:
    """How fast the resident memory of each process grows, by least squares, in MiB a minute."""
    began = time.monotonic()
    minutes, sizes = list[float](), list[dict[str, float]]()
    while time.monotonic() - began < seconds:
        minutes.append((time.monotonic() - began) / 60)
        sizes.append(resident_mib(stack))
        await asyncio.sleep(SAMPLE_S)
    return {
        name: float(np.polyfit(minutes, [size[name] for size in sizes], 1)[0]) for name in sizes[0]
    }
