"""One encode for everybody, whoever is cancelled or killed, and whatever happens to the store."""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from mimo.encoder import Encoded, EncodeService
from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, EmbeddingStore, LookupStatus, Outcome
from mimo.store.lease import LeaseTimes
from mimo.store.memory_store import MemoryStore
from mimo.store.redis_store import RedisLimits, RedisStore
from tests.support.encoding import (
    FINGERPRINT,
    CountingEncoder,
    Upload,
    embedding_of,
    payload_of,
    request_of,
)
from tests.support.redis import ValkeyProcess

PAYLOAD = payload_of(7)
EMBEDDING = embedding_of(PAYLOAD)
PATIENT = RedisLimits(timeout_s=30.0)
Make = Callable[[EmbeddingStore, CountingEncoder], EncodeService[int]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[EncodeService[int]] = []

    def make(store: EmbeddingStore, encoder: CountingEncoder) -> EncodeService[int]:
        service = EncodeService(
            store,
            encoder,
            Metrics("vision"),
            encoder_fingerprint=FINGERPRINT,
            max_batch_cost=8.0,
            max_queued_cost=64.0,
            min_ms_per_mib=0.0,
            lease_times=LeaseTimes(ttl_s=10.0, renew_s=3.0, poll_s=0.005),
        )
        made.append(service)
        return service

    yield make
    for service in made:
        await service.aclose()


@pytest.fixture
async def redis_stores(redis_url: str) -> AsyncIterator[list[RedisStore]]:
    """Two, as two replicas would have."""
    stores = [RedisStore.from_url(redis_url, Metrics("vision"), limits=PATIENT) for _ in range(2)]
    yield stores
    for store in stores:
        await store.aclose()


def call(service: EncodeService[int], key: EmbeddingKey, **changes: Any) -> asyncio.Task[Encoded]:
    return asyncio.create_task(service.encode(request_of(key, PAYLOAD, **changes), Upload(PAYLOAD)))


def new_key() -> EmbeddingKey:
    return EmbeddingKey(secrets.token_hex(32))


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_sixty_four_callers_at_each_of_two_replicas_cause_one_encode(
    make: Make, redis_stores: list[RedisStore]
) -> None:
    encoder = CountingEncoder(device_s=0.02)
    services = [make(store, encoder) for store in redis_stores]
    key = new_key()
    calls = [call(service, key) for _ in range(64) for service in services]
    answers = await asyncio.gather(*calls)
    assert encoder.num_encoded == 1
    assert len({answer.manifest_digest for answer in answers}) == 1
    outcomes = [answer.outcome for answer in answers]
    assert (outcomes.count(Outcome.MISS), outcomes.count(Outcome.JOINED)) == (1, 127)
    assert (await redis_stores[0].get(key)).tensor == EMBEDDING


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_cancelling_the_leading_replicas_callers_at_any_point_harms_nobody(
    make: Make, redis_stores: list[RedisStore], kind: str
) -> None:
    rng = random.Random(2024)
    memory = MemoryStore()
    stores = [memory, memory] if kind == "memory" else redis_stores
    encoders = [CountingEncoder(), CountingEncoder()]
    leading, following = (make(*each) for each in zip(stores, encoders, strict=True))
    for _ in range(200):
        key = new_key()
        encoded_before = sum(encoder.num_encoded for encoder in encoders)
        doomed = [call(leading, key) for _ in range(rng.randint(1, 3))]
        await steps(rng.randrange(1 + rng.randrange(40)))
        kept = [call(following, key) for _ in range(2)]
        if rng.random() < 0.5:
            kept.append(call(leading, key))
        await steps(rng.randrange(1 + rng.randrange(80)))
        for task in doomed:
            task.cancel()
        answers = await asyncio.gather(*kept)
        await asyncio.wait(doomed)
        assert sum(encoder.num_encoded for encoder in encoders) - encoded_before <= 2
        lookup = await stores[1].get(key)
        assert lookup.tensor == EMBEDDING
        assert {answer.manifest for answer in answers} == {lookup.manifest}


class Mortal:
    """A replica's view of the store until the replica is killed: then nothing happens any more."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)
        if name == "watch":
            return operation

        async def unless_dead(*args: Any, **kwargs: Any) -> Any:
            if self.is_dead:
                await asyncio.Event().wait()
            return await operation(*args, **kwargs)

        return unless_dead


async def test_killing_the_leader_at_any_point_harms_nobody(make: Make) -> None:
    rng = random.Random(2025)
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    survivor_encoder = CountingEncoder()
    survivor = make(store, survivor_encoder)
    for _ in range(200):
        key = new_key()
        encoded_before = survivor_encoder.num_encoded
        doomed_store, doomed_encoder = Mortal(store), CountingEncoder()
        doomed = make(doomed_store, doomed_encoder)  # type: ignore[arg-type]
        lost = [call(doomed, key) for _ in range(2)]
        await steps(rng.randrange(1 + rng.randrange(20)))
        kept = [call(survivor, key) for _ in range(2)]
        await steps(rng.randrange(1 + rng.randrange(40)))
        doomed_store.is_dead = True
        await steps(rng.randrange(3))
        now += 10.0  # its lease, if it had one, ends
        answers = await asyncio.gather(*kept)
        assert doomed_encoder.num_encoded + survivor_encoder.num_encoded - encoded_before <= 2
        lookup = await store.get(key)
        assert lookup.tensor == EMBEDDING
        assert {answer.manifest for answer in answers} == {lookup.manifest}
        for task in lost:
            task.cancel()
        await doomed.aclose()


async def test_a_store_that_cannot_be_reached_fails_nobody(make: Make) -> None:
    store = RedisStore.from_url("unix:///nonexistent/socket", Metrics("vision"))
    encoder = CountingEncoder()
    service = make(store, encoder)
    answers = [await call(service, new_key()) for _ in range(10)]
    answers += await asyncio.gather(*(call(service, new_key()) for _ in range(20)))
    answers += [await call(service, new_key(), bypass=True, inline=True)]
    assert [answer.tensor for answer in answers] == 31 * [EMBEDDING]
    assert {answer.outcome for answer in answers} == {Outcome.MISS, Outcome.BYPASS}
    await store.aclose()


async def test_a_store_that_comes_and_goes_fails_nobody(
    make: Make, redis_server: ValkeyProcess
) -> None:
    now = 0.0
    client: Any = Redis.from_url(redis_server.url, protocol=2)
    store = RedisStore(client, Metrics("vision"), limits=PATIENT, clock=lambda: now)
    encoder = CountingEncoder()
    service = make(store, encoder)
    key = new_key()

    assert (await call(service, key)).outcome is Outcome.MISS
    assert (await call(service, key)).outcome is Outcome.HIT
    redis_server.kill()
    while (await store.find(key)).status is not LookupStatus.TIMEOUT:
        pass
    lost = await call(service, key)
    assert (lost.outcome, lost.tensor) == (Outcome.MISS, EMBEDDING)
    redis_server.start()
    now += 10.0
    back = await call(service, key)
    assert (back.outcome, back.tensor) == (Outcome.MISS, None)
    assert (await call(service, key)).outcome is Outcome.HIT
    assert encoder.num_encoded == 3
    await store.aclose()


async def test_a_store_that_dies_under_load_fails_nobody(
    make: Make, redis_server: ValkeyProcess
) -> None:
    """Callers in every stage of the flow when the server goes away."""
    store = RedisStore.from_url(redis_server.url, Metrics("vision"), limits=PATIENT)
    service = make(store, CountingEncoder(device_s=0.001))
    calls = []
    for number in range(60):
        calls.append(call(service, new_key()))
        await steps(5)
        if number == 30:
            redis_server.kill()
    for answer in await asyncio.gather(*calls):
        assert answer.tensor in (None, EMBEDDING)
    await store.aclose()
