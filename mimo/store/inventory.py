"""What lies in a store: counted, checked, removed. For operators; no request waits for it."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis.exceptions import RedisClusterException, RedisError

from mimo.errors import ConfigError, Unavailable
from mimo.store.layout import (
    ALL_OF_ENTRIES,
    CHUNKS,
    LEASES,
    MANIFESTS,
    PLANS,
    chunk_names,
    key_of_manifest,
)
from mimo.store.manifest import Damaged, Manifest
from mimo.store.redis_client import connect
from mimo.tensor import crc32c

SCAN_COUNT = 1000
BATCH = 200

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Stats:
    """``by_encoder``: entries of each encoder fingerprint. Bytes are those of embeddings."""

    entries: int
    chunks: int
    orphaned_chunks: int  # of late writers, or of an entry being written now; they expire
    leases: int
    plans: int
    embedding_bytes: int
    by_encoder: Mapping[str, int]
    server: Mapping[str, object]


@dataclass(slots=True)
class Verdict:
    """Entries by what was found out about them; the damaged ones were removed."""

    whole: int = 0
    torn: int = 0  # a chunk is missing
    corrupt: int = 0  # bytes differ from their checksum, or a manifest that cannot be read
    damaged_keys: list[str] = field(default_factory=list)


class Inventory:
    """All entries of a server. Every method raises Unavailable when it fails."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator["Inventory"]:
        """Raises ConfigError for a URL that names no server."""
        if url.startswith("memory://"):
            raise ConfigError("memory:// lives inside one process; nobody else can look into it")
        client = connect(url)
        try:
            yield cls(client)
        finally:
            await client.aclose()

    async def stats(self) -> Stats:
        by_encoder: Counter[str] = Counter()
        entries = num_bytes = referenced = 0
        async for _, manifest in self._manifests():
            entries += 1
            if manifest is not None:
                by_encoder[manifest.encoder_fingerprint] += 1
                num_bytes += manifest.num_bytes
                referenced += manifest.num_chunks
        chunks = await self._count(CHUNKS)
        return Stats(
            entries=entries,
            chunks=chunks,
            orphaned_chunks=max(0, chunks - referenced),
            leases=await self._count(LEASES),
            plans=await self._count(PLANS),
            embedding_bytes=num_bytes,
            by_encoder=dict(by_encoder),
            server=await self._server(),
        )

    async def purge(self, encoder_fingerprint: str = "") -> int:
        """Remove everything of ours, or the entries of one encoder. Returns how many names went.

        What others keep on the server stays.
        """
        removed = 0
        if not encoder_fingerprint:
            for pattern in (ALL_OF_ENTRIES, PLANS):
                async for names in self._batches(pattern):
                    removed += await self._remove(names)
            return removed
        async for name, manifest in self._manifests():
            if manifest is not None and manifest.encoder_fingerprint == encoder_fingerprint:
                removed += await self._remove([name, *chunk_names(manifest)])
        return removed

    async def verify(self, report: Callable[[Verdict], None] = lambda _: None) -> Verdict:
        """Read every byte of every entry, without keeping any of them alive by that.

        ``report`` is called with the verdict so far, now and then.
        """
        verdict = Verdict()
        async for name, manifest in self._manifests():
            is_torn = False
            is_corrupt = manifest is None
            if manifest is not None:
                is_torn, is_corrupt = await self._examine(manifest)
            if is_torn or is_corrupt:
                verdict.torn += is_torn
                verdict.corrupt += not is_torn
                verdict.damaged_keys.append(key_of_manifest(name))
                await self._remove([name])
            else:
                verdict.whole += 1
            report(verdict)
        return verdict

    async def _examine(self, manifest: Manifest) -> tuple[bool, bool]:
        """Whether an entry is torn, and whether it is corrupt."""
        names = chunk_names(manifest)
        for first in range(0, len(names), 16):
            window = names[first : first + 16]
            values = await self._ask(lambda window=window: self._client.mget(window))  # type: ignore
            for index, value in enumerate(values, first):
                if value is None:
                    return True, False
                if crc32c(value) != manifest.checksums[index]:
                    return False, True
        return False, False

    async def _manifests(self) -> AsyncIterator[tuple[str, Manifest | None]]:
        """Every manifest with its name; None for one that cannot be read."""
        async for names in self._batches(MANIFESTS):
            for name in names:
                data = await self._ask(lambda name=name: self._client.get(name))  # type: ignore
                if data is None:
                    continue  # gone since it was listed
                try:
                    yield name, Manifest.decode(key_of_manifest(name), data)
                except Damaged:
                    yield name, None

    async def _batches(self, pattern: str) -> AsyncIterator[list[str]]:
        batch: list[str] = []
        try:
            async for name in self._client.scan_iter(match=pattern, count=SCAN_COUNT):
                batch.append(name.decode())
                if len(batch) == BATCH:
                    yield batch
                    batch = []
        except (RedisError, RedisClusterException, OSError) as error:
            raise _unavailable(error) from error
        if batch:
            yield batch

    async def _count(self, pattern: str) -> int:
        count = 0
        async for names in self._batches(pattern):
            count += len(names)
        return count

    async def _remove(self, names: list[str]) -> int:
        """One by one for a Cluster's sake, in one round trip."""
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.unlink(name)
        return sum(await self._ask(pipeline.execute))

    async def _server(self) -> dict[str, object]:
        """What the server says of its memory; summed over the nodes of a Cluster."""
        info = await self._ask(self._client.info)
        nodes = list(info.values()) if all(isinstance(v, dict) for v in info.values()) else [info]
        sums = ("used_memory", "maxmemory", "evicted_keys", "expired_keys")
        return {
            "nodes": len(nodes),
            "version": nodes[0].get("valkey_version") or nodes[0].get("redis_version"),
            "maxmemory_policy": nodes[0].get("maxmemory_policy"),
            **{name: sum(int(node.get(name, 0)) for node in nodes) for name in sums},
        }

    async def _ask(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        try:
            return await call()
        except (RedisError, RedisClusterException, OSError) as error:
            raise _unavailable(error) from error


def _unavailable(error: Exception) -> Unavailable:
    return Unavailable(f"the store does not answer: {error}")
