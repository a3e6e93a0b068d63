"""The store's contract in a dictionary: for one process, and to say plainly what Redis must do."""

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mimo.metrics import Metrics
from mimo.store.base import Lookup, LookupStatus, Wait
from mimo.store.keys import EmbeddingKey
from mimo.store.manifest import Manifest
from mimo.tensor import RawTensor


@dataclass(slots=True)
class _Entry:
    value: tuple[Manifest, RawTensor] | bytes
    expires: float

    @property
    def num_bytes(self) -> int:
        return len(self.value) if isinstance(self.value, bytes) else self.value[1].num_bytes


class MemoryStore:
    """Entries live ``ttl_s`` after their last use; ``max_bytes`` drops the least recently used."""

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        max_bytes: int = 1 << 29,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # embeddings by key, plans by alias
        self._leases: dict[EmbeddingKey, tuple[str, float]] = {}  # holder, expiry
        self._watchers: dict[EmbeddingKey, set[asyncio.Event]] = {}

    async def find(self, key: EmbeddingKey) -> Lookup:
        return dataclasses.replace(await self.get(key), tensor=None)

    async def peek(self, key: EmbeddingKey) -> Manifest | None:
        entry = self._live(key)
        return entry.value[0] if entry and isinstance(entry.value, tuple) else None

    async def get(self, key: EmbeddingKey) -> Lookup:
        found = self._touch(key)
        lookup = Lookup(LookupStatus.MISS)
        if isinstance(found, tuple):
            lookup = Lookup(LookupStatus.HIT, *found)
        if self._metrics is not None:
            self._metrics.inc("mimo_store_lookups_total", outcome=lookup.status)
        return lookup

    async def put(
        self, manifest: Manifest, tensor: RawTensor, *, replace: bool = False
    ) -> Manifest | None:
        standing = await self.peek(manifest.key)
        if standing is not None and not replace:
            return standing
        return manifest if self._remember(manifest.key, (manifest, tensor)) else None

    async def get_alias(self, alias: str) -> bytes | None:
        value = self._touch(_alias_name(alias))
        return value if isinstance(value, bytes) else None

    async def put_alias(self, alias: str, value: bytes) -> None:
        self._remember(_alias_name(alias), value)

    async def acquire_lease(self, key: EmbeddingKey, holder: str, ttl_s: float) -> bool:
        if self._holder(key) is not None:
            return False
        self._leases[key] = (holder, self._clock() + ttl_s)
        return True

    async def renew_lease(self, key: EmbeddingKey, holder: str, ttl_s: float) -> bool:
        if self._holder(key) != holder:
            return False
        self._leases[key] = (holder, self._clock() + ttl_s)
        return True

    async def release_lease(self, key: EmbeddingKey, holder: str) -> None:
        if self._holder(key) == holder:
            del self._leases[key]
            for event in self._watchers.get(key, ()):
                event.set()

    @asynccontextmanager
    async def watch(self, key: EmbeddingKey) -> AsyncIterator[Wait]:
        released = asyncio.Event()
        self._watchers.setdefault(key, set()).add(released)

        async def wait(timeout_s: float) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await released.wait()
            except TimeoutError:
                return
            released.clear()

        try:
            yield wait
        finally:
            self._watchers[key].discard(released)
            if not self._watchers[key]:
                del self._watchers[key]

    async def aclose(self) -> None:
        self._entries.clear()

    def _touch(self, name: str) -> tuple[Manifest, RawTensor] | bytes | None:
        entry = self._live(name)
        if entry is None:
            return None
        entry.expires = self._clock() + self._ttl_s
        self._entries.move_to_end(name)
        return entry.value

    def _live(self, name: str) -> _Entry | None:
        entry = self._entries.get(name)
        if entry is not None and entry.expires <= self._clock():
            del self._entries[name]
            return None
        return entry

    def _remember(self, name: str, value: tuple[Manifest, RawTensor] | bytes) -> bool:
        entry = _Entry(value, self._clock() + self._ttl_s)
        if entry.num_bytes > self._max_bytes:
            return False
        self._entries[name] = entry
        self._entries.move_to_end(name)
        excess = sum(other.num_bytes for other in self._entries.values()) - self._max_bytes
        while excess > 0:
            excess -= self._entries.popitem(last=False)[1].num_bytes
        return True

    def _holder(self, key: EmbeddingKey) -> str | None:
        holder, expires = self._leases.get(key, (None, 0.0))
        return holder if expires > self._clock() else None


def _alias_name(alias: str) -> str:
    return f"alias:{alias}"
