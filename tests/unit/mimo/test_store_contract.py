"""What every embedding store promises, in memory and on a real server alike."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from mimo.errors import ConfigError
from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, EmbeddingStore, LookupStatus, Manifest, open_store
from mimo.store.memory_store import MemoryStore
from mimo.store.redis_store import RedisLimits, RedisStore
from mimo.tensor import RawTensor

HOLDER, OTHER = "holder", "other"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("vision")


@pytest.fixture(params=["memory", "redis"])
async def store(
    request: pytest.FixtureRequest, redis_url: str, metrics: Metrics
) -> AsyncIterator[EmbeddingStore]:
    store: EmbeddingStore = MemoryStore(metrics=metrics)
    if request.param == "redis":
        # Time-outs have tests of their own; here a crowded machine must not look like a miss.
        patient = RedisLimits(timeout_s=30.0)
        store = RedisStore.from_url(redis_url, metrics, limits=patient)
    yield store
    await store.aclose()


@pytest.fixture
def key() -> EmbeddingKey:
    return EmbeddingKey(secrets.token_hex(32))


def embedding(num_tokens: int = 4, value: int = 7) -> RawTensor:
    data = bytes((value + index) % 256 for index in range(num_tokens * 16))
    return RawTensor("bfloat16", (num_tokens, 8), data)


def described(key: EmbeddingKey, tensor: RawTensor, chunk_bytes: int = 32) -> Manifest:
    return Manifest.describe(
        key, tensor, encoder_fingerprint="e0", encode_ms=20.0, chunk_bytes=chunk_bytes
    )


async def test_an_unknown_key_is_a_miss(store: EmbeddingStore, key: EmbeddingKey) -> None:
    assert (await store.find(key)).status is LookupStatus.MISS
    assert (await store.get(key)).status is LookupStatus.MISS
    assert await store.peek(key) is None


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 200])
async def test_an_entry_comes_back_bit_for_bit(
    store: EmbeddingStore, key: EmbeddingKey, num_tokens: int
) -> None:
    tensor = embedding(num_tokens)
    manifest = described(key, tensor)
    assert await store.put(manifest, tensor) == manifest
    assert (await store.find(key)).manifest == manifest
    assert await store.peek(key) == manifest
    lookup = await store.get(key)
    assert (lookup.status, lookup.manifest, lookup.tensor) == (LookupStatus.HIT, manifest, tensor)


async def test_lookups_are_counted_and_peeks_are_not(
    store: EmbeddingStore, metrics: Metrics, key: EmbeddingKey
) -> None:
    tensor = embedding()
    await store.find(key)
    await store.put(described(key, tensor), tensor)
    await store.find(key)
    await store.get(key)
    await store.peek(key)
    assert metrics.value("mimo_store_lookups_total", outcome="miss") == 1
    assert metrics.value("mimo_store_lookups_total", outcome="hit") == 2


async def test_the_first_writer_stands(store: EmbeddingStore, key: EmbeddingKey) -> None:
    first, second = embedding(value=1), embedding(value=2)
    manifest = await store.put(described(key, first), first)
    assert await store.put(described(key, second), second) == manifest
    assert (await store.get(key)).tensor == first


async def test_a_replacement_stands_whatever_was_there(
    store: EmbeddingStore, key: EmbeddingKey
) -> None:
    first, second = embedding(value=1), embedding(value=2)
    await store.put(described(key, first), first)
    replacement = described(key, second)
    assert await store.put(replacement, second, replace=True) == replacement
    assert (await store.get(key)).tensor == second


async def test_a_plan_comes_back(store: EmbeddingStore) -> None:
    alias = secrets.token_hex(32)
    assert await store.get_alias(alias) is None
    await store.put_alias(alias, b"plan")
    assert await store.get_alias(alias) == b"plan"
    await store.put_alias(alias, b"another")
    assert await store.get_alias(alias) == b"another"


async def test_a_lease_has_one_holder(store: EmbeddingStore, key: EmbeddingKey) -> None:
    assert await store.acquire_lease(key, HOLDER, 60)
    assert not await store.acquire_lease(key, OTHER, 60)
    assert await store.renew_lease(key, HOLDER, 60)
    assert not await store.renew_lease(key, OTHER, 60)


async def test_only_the_holder_releases_a_lease(store: EmbeddingStore, key: EmbeddingKey) -> None:
    await store.acquire_lease(key, HOLDER, 60)
    await store.release_lease(key, OTHER)
    assert not await store.acquire_lease(key, OTHER, 60)
    await store.release_lease(key, HOLDER)
    assert await store.acquire_lease(key, OTHER, 60)
    await store.release_lease(key, OTHER)


async def test_a_watcher_wakes_when_the_lease_is_released(
    store: EmbeddingStore, key: EmbeddingKey
) -> None:
    await store.acquire_lease(key, HOLDER, 60)
    async with store.watch(key) as wait, asyncio.timeout(60):
        await store.release_lease(key, HOLDER)
        while not await store.acquire_lease(key, OTHER, 60):
            await wait(60)


async def test_a_release_while_waiting_is_heard_before_the_time_is_up(
    store: EmbeddingStore, key: EmbeddingKey
) -> None:
    await store.acquire_lease(key, HOLDER, 60)

    async def follow() -> None:
        async with store.watch(key) as wait:
            watching.set()
            while not await store.acquire_lease(key, OTHER, 60):
                await wait(3600)

    watching = asyncio.Event()
    follower = asyncio.create_task(follow())
    await watching.wait()
    await store.release_lease(key, HOLDER)
    async with asyncio.timeout(60):
        await follower


async def test_a_wait_without_a_release_ends(store: EmbeddingStore, key: EmbeddingKey) -> None:
    async with store.watch(key) as wait, asyncio.timeout(60):
        await wait(0.001)
        await wait(0.001)


@pytest.mark.parametrize("url", ["", "http://host", "redis", "redis://host:port", "ftp://u:p@h"])
def test_a_url_that_is_no_store_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url, Metrics("vision"))


def test_a_password_is_not_repeated_in_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("http://user:secret@host", Metrics("vision"))
    assert "secret" not in str(caught.value)
