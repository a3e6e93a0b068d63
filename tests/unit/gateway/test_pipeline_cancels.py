"""Requests that are left at any step leave no task, no call and no load behind."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.media.workers import WorkerPool
from gateway.model import Model
from tests.support import byte_model
from tests.support.gateway_stack import Stack, ask, open_stack
from tests.support.media import gradient, image_file, tone, wav_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEED = 3
NUM_REQUESTS = 120
SCRIPT = [[*b"one "], [*b"two "], [*b"three"], [byte_model.IM_END]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(2)
    await pool.start()
    yield pool
    await pool.close()


@pytest_asyncio.fixture(loop_scope="module")
async def stack(tmp_path: Path, workers: WorkerPool) -> AsyncIterator[Stack]:
    model = Model.open(byte_model.write(tmp_path), "tiny")
    async with open_stack(model, workers, num_vision=2, num_decoders=2, script=SCRIPT) as opened:
        yield opened


async def test_leaving_at_any_step_leaves_nothing(stack: Stack) -> None:
    chance = random.Random(SEED)
    sound = wav_file(tone(0.2))
    await stack.run(ask("warm", image_file(gradient(32, 32)), sound))
    baseline = await _tasks()
    num_left = 0
    for number in range(NUM_REQUESTS):
        picture = image_file(gradient(32, 32 + 32 * (number % 7)))
        parts = chance.sample(["Hi", picture, sound], chance.randint(1, 3))
        running = asyncio.create_task(stack.run(ask(*parts, tenant_salt=bytes([number]))))
        steps = int(400 * chance.random() ** 2)
        while steps and not running.done():
            await asyncio.sleep(0)
            steps -= 1
        num_left += not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert num_left > NUM_REQUESTS // 2
    assert await _tasks() <= baseline, asyncio.all_tasks()
    for pool in stack.pools.values():
        for replica in await pool.replicas():
            assert (replica.load, replica._calls) == (0.0, {})
    for component in ("vision", "audio"):
        held = stack.metrics.value("mimo_gateway_held_work", component=component)
        assert held == pytest.approx(0.0, abs=1e-6)


async def _tasks() -> int:
    """How many tasks there are, once those that are ending have ended."""
    fewest = len(asyncio.all_tasks())
    for _ in range(250):
        await asyncio.sleep(0.01)
        fewest = min(fewest, len(asyncio.all_tasks()))
    return fewest
