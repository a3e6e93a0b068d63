"""Time and space in the in-process store."""

from mimo.store import EmbeddingKey, LookupStatus, Manifest
from mimo.store.memory_store import MemoryStore
from mimo.tensor import RawTensor

ONE, TWO, THREE = (EmbeddingKey(digit * 64) for digit in "123")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def put(store: MemoryStore, key: EmbeddingKey, num_bytes: int = 16) -> None:
    tensor = RawTensor("uint8", (num_bytes,), bytes(num_bytes))
    manifest = Manifest.describe(key, tensor, encoder_fingerprint="e0", encode_ms=1.0)
    await store.put(manifest, tensor)


async def test_an_entry_lives_from_its_last_use() -> None:
    clock = Clock()
    store = MemoryStore(ttl_s=10, clock=clock)
    await put(store, ONE)
    clock.now = 9
    assert (await store.find(ONE)).status is LookupStatus.HIT
    clock.now = 18
    assert (await store.get(ONE)).status is LookupStatus.HIT
    clock.now = 28
    assert (await store.find(ONE)).status is LookupStatus.MISS


async def test_the_least_recently_used_entry_makes_room() -> None:
    store = MemoryStore(max_bytes=40)
    await put(store, ONE)
    await put(store, TWO)
    await store.find(ONE)
    await put(store, THREE)
    statuses = [(await store.find(key)).status.value for key in (ONE, TWO, THREE)]
    assert statuses == ["hit", "miss", "hit"]


async def test_a_plan_that_is_read_is_in_use() -> None:
    store = MemoryStore(max_bytes=40)
    await store.put_alias("plan", bytes(16))
    await put(store, ONE)
    assert await store.get_alias("plan") is not None
    await put(store, TWO)
    assert await store.get_alias("plan") is not None
    assert (await store.find(ONE)).status is LookupStatus.MISS


async def test_an_entry_larger_than_the_store_is_not_taken() -> None:
    store = MemoryStore(max_bytes=40)
    await put(store, ONE, 41)
    assert (await store.find(ONE)).status is LookupStatus.MISS


async def test_a_lease_that_is_not_renewed_ends() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    assert await store.acquire_lease(ONE, "a", 10)
    clock.now = 9
    assert await store.renew_lease(ONE, "a", 10)
    clock.now = 18
    assert not await store.acquire_lease(ONE, "b", 10)
    clock.now = 19
    assert await store.acquire_lease(ONE, "b", 10)
    assert not await store.renew_lease(ONE, "a", 10)
