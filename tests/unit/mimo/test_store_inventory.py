"""`mimo store`: what is counted, what verification finds, what purging leaves."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from mimo.cli.main import app
from mimo.errors import ConfigError, Unavailable
from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, LookupStatus, Manifest
from mimo.store.inventory import Inventory
from mimo.store.layout import chunk_names, manifest_name
from mimo.store.redis_store import RedisLimits, RedisStore
from mimo.tensor import RawTensor
from tests.support.redis import ValkeyProcess

TENSOR = RawTensor("float32", (8, 64), bytes(range(256)) * 8)


@pytest.fixture
async def store(redis_server: ValkeyProcess) -> AsyncIterator[RedisStore]:
    limits = RedisLimits(timeout_s=30.0)
    store = RedisStore.from_url(redis_server.url, Metrics("vision"), limits=limits)
    yield store
    await store.aclose()


@pytest.fixture
async def server(redis_server: ValkeyProcess) -> AsyncIterator[Any]:
    client = Redis.from_url(redis_server.url, protocol=2)
    yield client
    await client.aclose()


async def put(store: RedisStore, encoder: str = "e0") -> Manifest:
    manifest = Manifest.describe(
        EmbeddingKey(secrets.token_hex(32)),
        TENSOR,
        encoder_fingerprint=encoder,
        encode_ms=20.0,
        chunk_bytes=512,
    )
    assert await store.put(manifest, TENSOR) == manifest
    return manifest


async def test_everything_is_counted(
    store: RedisStore, server: Any, redis_server: ValkeyProcess
) -> None:
    manifests = [await put(store) for _ in range(3)] + [await put(store, "e1")]
    await store.put_alias("ab" * 32, b"plan")
    await store.acquire_lease(EmbeddingKey("cd" * 32), "me", 60.0)
    await server.delete(manifest_name(manifests[0].key))  # as if its writer had died
    async with Inventory.open(redis_server.url) as inventory:
        stats = await inventory.stats()
    assert (stats.entries, stats.chunks, stats.orphaned_chunks) == (3, 16, 4)
    assert (stats.leases, stats.plans, stats.embedding_bytes) == (1, 1, 3 * 2048)
    assert stats.by_encoder == {"e0": 2, "e1": 1}
    assert stats.server["nodes"] == 1 and stats.server["maxmemory_policy"] == "allkeys-lfu"


async def test_verification_finds_and_removes_what_is_damaged(
    store: RedisStore, server: Any, redis_server: ValkeyProcess
) -> None:
    whole, torn, flipped, unreadable, longer = [await put(store) for _ in range(5)]
    await server.delete(chunk_names(torn)[2])
    await server.setrange(chunk_names(flipped)[3], 100, b"\xff")
    await server.setrange(manifest_name(unreadable.key), 10, b"x")
    await server.append(chunk_names(longer)[0], b"!")
    await server.expire(manifest_name(whole.key), 77)
    async with Inventory.open(redis_server.url) as inventory:
        verdict = await inventory.verify()
        assert (verdict.whole, verdict.torn, verdict.corrupt) == (1, 1, 3)
        damaged = {manifest.key for manifest in (torn, flipped, unreadable, longer)}
        assert set(verdict.damaged_keys) == damaged
        assert (await inventory.verify()).damaged_keys == []
    assert await server.ttl(manifest_name(whole.key)) <= 77
    assert (await store.find(torn.key)).status is LookupStatus.MISS


async def test_purging_leaves_what_is_not_ours(
    store: RedisStore, server: Any, redis_server: ValkeyProcess
) -> None:
    old, new = await put(store, "old"), await put(store, "new")
    await store.put_alias("ab" * 32, b"plan")
    await server.set("somebody else's", b"1")
    async with Inventory.open(redis_server.url) as inventory:
        assert await inventory.purge("old") == 5
        assert (await store.find(old.key)).status is LookupStatus.MISS
        assert (await store.find(new.key)).status is LookupStatus.HIT
        assert await inventory.purge() == 6
    assert await server.keys() == [b"somebody else's"]


async def test_a_store_that_is_not_there_is_named() -> None:
    async with Inventory.open("redis://127.0.0.1:1") as inventory:
        with pytest.raises(Unavailable, match="does not answer"):
            await inventory.stats()
    with pytest.raises(ConfigError, match="inside one process"):
        async with Inventory.open("memory://"):
            pass


async def test_the_commands(store: RedisStore, server: Any, redis_server: ValkeyProcess) -> None:
    torn = await put(store)
    await put(store)
    await server.delete(chunk_names(torn)[0])

    async def run(*arguments: str) -> Any:
        command = ["store", *arguments, "--store", redis_server.url]
        return await asyncio.to_thread(CliRunner().invoke, app, command)

    result = await run("stats", "--json")
    assert json.loads(result.stdout)["entries"] == 2
    assert "media plans" in (await run("stats")).stdout
    result = await run("verify")
    assert result.exit_code == 1 and f"removed {torn.key}" in result.stdout
    assert json.loads((await run("verify", "--json")).stdout)["whole"] == 1
    result = await run("purge", "--yes")
    assert result.exit_code == 0 and result.stdout == "removed 8 names\n"
    assert (await run("stats")).stdout.startswith("entries               0 ")
