"""The store on a Cluster of three: an entry lies in one slot, entries spread over all nodes."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis

from mimo.encoder import EncodeService
from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, LookupStatus, Manifest, Outcome
from mimo.store.redis_store import RedisLimits, RedisStore
from mimo.tensor import RawTensor
from tests.support.encoding import FINGERPRINT, CountingEncoder, Upload, payload_of, request_of
from tests.support.redis import ValkeyProcess, free_port

NUM_SLOTS = 16384
BOUNDS = [NUM_SLOTS * index // 3 for index in range(4)]
TENSOR = RawTensor("bfloat16", (64, 8), bytes(1024))


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Redis]]:
    """Clients of three nodes that know each other and share the slots."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
    ports = [free_port() for _ in range(3)]
    servers = [ValkeyProcess(port, options) for port in ports]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            server.start()
        clients = [
            stack.enter_context(contextlib.closing(Redis.from_url(server.url)))
            for server in servers
        ]
        for client, first, stop in zip(clients, BOUNDS, BOUNDS[1:], strict=False):
            client.cluster("ADDSLOTSRANGE", first, stop - 1)
        for port in ports[1:]:
            clients[0].cluster("MEET", "127.0.0.1", port)
        while not all(_knows_all_slots(client) for client in clients):
            pass
        yield clients


def _knows_all_slots(client: Redis) -> bool:
    info = client.cluster("INFO")
    return info["cluster_state"] == "ok" and info["cluster_slots_assigned"] == str(NUM_SLOTS)


@pytest.fixture
async def stores(nodes: list[Redis]) -> AsyncIterator[list[RedisStore]]:
    """Two, as two replicas would have, told of different nodes."""
    ports = [client.connection_pool.connection_kwargs["port"] for client in nodes]
    stores = [
        RedisStore.from_url(
            f"redis+cluster://127.0.0.1:{one},127.0.0.1:{other}",
            Metrics("vision"),
            limits=RedisLimits(timeout_s=30.0),
        )
        for one, other in (ports[:2], ports[1:])
    ]
    yield stores
    for store in stores:
        await store.aclose()


def new_key() -> EmbeddingKey:
    return EmbeddingKey(secrets.token_hex(32))


async def test_entries_come_back_from_every_node(
    stores: list[RedisStore], nodes: list[Redis]
) -> None:
    for _ in range(30):
        key = new_key()
        manifest = Manifest.describe(
            key, TENSOR, encoder_fingerprint="e0", encode_ms=20.0, chunk_bytes=32
        )
        assert await stores[0].put(manifest, TENSOR) == manifest
        assert (await stores[1].find(key)).manifest == manifest
        assert (await stores[1].get(key)).tensor == TENSOR
        on_nodes = [sum(1 for _ in node.scan_iter(f"*{key}*", 1000)) for node in nodes]
        assert sorted(on_nodes) == [0, 0, 33]
    assert all(node.dbsize() > 0 for node in nodes)


async def test_an_unknown_key_is_a_miss(stores: list[RedisStore]) -> None:
    assert (await stores[0].get(new_key())).status is LookupStatus.MISS


async def test_plans_come_back(stores: list[RedisStore]) -> None:
    alias = secrets.token_hex(32)
    await stores[0].put_alias(alias, b"plan")
    assert await stores[1].get_alias(alias) == b"plan"


async def test_a_release_is_heard_on_another_node(stores: list[RedisStore]) -> None:
    key = new_key()
    await stores[0].acquire_lease(key, "holder", 60)
    async with stores[1].watch(key) as wait, asyncio.timeout(60):
        await stores[0].release_lease(key, "holder")
        while not await stores[1].acquire_lease(key, "other", 60):
            await wait(60)


async def test_callers_at_two_replicas_cause_one_encode(stores: list[RedisStore]) -> None:
    encoder = CountingEncoder(device_s=0.02)
    services = [
        EncodeService(
            store,
            encoder,
            Metrics("vision"),
            encoder_fingerprint=FINGERPRINT,
            max_batch_cost=8.0,
            max_queued_cost=64.0,
            min_ms_per_mib=0.0,
        )
        for store in stores
    ]
    key, payload = new_key(), payload_of(7)
    answers = await asyncio.gather(
        *(
            service.encode(request_of(key, payload), Upload(payload))
            for service in services
            for _ in range(16)
        )
    )
    assert encoder.num_encoded == 1
    assert [answer.outcome for answer in answers].count(Outcome.MISS) == 1
    for service in services:
        await service.aclose()


async def test_a_slot_that_moved_is_found_again(
    stores: list[RedisStore], nodes: list[Redis]
) -> None:
    key = new_key()
    slot = nodes[0].cluster("KEYSLOT", f"{{ek1:{key}}}")
    assert (await stores[0].find(key)).status is LookupStatus.MISS
    owner = next(index for index, bound in enumerate(BOUNDS[1:]) if slot < bound)
    heir = (owner + 1) % len(nodes)
    heir_id = nodes[heir].cluster("MYID").decode()
    for node in (nodes[heir], nodes[owner], nodes[heir - 2]):
        node.cluster("SETSLOT", slot, "NODE", heir_id)
    assert (await stores[0].find(key)).status is LookupStatus.TIMEOUT
    while (await stores[0].find(key)).status is LookupStatus.TIMEOUT:
        pass
    manifest = Manifest.describe(key, TENSOR, encoder_fingerprint="e0", encode_ms=20.0)
    assert await stores[0].put(manifest, TENSOR) == manifest
    assert (await stores[0].get(key)).tensor == TENSOR


async def test_a_cluster_that_cannot_be_reached_is_an_empty_store() -> None:
    url = f"redis+cluster://127.0.0.1:{free_port()}"
    store = RedisStore.from_url(url, Metrics("vision"))
    assert (await store.find(new_key())).status is LookupStatus.TIMEOUT
    assert await store.acquire_lease(new_key(), "holder", 10)
    await store.aclose()
