"""Taking turns at a key: one encodes, the others wait for the entry or for the lease."""

import asyncio
import contextlib

import pytest

from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, Manifest
from mimo.store.lease import LeaseTimes, turn
from mimo.store.memory_store import MemoryStore
from mimo.tensor import RawTensor

KEY = EmbeddingKey("ab" * 32)
# Only a release may wake the waiters of most tests: polling is an hour away.
DEAF = LeaseTimes(ttl_s=10.0, renew_s=3600.0, poll_s=3600.0)
POLLING = LeaseTimes(ttl_s=10.0, renew_s=3600.0, poll_s=0.001)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("vision")


async def put(store: MemoryStore) -> Manifest:
    tensor = RawTensor("uint8", (1, 4), b"data")
    manifest = Manifest.describe(KEY, tensor, encoder_fingerprint="e0", encode_ms=1.0)
    await store.put(manifest, tensor)
    return manifest


async def steps(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def follow(store: MemoryStore, metrics: Metrics, times: LeaseTimes) -> Manifest | None:
    async with turn(store, KEY, metrics, times) as manifest:
        return manifest


async def test_the_first_may_encode_and_the_second_gets_the_entry(
    store: MemoryStore, metrics: Metrics
) -> None:
    async with turn(store, KEY, metrics, DEAF) as manifest:
        assert manifest is None
        follower = asyncio.create_task(follow(store, metrics, DEAF))
        await steps()
        assert not follower.done()
        manifest = await put(store)
    assert await follower == manifest
    assert metrics.value("mimo_lease_total", outcome="acquired") == 1
    assert metrics.value("mimo_lease_total", outcome="joined") == 1


async def test_a_leader_that_fails_hands_the_turn_on(store: MemoryStore, metrics: Metrics) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with turn(store, KEY, metrics, DEAF):
            followers = [asyncio.create_task(follow(store, metrics, DEAF)) for _ in range(3)]
            await steps()
            raise ZeroDivisionError
    assert await asyncio.gather(*followers) == [None, None, None]
    assert metrics.value("mimo_lease_total", outcome="stolen") == 3


async def test_a_leader_that_is_cancelled_hands_the_turn_on(
    store: MemoryStore, metrics: Metrics
) -> None:
    async def lead() -> None:
        async with turn(store, KEY, metrics, DEAF):
            await asyncio.Event().wait()

    leader = asyncio.create_task(lead())
    await steps()
    follower = asyncio.create_task(follow(store, metrics, DEAF))
    await steps()
    leader.cancel()
    assert await follower is None


async def test_a_leader_that_dies_is_succeeded_when_its_lease_ends(
    store: MemoryStore, metrics: Metrics, clock: Clock
) -> None:
    await store.acquire_lease(KEY, "dead", 10)
    follower = asyncio.create_task(follow(store, metrics, POLLING))
    clock.now = 9.9
    await steps()
    assert not follower.done()
    clock.now = 10.0
    assert await follower is None


async def test_an_entry_is_noticed_even_if_its_writer_died_before_the_release(
    store: MemoryStore, metrics: Metrics
) -> None:
    await store.acquire_lease(KEY, "dead", 10)
    follower = asyncio.create_task(follow(store, metrics, POLLING))
    await steps()
    manifest = await put(store)
    assert await follower == manifest


async def test_an_entry_committed_just_before_our_turn_is_used(
    store: MemoryStore, metrics: Metrics
) -> None:
    manifest = await put(store)
    assert await follow(store, metrics, DEAF) == manifest
    assert await store.acquire_lease(KEY, "next", 10)


async def test_a_lease_is_renewed_while_the_work_goes_on(
    store: MemoryStore, metrics: Metrics, clock: Clock
) -> None:
    times = LeaseTimes(ttl_s=10.0, renew_s=0.0, poll_s=3600.0)
    async with turn(store, KEY, metrics, times):
        for clock.now in (5.0, 10.0, 15.0, 20.0):
            await steps()
            assert not await store.acquire_lease(KEY, "thief", 10)
    assert await store.acquire_lease(KEY, "next", 10)


async def test_a_lost_lease_is_not_taken_from_its_new_holder(
    store: MemoryStore, metrics: Metrics, clock: Clock
) -> None:
    async with turn(store, KEY, metrics, DEAF):
        clock.now = 10.0
        assert await store.acquire_lease(KEY, "new", 100)
    assert await store.renew_lease(KEY, "new", 100)


@pytest.mark.parametrize("num_steps", range(12))
async def test_cancelling_at_any_step_leaves_the_lease_free(
    store: MemoryStore, metrics: Metrics, num_steps: int
) -> None:
    async def lead() -> None:
        async with turn(store, KEY, metrics, DEAF):
            await steps(5)

    leader = asyncio.create_task(lead())
    await steps(num_steps)
    leader.cancel()
    await asyncio.wait({leader})
    await steps()
    assert await store.acquire_lease(KEY, "next", 10)
