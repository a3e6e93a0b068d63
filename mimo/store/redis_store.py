"""The embedding store on Redis or Valkey, standalone or Cluster, used as a cache and nothing more.

The server may evict anything at any time and may answer late or not at all. Each becomes an absent
entry here; nothing raises. ``mimo.store.layout`` says under which names things lie.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from mimo.errors import InvalidRequest
from mimo.metrics import Metrics
from mimo.store.base import Lookup, LookupStatus, Wait
from mimo.store.breaker import Breaker
from mimo.store.keys import EmbeddingKey
from mimo.store.layout import alias_name, channel, chunk_names, lease_name, manifest_name
from mimo.store.links import Links
from mimo.store.manifest import Damaged, Manifest, seal, unseal
from mimo.store.redis_client import connect
from mimo.store.resp import Refused, Reply, Resp, Word, accepted, accepted_all
from mimo.tensor import RawTensor, crc32c, new_buffer

logger = logging.getLogger(__name__)

# Deletes what the caller has seen, never what somebody else has put there since.
_DELETE_IF_EQUAL = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('del', KEYS[1])
if ARGV[2] then redis.call('publish', ARGV[2], '') end
return 1
"""
_EXTEND_IF_EQUAL = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('pexpire', KEYS[1], ARGV[2])
"""


@dataclass(frozen=True, slots=True)
class RedisLimits:
    """How long things live and how long we wait."""

    ttl_s: int = 3600
    timeout_s: float = 0.25
    timeout_s_per_byte: float = 0.001 / (100 * 1024)
    window_chunks: int = 16  # chunks on their way at a time, about 4 MiB
    max_operations: int = 16  # at a time, each with a connection of its own

    @property
    def chunk_ttl_s(self) -> int:
        """Chunks outlive their manifest, so that an idle entry ends as a miss and not as torn."""
        return self.ttl_s + 60


class _Unavailable(Exception):
    """The server failed, was late, or is not asked for now. Never leaves this module."""


class _Missing(Exception):
    """A chunk is gone. Never leaves this module."""


class RedisStore:
    """See :class:`mimo.store.base.EmbeddingStore`."""

    def __init__(
        self,
        client: "Redis | RedisCluster",
        metrics: Metrics,
        *,
        limits: RedisLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client: Any = client  # redis-py's annotations differ between its two clients
        self._metrics = metrics
        self._limits = limits or RedisLimits()
        self._clock = clock
        self._breaker = Breaker(clock)
        self._links = Links(client)
        self._operations = asyncio.Semaphore(self._limits.max_operations)

    @classmethod
    def from_url(
        cls, url: str, metrics: Metrics, *, limits: RedisLimits | None = None
    ) -> "RedisStore":
        """A store that connects on first use. Raises ConfigError for a URL it cannot read."""
        return cls(connect(url), metrics, limits=limits)

    async def find(self, key: EmbeddingKey) -> Lookup:
        lookup = await self._find(key)
        self._metrics.inc("mimo_store_lookups_total", outcome=lookup.status)
        return lookup

    async def peek(self, key: EmbeddingKey) -> Manifest | None:
        name = manifest_name(key)
        try:
            data = await self._ask("manifest", name, "GET", name)
            return Manifest.decode(key, data) if data else None
        except (_Unavailable, Damaged):
            return None

    async def get(self, key: EmbeddingKey) -> Lookup:
        lookup = await self._manifest(key)
        if lookup.manifest is not None:
            lookup = await self._read(lookup.manifest)
        self._metrics.inc("mimo_store_lookups_total", outcome=lookup.status)
        return lookup

    async def put(
        self, manifest: Manifest, tensor: RawTensor, *, replace: bool = False
    ) -> Manifest | None:
        try:
            standing = await self._write(manifest, tensor, replace=replace)
            if not isinstance(standing, bytes):
                return None  # evicted as soon as it was written
            return Manifest.decode(manifest.key, standing)
        except (_Unavailable, Damaged):
            return None

    async def get_alias(self, alias: str) -> bytes | None:
        name = alias_name(alias)
        try:
            data = await self._ask("manifest", name, "GETEX", name, "EX", self._limits.ttl_s)
            return _unseal_plan(alias, data) if data else None
        except (_Unavailable, Damaged):
            return None

    async def put_alias(self, alias: str, value: bytes) -> None:
        name, data = alias_name(alias), _seal_plan(alias, value)
        with suppress(_Unavailable):
            await self._ask("commit", name, "SET", name, data, "EX", self._limits.ttl_s)

    async def acquire_lease(self, key: EmbeddingKey, holder: str, ttl_s: float) -> bool:
        name, ttl_ms = lease_name(key), round(ttl_s * 1000)
        try:
            taken = await self._ask("lease", name, "SET", name, holder, "NX", "PX", ttl_ms)
        except _Unavailable:
            return True
        return taken is not None

    async def renew_lease(self, key: EmbeddingKey, holder: str, ttl_s: float) -> bool:
        ttl_ms = round(ttl_s * 1000)
        try:
            return bool(await self._run(_EXTEND_IF_EQUAL, lease_name(key), holder, ttl_ms))
        except _Unavailable:
            return True

    async def release_lease(self, key: EmbeddingKey, holder: str) -> None:
        with suppress(_Unavailable):
            await self._run(_DELETE_IF_EQUAL, lease_name(key), holder, channel(key))

    @asynccontextmanager
    async def watch(self, key: EmbeddingKey) -> AsyncIterator[Wait]:
        subscription = self._client.pubsub(ignore_subscribe_messages=True)

        async def subscribe() -> None:
            await self._client.initialize()  # a Cluster's subscription does not learn the slots
            await subscription.subscribe(channel(key))

        async def wait(timeout_s: float) -> None:
            try:
                await subscription.get_message(timeout=timeout_s)
            except (RedisError, RedisClusterException, OSError, RuntimeError):
                await asyncio.sleep(timeout_s)  # not subscribed: the caller's polling will do

        try:
            with suppress(_Unavailable):
                async with self._in_time("lease"):
                    await subscribe()
            yield wait
        finally:
            await subscription.aclose()

    async def aclose(self) -> None:
        await self._links.aclose()
        await self._client.aclose()

    async def _find(self, key: EmbeddingKey) -> Lookup:
        lookup = await self._manifest(key)
        if lookup.manifest is None:
            return lookup
        try:
            is_whole = await self._touch(lookup.manifest)
        except _Unavailable:
            return Lookup(LookupStatus.TIMEOUT)
        return lookup if is_whole else await self._reject(lookup.manifest, LookupStatus.TORN)

    async def _manifest(self, key: EmbeddingKey) -> Lookup:
        """A hit if there is a manifest that can be read, whatever became of the chunks."""
        name = manifest_name(key)
        try:
            data = await self._ask("manifest", name, "GET", name)
            if data is None:
                return Lookup(LookupStatus.MISS)
            return Lookup(LookupStatus.HIT, Manifest.decode(key, data))
        except _Unavailable:
            return Lookup(LookupStatus.TIMEOUT)
        except Damaged:
            return await self._remove(name, data, LookupStatus.CORRUPT)

    async def _touch(self, manifest: Manifest) -> bool:
        """Extend the life of an entry. Whether all of it is there."""
        name = manifest_name(manifest.key)
        async with self._link("manifest", name) as link:
            replies = [
                link.send("EXPIRE", chunk, self._limits.chunk_ttl_s)
                for chunk in chunk_names(manifest)
            ]
            replies.append(link.send("EXPIRE", name, self._limits.ttl_s))
            return all([accepted(await reply) for reply in replies])

    async def _read(self, manifest: Manifest) -> Lookup:
        """Fetch the chunks, each checked while the next ones are on their way."""
        try:
            data = await self._fetch(manifest)
        except _Unavailable:
            return Lookup(LookupStatus.TIMEOUT)
        except _Missing:
            return await self._reject(manifest, LookupStatus.TORN)
        except (Damaged, InvalidRequest):
            return await self._reject(manifest, LookupStatus.CORRUPT)
        self._metrics.inc("mimo_store_bytes_total", data.nbytes, op="get")
        return Lookup(LookupStatus.HIT, manifest, RawTensor(manifest.dtype, manifest.shape, data))

    async def _fetch(self, manifest: Manifest) -> memoryview:
        """The bytes of an entry, whose life is extended. Raises _Missing, Damaged, _Unavailable."""
        name, ttl_s = manifest_name(manifest.key), self._limits.chunk_ttl_s
        data = new_buffer(manifest.num_bytes)
        pieces = _pieces(manifest, data)
        expected: deque[tuple[int, memoryview, asyncio.Future[Reply]]] = deque()

        async def check_next() -> None:
            checksum, piece, reply = expected.popleft()
            value = accepted(await reply)
            if value is None:
                raise _Missing
            if value is not piece or crc32c(piece) != checksum:
                raise Damaged("a chunk is not what was written")

        async with self._link("chunks", name, data.nbytes) as link:
            for chunk, checksum, piece in zip(
                chunk_names(manifest), manifest.checksums, pieces, strict=True
            ):
                reply = link.send("GETEX", chunk, "EX", ttl_s, into=piece)
                expected.append((checksum, piece, reply))
                if len(expected) == self._limits.window_chunks:
                    await check_next()
            extended = link.send("EXPIRE", name, self._limits.ttl_s)
            while expected:
                await check_next()
            accepted(await extended)
        return data

    async def _write(self, manifest: Manifest, tensor: RawTensor, *, replace: bool) -> Reply:
        """Write the chunks, then make the entry visible, unless another writer was first.

        Returns what stands as manifest. The last chunks and the manifest are one transaction:
        an entry of up to that many takes one round trip, and still none is visible in part.
        """
        name, ttl_s = manifest_name(manifest.key), self._limits.chunk_ttl_s
        pieces = list(zip(chunk_names(manifest), _pieces(manifest, tensor.data), strict=True))
        num_first = max(0, len(pieces) - self._limits.window_chunks)
        async with self._link("chunks", name, tensor.num_bytes) as link:
            replies: list[asyncio.Future[Reply]] = []
            for chunk, piece in pieces[:num_first]:
                replies.append(link.send("SET", chunk, piece, "EX", ttl_s))
                await link.sent()
            for reply in replies:
                accepted(await reply)
            replies = [link.send("MULTI")]
            for chunk, piece in pieces[num_first:]:
                replies.append(link.send("SET", chunk, piece, "EX", ttl_s))
                await link.sent()
            commit = ("SET", name, manifest.encoded, "EX", self._limits.ttl_s)
            replies.append(link.send(*commit) if replace else link.send(*commit, "NX"))
            replies.append(link.send("GET", name))
            done = link.send("EXEC")
            for reply in replies:
                accepted(await reply)
            standing: Reply = accepted_all(await done)[-1]
        self._metrics.inc("mimo_store_bytes_total", tensor.num_bytes, op="put")
        return standing

    async def _reject(self, manifest: Manifest, status: LookupStatus) -> Lookup:
        """Remove a useless manifest, so that SET NX lets the next writer in."""
        return await self._remove(manifest_name(manifest.key), manifest.encoded, status)

    async def _remove(self, name: str, seen: bytes, status: LookupStatus) -> Lookup:
        with suppress(_Unavailable):
            await self._run(_DELETE_IF_EQUAL, name, seen)
        return Lookup(status)

    async def _run(self, script: str, name: str, *arguments: Word) -> Any:
        return await self._ask("lease", name, "EVAL", script, 1, name, *arguments)

    async def _ask(self, op: str, name: str, *words: Word) -> Any:
        """One command about ``name``. Raises _Unavailable."""
        async with self._link(op, name) as link:
            return accepted(await link.send(*words))

    @asynccontextmanager
    async def _link(self, op: str, name: str, num_bytes: int = 0) -> AsyncIterator[Resp]:
        """A connection for one operation on ``name``. The block is left with _Unavailable when the
        server fails or the time is up."""
        async with self._in_time(op, num_bytes), self._links.to(name) as link:
            yield link

    @asynccontextmanager
    async def _in_time(self, op: str, num_bytes: int = 0) -> AsyncIterator[None]:
        """Room and time for one operation of a server that is worth asking. Raises _Unavailable."""
        budget_s = self._limits.timeout_s + num_bytes * self._limits.timeout_s_per_byte
        # Waiting for our own other operations must not count as the server's delay.
        async with self._operations:
            if not self._breaker.admit():
                raise _Unavailable
            started = self._clock()
            try:
                async with asyncio.timeout(budget_s):
                    yield
            except (Refused, RedisError, RedisClusterException, OSError, TimeoutError) as error:
                self._failed(error)
                raise _Unavailable from error
        self._metrics.observe("mimo_store_op_seconds", self._clock() - started, op=op)
        if self._breaker.is_open:
            logger.info("the embedding store answers again")
            self._breaker.succeeded()
            self._metrics.set("mimo_store_breaker_open", 0)

    def _failed(self, error: Exception) -> None:
        self._links.relearn()
        was_open = self._breaker.is_open
        self._breaker.failed()
        if self._breaker.is_open and not was_open:
            logger.warning("the embedding store fails; going on without it: %r", error)
            self._metrics.set("mimo_store_breaker_open", 1)


def _pieces(manifest: Manifest, data: memoryview) -> list[memoryview]:
    """The places of an entry's chunks in its bytes. Raises Damaged when they do not fill them."""
    size = max(manifest.chunk_bytes, 1)
    starts = range(0, max(data.nbytes, 1), size)
    if len(starts) != manifest.num_chunks:
        raise Damaged(f"{manifest.num_chunks} chunks for {data.nbytes} bytes")
    return [data[start : start + size] for start in starts]


def _seal_plan(alias: str, plan: bytes) -> bytes:
    """A plan names its alias, as a manifest names its key: elsewhere it is another file's."""
    return seal(alias.encode() + plan)


def _unseal_plan(alias: str, data: bytes) -> bytes:
    """Raises Damaged, also for the plan of another alias."""
    body = unseal(data)
    if not body.startswith(alias.encode()):
        raise Damaged("the plan belongs to another alias")
    return body[len(alias) :]
