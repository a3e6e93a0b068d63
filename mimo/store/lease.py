"""One encode per key across replicas, safe when whoever encodes is cancelled or killed.

A lease is a short-lived store entry that names its holder and is renewed while work goes on. The
others watch for its release and poll as well; when it is gone they look again, and the first to
take it goes on. A lease saves work and never decides what is right: should two replicas encode
after all, the manifest that is committed first stands.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mimo.metrics import Metrics
from mimo.store.base import EmbeddingStore
from mimo.store.keys import EmbeddingKey
from mimo.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """A dead holder delays the others by at most ``ttl_s``; a lost wake-up by ``poll_s``."""

    ttl_s: float = 10.0
    renew_s: float = 3.0
    poll_s: float = 0.25


@asynccontextmanager
async def turn(
    store: EmbeddingStore, key: EmbeddingKey, metrics: Metrics, times: LeaseTimes | None = None
) -> AsyncIterator[Manifest | None]:
    """Wait for somebody's entry or for the right to encode. Yields the manifest, or None: encode.

    In the latter case the lease is held and renewed until the block ends, however it ends.
    """
    lease = _Lease(store, key, times or LeaseTimes())
    try:
        manifest, waited = await _wait(store, key, lease)
        outcome = "joined" if manifest else "stolen" if waited else "acquired"
        metrics.inc("mimo_lease_total", outcome=outcome)
        async with lease.renewed():
            yield manifest
    finally:
        await lease.release()


async def _wait(
    store: EmbeddingStore, key: EmbeddingKey, lease: "_Lease"
) -> tuple[Manifest | None, bool]:
    """The committed manifest, or None with the lease held; and whether another one held it."""
    if await lease.acquire():
        # The entry may have been committed, and its lease released, just before we took ours.
        return await store.peek(key), False
    async with store.watch(key) as wait:
        while True:
            manifest = await store.peek(key)
            if manifest is not None:
                return manifest, True
            if await lease.acquire():
                return await store.peek(key), True
            await wait(lease.times.poll_s)


class _Lease:
    def __init__(self, store: EmbeddingStore, key: EmbeddingKey, times: LeaseTimes) -> None:
        self.times = times
        self._store = store
        self._key = key
        self._holder = secrets.token_hex(8)
        self._may_hold = False

    async def acquire(self) -> bool:
        self._may_hold = True  # also if we are cancelled before the answer
        self._may_hold = await self._store.acquire_lease(self._key, self._holder, self.times.ttl_s)
        return self._may_hold

    async def release(self) -> None:
        """Give it back, even if the caller is being cancelled."""
        if self._may_hold:
            self._may_hold = False
            await asyncio.shield(self._store.release_lease(self._key, self._holder))

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        if not self._may_hold:
            yield
            return
        renewal = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            renewal.cancel()

    async def _renew(self) -> None:
        """Until the lease is lost. The work goes on then: at worst two replicas encode."""
        renewing = True
        while renewing:
            await asyncio.sleep(self.times.renew_s)
            renewing = await self._store.renew_lease(self._key, self._holder, self.times.ttl_s)
