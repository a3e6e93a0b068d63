"""A server that loses, damages, delays or refuses is slower, and never wrong."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, LookupStatus, Manifest
from mimo.store.breaker import Breaker
from mimo.store.redis_store import RedisLimits, RedisStore
from mimo.tensor import RawTensor
from tests.support.redis import ValkeyProcess

# Tests run on crowded machines; only those about time-outs set a short one.
PATIENT = RedisLimits(timeout_s=30.0)
CHUNK_BYTES = 512


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore.from_url(redis_url, Metrics("vision"), limits=PATIENT)
    yield store
    await store.aclose()


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[Any]:
    """A plain client, to look at and tamper with what is stored."""
    client = Redis.from_url(redis_url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
def key() -> EmbeddingKey:
    return EmbeddingKey(secrets.token_hex(32))


TENSOR = RawTensor("float32", (8, 64), b"".join(bytes([i % 251, i // 251]) for i in range(1024)))


def described(key: EmbeddingKey, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    return Manifest.describe(
        key, TENSOR, encoder_fingerprint="e0", encode_ms=20.0, chunk_bytes=chunk_bytes
    )


def manifest_name(key: EmbeddingKey) -> str:
    return f"{{ek1:{key}}}:m"


def chunk_names(manifest: Manifest) -> list[str]:
    return [f"{{ek1:{manifest.key}}}:c:{manifest.writer}:{i}" for i in range(manifest.num_chunks)]


async def test_entries_lie_where_the_layout_says(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    manifest = described(key)
    await store.put(manifest, TENSOR)
    names = {name.decode() async for name in server.scan_iter(f"*{key}*")}
    assert names == {manifest_name(key), *chunk_names(manifest)}
    assert await server.get(manifest_name(key)) == manifest.encoded
    for name, first in zip(chunk_names(manifest), range(0, 2048, CHUNK_BYTES), strict=True):
        assert await server.get(name) == TENSOR.data[first : first + CHUNK_BYTES]


async def test_a_hit_extends_the_life_of_the_whole_entry(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    manifest = described(key)
    await store.put(manifest, TENSOR)
    names = [manifest_name(key), *chunk_names(manifest)]
    for name in names:
        assert await server.expire(name, 100)
    await store.find(key)
    assert all([await server.ttl(name) > 3500 for name in names])


async def test_every_flipped_byte_of_an_entry_is_detected(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    manifest = described(key)
    for name in (manifest_name(key), *chunk_names(manifest)):
        await store.put(manifest, TENSOR)
        good = await server.get(name)
        for position in range(len(good)):
            damaged = bytearray(good)
            damaged[position] ^= 0xFF
            await server.set(name, bytes(damaged))
            lookup = await store.get(key)
            assert (lookup.status, lookup.tensor) == (LookupStatus.CORRUPT, None)
            await server.mset({name: good, manifest_name(key): manifest.encoded})


@pytest.mark.parametrize("index", range(4))
async def test_a_missing_chunk_makes_the_entry_absent(
    store: RedisStore, server: Any, key: EmbeddingKey, index: int
) -> None:
    manifest = described(key)
    for look in (store.find, store.get):
        await store.put(manifest, TENSOR)
        await server.delete(chunk_names(manifest)[index])
        assert (await look(key)).status is LookupStatus.TORN
        assert (await look(key)).status is LookupStatus.MISS


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("length", [0, 1, 511])
async def test_a_truncated_chunk_is_detected(
    store: RedisStore, server: Any, key: EmbeddingKey, index: int, length: int
) -> None:
    manifest = described(key)
    await store.put(manifest, TENSOR)
    name = chunk_names(manifest)[index]
    await server.set(name, (await server.get(name))[:length])
    assert (await store.get(key)).status is LookupStatus.CORRUPT


async def test_an_overlong_chunk_is_detected(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    manifest = described(key)
    for name in chunk_names(manifest):
        await store.put(manifest, TENSOR)
        await server.append(name, b"x")
        assert (await store.get(key)).status is LookupStatus.CORRUPT


async def test_swapped_chunks_are_detected(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    manifest = described(key)
    names = chunk_names(manifest)
    for one in range(4):
        for other in range(one):
            await store.put(manifest, TENSOR)
            first, second = await server.mget(names[one], names[other])
            await server.mset({names[one]: second, names[other]: first})
            assert (await store.get(key)).status is LookupStatus.CORRUPT


async def test_a_manifest_moved_to_another_key_is_detected(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    await store.put(described(key), TENSOR)
    other = EmbeddingKey(secrets.token_hex(32))
    await server.copy(manifest_name(key), manifest_name(other))
    assert (await store.find(other)).status is LookupStatus.CORRUPT


@pytest.mark.parametrize(
    "change", [{"checksums": (1,)}, {"shape": (9, 64)}, {"chunk_bytes": 0}, {"dtype": "float8"}]
)
async def test_a_manifest_that_contradicts_itself_is_detected(
    store: RedisStore, server: Any, key: EmbeddingKey, change: dict[str, Any]
) -> None:
    await store.put(described(key), TENSOR)
    await server.set(manifest_name(key), replace(described(key), **change).encoded)
    assert (await store.get(key)).status is LookupStatus.CORRUPT
    assert (await store.get(key)).status is LookupStatus.MISS


async def test_a_damaged_entry_makes_room_for_the_next_writer(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    await store.put(described(key), TENSOR)
    await server.set(manifest_name(key), b"rubbish")
    assert (await store.find(key)).status is LookupStatus.CORRUPT
    repaired = described(key)
    assert await store.put(repaired, TENSOR) == repaired
    assert (await store.get(key)).tensor == TENSOR


async def test_what_another_writer_put_there_since_is_never_removed(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    """A reader finds a chunk gone, but before it can say so the entry is written again."""
    old, new = described(key), described(key)
    await store.put(old, TENSOR)
    await server.delete(chunk_names(old)[0])
    await store.put(new, TENSOR, replace=True)
    assert (await store._read(old)).status is LookupStatus.TORN
    assert (await store.get(key)).manifest == new


async def test_the_chunks_of_a_late_writer_are_never_read(
    store: RedisStore, server: Any, key: EmbeddingKey
) -> None:
    first, late = described(key), described(key)
    await store.put(first, TENSOR)
    assert await store.put(late, TENSOR) == first
    for name in chunk_names(late):
        await server.set(name, b"late")
    assert (await store.get(key)).tensor == TENSOR


async def test_a_long_entry_is_read_window_by_window(store: RedisStore, key: EmbeddingKey) -> None:
    manifest = described(key, chunk_bytes=32)  # 64 chunks, 4 windows
    await store.put(manifest, TENSOR)
    assert (await store.get(key)).tensor == TENSOR


async def test_a_damaged_plan_is_absent(store: RedisStore, server: Any) -> None:
    alias = secrets.token_hex(32)
    await store.put_alias(alias, b"plan")
    await server.append(f"{{alias:{alias}}}", b"x")
    assert await store.get_alias(alias) is None


async def test_the_plan_of_another_file_is_absent(store: RedisStore, server: Any) -> None:
    alias, other = secrets.token_hex(32), secrets.token_hex(32)
    await store.put_alias(other, b"plan")
    await server.set(f"{{alias:{alias}}}", await server.get(f"{{alias:{other}}}"))
    assert await store.get_alias(alias) is None
    assert await store.get_alias(other) == b"plan"


async def test_an_entry_the_server_refuses_is_not_visible(
    redis_server: ValkeyProcess, key: EmbeddingKey
) -> None:
    """A full server that evicts nothing refuses within the transaction that would commit."""
    client: Any = Redis.from_url(redis_server.url, protocol=2)
    store = RedisStore(client, Metrics("vision"), limits=PATIENT)
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("maxmemory", 1)
    assert await store.put(described(key), TENSOR) is None
    await client.config_set("maxmemory", 0)
    assert (await store.find(key)).status is LookupStatus.MISS
    assert await client.keys() == []
    assert await store.put(manifest := described(key), TENSOR) == manifest
    await store.aclose()


async def test_bytes_are_counted(redis_url: str, key: EmbeddingKey) -> None:
    metrics = Metrics("vision")
    store = RedisStore.from_url(redis_url, metrics, limits=PATIENT)
    await store.put(described(key), TENSOR)
    await store.find(key)
    await store.get(key)
    await store.aclose()
    assert metrics.value("mimo_store_bytes_total", op="put") == 2048
    assert metrics.value("mimo_store_bytes_total", op="get") == 2048


async def everything_is_absent(store: RedisStore, key: EmbeddingKey) -> None:
    assert (await store.find(key)).status is LookupStatus.TIMEOUT
    assert (await store.get(key)).status is LookupStatus.TIMEOUT
    assert await store.peek(key) is None
    assert await store.put(described(key), TENSOR) is None
    assert await store.get_alias("alias") is None
    await store.put_alias("alias", b"plan")
    assert await store.acquire_lease(key, "holder", 10)
    assert await store.renew_lease(key, "holder", 10)
    async with store.watch(key) as wait:
        await wait(0.001)
    await store.release_lease(key, "holder")


async def test_an_unreachable_server_is_an_empty_one(key: EmbeddingKey) -> None:
    metrics = Metrics("vision")
    store = RedisStore.from_url("unix:///nonexistent/socket", metrics)
    await everything_is_absent(store, key)
    assert metrics.value("mimo_store_breaker_open") == 1
    assert metrics.value("mimo_store_lookups_total", outcome="timeout") == 2
    await store.aclose()


async def test_a_server_that_does_not_answer_is_an_empty_one(key: EmbeddingKey) -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up
        writer.close()

    silent = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    limits = RedisLimits(timeout_s=0.01, timeout_s_per_byte=0.0)
    store = RedisStore.from_url(f"redis://127.0.0.1:{port}", Metrics("vision"), limits=limits)
    await everything_is_absent(store, key)
    await store.aclose()
    silent.close()
    await silent.wait_closed()


async def test_a_server_that_refuses_is_an_empty_one(
    redis_server: ValkeyProcess, key: EmbeddingKey
) -> None:
    client: Any = Redis.from_url(redis_server.url, protocol=2)
    await client.config_set("requirepass", "secret")
    await client.aclose()
    store = RedisStore.from_url(redis_server.url, Metrics("vision"), limits=PATIENT)
    await everything_is_absent(store, key)
    await store.aclose()


async def test_a_server_that_restarts_empty_is_used_again(
    redis_server: ValkeyProcess, key: EmbeddingKey
) -> None:
    now = 0.0
    client: Any = Redis.from_url(redis_server.url, protocol=2)
    store = RedisStore(client, Metrics("vision"), limits=PATIENT, clock=lambda: now)
    await store.put(described(key), TENSOR)
    redis_server.kill()
    while (await store.find(key)).status is not LookupStatus.TIMEOUT:
        pass
    redis_server.start()
    now += 10
    assert (await store.find(key)).status is LookupStatus.MISS
    manifest = described(key)
    assert await store.put(manifest, TENSOR) == manifest
    assert (await store.get(key)).tensor == TENSOR
    await store.aclose()


async def test_cancelling_any_operation_leaves_the_store_usable(
    store: RedisStore, key: EmbeddingKey
) -> None:
    """A reply that nobody waited for must not be taken for the next command's."""
    await store.put(described(key), TENSOR)
    for steps in range(40):
        task = asyncio.create_task(store.get(key))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        lookup = await store.get(key)
        assert lookup.tensor == TENSOR


def test_the_breaker_opens_after_five_failures_within_five_seconds() -> None:
    times = iter((0.0, 1.0, 2.0, 3.0, 5.5, 5.6))
    breaker = Breaker(lambda: next(times))
    for _ in range(5):
        breaker.failed()
    assert not breaker.is_open  # the first was 5.5 s ago
    breaker.failed()
    assert breaker.is_open


def test_an_open_breaker_probes_once_a_second_until_one_succeeds() -> None:
    now = 0.0
    breaker = Breaker(lambda: now)
    for _ in range(5):
        breaker.failed()
    assert not breaker.admit()
    now = 1.0
    assert [breaker.admit(), breaker.admit()] == [True, False]
    breaker.failed()
    now = 2.0
    assert [breaker.admit(), breaker.admit()] == [True, False]
    breaker.succeeded()
    assert [breaker.admit(), breaker.admit(), breaker.is_open] == [True, True, False]
