"""What an embedding store promises. It is a cache: every failure looks like an absent entry."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from mimo.store.keys import EmbeddingKey
from mimo.store.manifest import Manifest
from mimo.tensor import RawTensor


class Outcome(StrEnum):
    """How an embedding was obtained. Shown in responses, spans and metrics."""

    HIT = "hit"  # it was in the store
    MISS = "miss"  # it was encoded for this call
    JOINED = "joined"  # another call was already encoding it
    REPAIRED = "repaired"  # its entry was missing or wrong after all and was encoded again
    BYPASS = "bypass"  # the caller asked not to use the cache


class LookupStatus(StrEnum):
    HIT = "hit"
    MISS = "miss"
    TORN = "torn"  # a manifest whose chunks are gone
    CORRUPT = "corrupt"  # bytes that do not match their checksums
    TIMEOUT = "timeout"  # the store is slow, down or not asked


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer of a lookup. ``manifest`` is set for a HIT, ``tensor`` for a HIT of ``get``."""

    status: LookupStatus
    manifest: Manifest | None = None
    tensor: RawTensor | None = None


# Waits until a lease of the watched key may be free, or for so many seconds.
Wait = Callable[[float], Awaitable[None]]


class EmbeddingStore(Protocol):
    """Entries, plans and leases under content addresses. No method raises when the store fails.

    An entry that turns out torn or corrupt is removed, provided it is still the one that was read.
    A store counts the lookups of ``find`` and ``get`` itself.
    """

    async def find(self, key: EmbeddingKey) -> Lookup:
        """The manifest of a complete entry, whose life is extended."""

    async def peek(self, key: EmbeddingKey) -> Manifest | None:
        """The manifest, unless it is damaged; chunks are not checked and nothing is extended."""

    async def get(self, key: EmbeddingKey) -> Lookup:
        """The whole entry, every byte checked; its life is extended."""

    async def put(
        self, manifest: Manifest, tensor: RawTensor, *, replace: bool = False
    ) -> Manifest | None:
        """Write an entry and return the manifest that now stands: another writer's if it was first.

        ``replace`` makes this one stand whatever was there. None means the store did not take it.
        """

    async def get_alias(self, alias: str) -> bytes | None:
        """The plan stored under an alias; a damaged one counts as absent."""

    async def put_alias(self, alias: str, value: bytes) -> None:
        """Remember a plan."""

    async def acquire_lease(self, key: EmbeddingKey, holder: str, ttl_s: float) -> bool:
        """Whether ``holder`` may encode now. A store that cannot answer does not forbid it."""

    async def renew_lease(self, key: EmbeddingKey, holder: str, ttl_s: float) -> bool:
        """False when the lease is lost for certain."""

    async def release_lease(self, key: EmbeddingKey, holder: str) -> None:
        """Give the lease back if ``holder`` still has it, and wake those who watch."""

    def watch(self, key: EmbeddingKey) -> AbstractAsyncContextManager[Wait]:
        """Listen for releases. Those after entering are never missed; spurious wake-ups happen."""

    async def aclose(self) -> None:
        """Close connections. The store is not used afterwards."""
