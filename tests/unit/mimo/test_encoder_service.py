"""The shared encoder flow: one encode, early answers, and no failure because the store has one."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from mimo.encoder import Encoded, EncodeService
from mimo.errors import (
    DeadlineExceeded,
    EmbeddingMismatch,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, EmbeddingStore, Lookup, LookupStatus, Manifest, Outcome
from mimo.store.lease import LeaseTimes
from mimo.store.memory_store import MemoryStore
from mimo.tensor import Chunk
from tests.support.encoding import (
    FINGERPRINT,
    CountingEncoder,
    Upload,
    embedding_of,
    payload_of,
    request_of,
)

PAYLOAD = payload_of(7)
EMBEDDING = embedding_of(PAYLOAD)
Service = EncodeService[int]
Make = Callable[..., Service]


@pytest.fixture
def encoder() -> CountingEncoder:
    return CountingEncoder()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def make(store: MemoryStore, encoder: CountingEncoder) -> AsyncIterator[Make]:
    """Makes services that share the store and the encoder, as replicas would share a store."""
    made: list[Service] = []

    def make(store: EmbeddingStore = store, **options: Any) -> Service:
        settings = {
            "encoder_fingerprint": FINGERPRINT,
            "max_batch_cost": 8.0,
            "max_queued_cost": 64.0,
            "min_ms_per_mib": 0.0,
            "lease_times": LeaseTimes(ttl_s=3600.0, renew_s=3600.0, poll_s=3600.0),
            **options,
        }
        made.append(EncodeService(store, encoder, Metrics("vision"), **settings))
        return made[-1]

    yield make
    encoder.gate.set()
    for service in made:
        await service.aclose()


@pytest.fixture
def key() -> EmbeddingKey:
    return EmbeddingKey(secrets.token_hex(32))


async def frozen() -> AsyncIterator[Chunk]:
    """An upload that never comes."""
    await asyncio.Event().wait()
    yield next(iter(()))


async def steps(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def start(
    service: Service, key: EmbeddingKey, upload: Upload | None = None, **changes: Any
) -> asyncio.Task[Encoded]:
    request = request_of(key, PAYLOAD, **changes)
    return asyncio.create_task(service.encode(request, upload or Upload(PAYLOAD)))


def items(service: Service, outcome: str) -> float:
    return service._metrics.value("mimo_encoder_items_total", kind="image", outcome=outcome)


async def test_the_first_call_encodes_and_stores(
    make: Make, store: MemoryStore, key: EmbeddingKey
) -> None:
    service = make()
    encoded = await start(service, key)
    assert (encoded.outcome, encoded.tensor) == (Outcome.MISS, None)
    assert encoded.encode_ms > 0
    lookup = await store.get(key)
    assert lookup.manifest is not None
    assert (lookup.manifest, lookup.tensor) == (encoded.manifest, EMBEDDING)
    assert encoded.manifest_digest == lookup.manifest.digest
    assert encoded.manifest.encoder_fingerprint == FINGERPRINT
    assert items(service, "encoded") == 1


async def test_checksums_are_not_made_on_the_event_loop(
    make: Make, key: EmbeddingKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    describe = Manifest.describe

    def described(*arguments: Any, **named: Any) -> Manifest:
        threads.append(threading.current_thread())
        return describe(*arguments, **named)

    monkeypatch.setattr(Manifest, "describe", described)
    await start(make(), key)
    assert len(threads) == 1 and threading.current_thread() not in threads


async def test_a_hit_is_answered_without_reading_the_upload(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make()
    first = await start(service, key)
    upload = Upload(PAYLOAD)
    second = await start(make(), key, upload)
    assert (second.outcome, second.encode_ms) == (Outcome.HIT, 0)
    assert second.manifest == first.manifest
    assert (upload.num_read, encoder.num_encoded) == (0, 1)


async def test_calls_of_one_process_share_an_encode_and_an_upload(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make()
    encoder.gate.clear()
    uploads = [Upload(PAYLOAD) for _ in range(5)]
    calls = [start(service, key, upload) for upload in uploads]
    await steps()
    encoder.gate.set()
    outcomes = [(await call).outcome for call in calls]
    assert outcomes == [Outcome.MISS] + 4 * [Outcome.JOINED]
    assert [upload.num_read for upload in uploads] == [4, 0, 0, 0, 0]
    assert encoder.num_encoded == 1
    assert items(service, "joined") == 4


async def test_calls_of_two_processes_share_an_encode(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    one, other = make(), make()
    encoder.gate.clear()
    leader = start(one, key)
    await steps()
    upload = Upload(PAYLOAD)
    follower = start(other, key, upload)
    await steps()
    encoder.gate.set()
    assert [(await leader).outcome, (await follower).outcome] == [Outcome.MISS, Outcome.JOINED]
    assert (upload.num_read, encoder.num_encoded) == (0, 1)


async def test_different_keys_share_a_batch(make: Make, encoder: CountingEncoder) -> None:
    service = make()
    encoder.gate.clear()
    blocking = start(service, EmbeddingKey("ab" * 32))
    await steps()
    calls = [start(service, EmbeddingKey(secrets.token_hex(32))) for _ in range(4)]
    await steps()
    encoder.gate.set()
    await asyncio.gather(blocking, *calls)
    assert encoder.batches == [1, 4]


async def test_an_encode_goes_on_while_anybody_waits(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make()
    encoder.gate.clear()
    leader, joined = start(service, key), start(service, key)
    await steps()
    leader.cancel()
    await steps()
    encoder.gate.set()
    assert (await joined).outcome is Outcome.JOINED
    assert encoder.num_encoded == 1
    assert items(service, "cancelled") == 1


async def test_an_encode_stops_when_nobody_waits(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make(max_batch_cost=1.0)
    encoder.gate.clear()
    blocking = start(service, EmbeddingKey("ab" * 32))
    await steps()
    calls = [start(service, key), start(service, key)]
    await steps()
    assert service.load.queued_work == 1
    for call in calls:
        call.cancel()
    await steps()
    assert service.load.queued_work == 0
    encoder.gate.set()
    await blocking
    assert encoder.num_encoded == 1


async def test_a_call_after_the_last_waiter_left_starts_afresh(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make()
    encoder.gate.clear()
    abandoned = start(service, key)
    await steps()
    abandoned.cancel()
    await asyncio.wait({abandoned})
    call = start(service, key)
    await steps()
    encoder.gate.set()
    assert (await call).outcome is Outcome.MISS


async def test_an_upload_that_breaks_hands_over_to_the_next(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    async def damaged() -> AsyncIterator[Chunk]:
        async for chunk in Upload(PAYLOAD):
            yield replace(chunk, crc32c=chunk.crc32c ^ 1)

    service = make()
    request = request_of(key, PAYLOAD)
    bad = asyncio.create_task(service.encode(request, damaged()))
    good = start(service, key)
    with pytest.raises(InvalidRequest, match="damaged"):
        await bad
    await good
    assert encoder.num_encoded == 1
    assert items(service, "failed") == 1


async def test_an_uploader_that_leaves_hands_over_to_the_next(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    async def stalled() -> AsyncIterator[Chunk]:
        async for chunk in Upload(PAYLOAD):
            yield chunk
            await asyncio.Event().wait()

    service = make()
    slow = asyncio.create_task(service.encode(request_of(key, PAYLOAD), stalled()))
    patient = start(service, key)
    await steps()
    slow.cancel()
    await patient
    assert encoder.num_encoded == 1


async def test_an_upload_that_stalls_hands_over_to_the_next(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make(upload_stall_s=0.001)
    slow = asyncio.create_task(service.encode(request_of(key, PAYLOAD), frozen()))
    await steps(1)
    await start(service, key)
    with pytest.raises(DeadlineExceeded, match="no chunk"):
        await slow
    assert encoder.num_encoded == 1


async def test_an_upload_without_a_key_that_stalls_gives_its_room_back(make: Make) -> None:
    service = make(upload_stall_s=0.001)
    header = (PAYLOAD.dtype, PAYLOAD.shape)
    with pytest.raises(DeadlineExceeded, match="no chunk"):
        await service.compute(0, 64.0, header, frozen())
    assert service.load.queued_work == 0
    assert await service.compute(0, 64.0, header, Upload(PAYLOAD)) == EMBEDDING


async def test_an_upload_that_ends_early_is_an_error(make: Make, key: EmbeddingKey) -> None:
    async def half() -> AsyncIterator[Chunk]:
        async for chunk in Upload(PAYLOAD, 16):
            yield chunk
            return

    with pytest.raises(InvalidRequest, match="16 of 32"):
        await make().encode(request_of(key, PAYLOAD), half())


async def test_a_payload_beyond_the_limit_is_refused_before_it_is_read(
    make: Make, key: EmbeddingKey
) -> None:
    upload = Upload(PAYLOAD)
    with pytest.raises(InvalidRequest, match="limit"):
        await start(make(max_payload_bytes=16), key, upload)
    assert upload.num_read == 0


async def test_a_full_queue_refuses_before_the_upload_and_frees_the_lease(
    make: Make, encoder: CountingEncoder, store: MemoryStore, key: EmbeddingKey
) -> None:
    service = make(max_queued_cost=2.0, max_batch_cost=1.0)
    encoder.gate.clear()
    others = []
    for _ in range(3):
        others.append(start(service, EmbeddingKey(secrets.token_hex(32))))
        await steps()
    upload = Upload(PAYLOAD)
    with pytest.raises(Overloaded):
        await start(service, key, upload)
    assert upload.num_read == 0
    assert await store.acquire_lease(key, "another replica", 10)
    encoder.gate.set()
    await asyncio.gather(*others)
    assert items(service, "rejected") == 1


async def test_the_queue_is_bounded_in_bytes_of_payloads(make: Make, key: EmbeddingKey) -> None:
    service = make()
    large = request_of(key, PAYLOAD, payload_shape=((1 << 30) - 31,))
    waiting = asyncio.create_task(service.encode(large, frozen()))
    await steps()
    with pytest.raises(Overloaded):
        await start(service, EmbeddingKey(secrets.token_hex(32)))
    waiting.cancel()


async def test_a_hit_needs_no_room_in_the_queue(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make(max_queued_cost=1.0, max_batch_cost=1.0)
    await start(service, key)
    encoder.gate.clear()
    others = []
    for _ in range(2):
        others.append(start(service, EmbeddingKey(secrets.token_hex(32))))
        await steps()
    assert (await start(service, key)).outcome is Outcome.HIT
    encoder.gate.set()
    await asyncio.gather(*others)


async def test_a_patient_caller_keeps_the_work_of_a_hasty_one(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    now = 0.0
    service = make(max_batch_cost=1.0, clock=lambda: now)
    encoder.gate.clear()
    blocking = start(service, EmbeddingKey("ab" * 32))
    await steps()
    hasty = start(service, key, deadline=5.0)
    expired = start(service, EmbeddingKey("cd" * 32), deadline=5.0)
    await steps()
    patient = start(service, key, deadline=50.0)
    await steps()
    now = 10.0
    encoder.gate.set()
    await asyncio.gather(blocking, hasty, patient)
    with pytest.raises(DeadlineExceeded):
        await expired
    assert encoder.num_encoded == 2
    assert items(service, "expired") == 1


async def test_an_error_of_the_encoder_reaches_every_waiter_and_no_neighbour(
    make: Make, encoder: CountingEncoder, store: MemoryStore, key: EmbeddingKey
) -> None:
    service = make()
    encoder.gate.clear()
    first = start(service, EmbeddingKey("ab" * 32))
    await steps()
    bad = [start(service, key, plan=-1) for _ in range(2)]
    good = start(service, EmbeddingKey("cd" * 32))
    await steps()
    encoder.gate.set()
    await asyncio.gather(first, good)
    for call in bad:
        with pytest.raises(ZeroDivisionError):
            await call
    assert (await store.find(key)).status is LookupStatus.MISS
    assert await store.acquire_lease(key, "another replica", 10)


async def test_the_embedding_travels_with_the_answer_when_asked_for(
    make: Make, key: EmbeddingKey
) -> None:
    service = make()
    fresh = await start(service, key, inline=True)
    assert (fresh.outcome, fresh.tensor) == (Outcome.MISS, EMBEDDING)
    found = await start(service, key, inline=True)
    assert (found.outcome, found.tensor) == (Outcome.HIT, EMBEDDING)


async def test_a_bypass_replaces_the_entry(
    make: Make, encoder: CountingEncoder, store: MemoryStore, key: EmbeddingKey
) -> None:
    service = make()
    first = await start(service, key)
    wish = await start(service, key, bypass=True)
    repair = await start(service, key, bypass=True, attempt=1)
    assert [wish.outcome, repair.outcome] == [Outcome.BYPASS, Outcome.REPAIRED]
    assert len({each.manifest_digest for each in (first, wish, repair)}) == 3
    assert await store.peek(key) == repair.manifest
    assert encoder.num_encoded == 3


async def test_embeddings_cheaper_to_encode_than_to_move_are_not_stored(
    make: Make, store: MemoryStore, key: EmbeddingKey
) -> None:
    service = make(min_ms_per_mib=1e12)
    encoded = await start(service, key)
    assert (encoded.outcome, encoded.tensor) == (Outcome.MISS, EMBEDDING)
    assert (await store.find(key)).status is LookupStatus.MISS


async def test_a_key_of_another_encoder_is_refused(make: Make, key: EmbeddingKey) -> None:
    with pytest.raises(EmbeddingMismatch):
        await start(make(), key, encoder_fingerprint="e1" * 32)


class Forgetful(MemoryStore):
    """Finds entries and cannot read them."""

    async def get(self, key: EmbeddingKey) -> Lookup:
        return Lookup(LookupStatus.TORN)


async def test_an_entry_that_is_gone_before_it_is_read_is_encoded_again(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make(Forgetful())
    await start(service, key)
    again = await start(service, key, inline=True)
    assert (again.outcome, again.tensor) == (Outcome.REPAIRED, EMBEDDING)
    assert encoder.num_encoded == 2


class Torn(MemoryStore):
    """Its entry has lost chunks once."""

    async def find(self, key: EmbeddingKey) -> Lookup:
        return Lookup(LookupStatus.TORN)


async def test_a_damaged_entry_is_repaired(make: Make, key: EmbeddingKey) -> None:
    service = make(Torn())
    assert (await start(service, key)).outcome is Outcome.REPAIRED
    assert items(service, "repaired") == 1


class Full(MemoryStore):
    async def put(self, manifest: Manifest, tensor: Any, *, replace: bool = False) -> None:
        return None


async def test_a_store_that_takes_nothing_makes_answers_inline(
    make: Make, encoder: CountingEncoder, key: EmbeddingKey
) -> None:
    service = make(Full())
    encoder.gate.clear()
    calls = [start(service, key) for _ in range(3)]
    await steps()
    encoder.gate.set()
    assert [(await call).tensor for call in calls] == 3 * [EMBEDDING]
    assert encoder.num_encoded == 1


class Rival(MemoryStore):
    """Another writer commits first."""

    async def put(
        self, manifest: Manifest, tensor: Any, *, replace: bool = False
    ) -> Manifest | None:
        other = Manifest.describe(
            manifest.key, tensor, encoder_fingerprint=FINGERPRINT, encode_ms=1.0
        )
        await super().put(other, tensor)
        return await super().put(manifest, tensor, replace=replace)


async def test_the_answer_names_the_entry_that_stands(make: Make, key: EmbeddingKey) -> None:
    store = Rival()
    encoded = await start(make(store), key)
    assert await store.peek(key) == encoded.manifest


async def test_closing_refuses_new_work_and_answers_hits(make: Make, key: EmbeddingKey) -> None:
    service = make()
    await start(service, key)
    await service.aclose()
    assert (await start(service, key)).outcome is Outcome.HIT
    with pytest.raises(Unavailable):
        await start(service, EmbeddingKey("ab" * 32))


async def test_work_and_time_are_measured(make: Make, key: EmbeddingKey) -> None:
    service = make()
    await start(service, key, cost=4.0)
    value = service._metrics.value
    assert value("mimo_encoder_admitted_work_total") == 4
    assert value("mimo_encoder_completed_work_total") == 4
    assert value("mimo_encoder_busy_seconds_total") > 0
    assert value("mimo_encoder_capacity_work_per_second") > 0
    assert (value("mimo_encoder_queued_work"), value("mimo_encoder_running_work")) == (0, 0)
    for stage in ("fetch", "tower", "store_put"):
        assert value("mimo_encoder_encode_seconds", stage=stage) == 1
