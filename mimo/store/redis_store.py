"""The embedding store on Redis or Valkey, standalone or Cluster, used as a cache and nothing more.

The server may evict anything at any time and may answer late or not at all. Each becomes an absent
entry here; nothing raises. ``mimo.store.layout`` says under which names things lie.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from mimo.errors import InvalidRequest
from mimo.metrics import Metrics
from mimo.store.base import Lookup, LookupStatus, Wait
from mimo.store.breaker import Breaker
from mimo.store.keys import EmbeddingKey
from mimo.store.layout import alias_name, channel, chunk_names, lease_name, manifest_name
from mimo.store.manifest import Damaged, Manifest, seal, unseal
from mimo.store.redis_client import connect
from mimo.tensor import Assembler, Chunk, RawTensor, split

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

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
    window_chunks: int = 16  # chunks in one round trip, about 4 MiB
    max_connections: int = 16

    @property
    def chunk_ttl_s(self) -> int:
        """Chunks outlive their manifest, so that an idle entry ends as a miss and not as torn."""
        return self.ttl_s + 60


class _Unavailable(Exception):
    """The server failed, was late, or is not asked for now. Never leaves this module."""


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
        # Waiting for one of our own connections must not count as the server's delay.
        self._connections = asyncio.Semaphore(self._limits.max_connections)

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
        try:
            data = await self._ask("manifest", lambda: self._client.get(manifest_name(key)))
            return Manifest.decode(key, data) if data else None
        except (_Unavailable, Damaged):
            return None

    async def get(self, key: EmbeddingKey) -> Lookup:
        lookup = await self._find(key)
        if lookup.manifest is not None:
            lookup = await self._read(lookup.manifest)
        self._metrics.inc("mimo_store_lookups_total", outcome=lookup.status)
        return lookup

    async def put(
        self, manifest: Manifest, tensor: RawTensor, *, replace: bool = False
    ) -> Manifest | None:
        try:
            await self._write_chunks(manifest, tensor)
            return await self._commit(manifest, replace=replace)
        except (_Unavailable, Damaged):
            return None

    async def get_alias(self, alias: str) -> bytes | None:
        name = alias_name(alias)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.get(name).expire(name, self._limits.ttl_s)
        try:
            data, _ = await self._ask("manifest", pipeline.execute)
            return _unseal_plan(alias, data) if data else None
        except (_Unavailable, Damaged):
            return None

    async def put_alias(self, alias: str, value: bytes) -> None:
        name, data, ttl_s = alias_name(alias), _seal_plan(alias, value), self._limits.ttl_s
        with suppress(_Unavailable):
            await self._ask("commit", lambda: self._client.set(name, data, ex=ttl_s), len(data))

    async def acquire_lease(self, key: EmbeddingKey, holder: str, ttl_s: float) -> bool:
        name, ttl_ms = lease_name(key), round(ttl_s * 1000)
        try:
            taken = await self._ask(
                "lease", lambda: self._client.set(name, holder, nx=True, px=ttl_ms)
            )
        except _Unavailable:
            return True
        return bool(taken)

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
                await self._ask("lease", subscribe)
            yield wait
        finally:
            await subscription.aclose()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _find(self, key: EmbeddingKey) -> Lookup:
        try:
            data = await self._ask("manifest", lambda: self._client.get(manifest_name(key)))
            if data is None:
                return Lookup(LookupStatus.MISS)
            try:
                manifest = Manifest.decode(key, data)
            except Damaged:
                return await self._reject(key, data, LookupStatus.CORRUPT)
            if not await self._touch(manifest):
                return await self._reject(key, data, LookupStatus.TORN)
        except _Unavailable:
            return Lookup(LookupStatus.TIMEOUT)
        return Lookup(LookupStatus.HIT, manifest)

    async def _touch(self, manifest: Manifest) -> bool:
        """Extend the life of an entry. Whether all of it is there."""
        pipeline = self._client.pipeline(transaction=False)
        for name in chunk_names(manifest):
            pipeline.expire(name, self._limits.chunk_ttl_s)
        pipeline.expire(manifest_name(manifest.key), self._limits.ttl_s)
        return all(await self._ask("manifest", pipeline.execute))

    async def _read(self, manifest: Manifest) -> Lookup:
        """Fetch the chunks, a window of them at a time, checking each."""
        names, size = chunk_names(manifest), self._limits.window_chunks
        assembler = Assembler(manifest.dtype, manifest.shape)
        try:
            for first in range(0, len(names), size):
                window = names[first : first + size]
                values = await self._ask(
                    "chunks",
                    lambda window=window: self._client.mget(window),  # type: ignore[misc]
                    len(window) * manifest.chunk_bytes,
                )
                for index, value in enumerate(values, first):
                    if value is None:
                        return await self._reject(manifest.key, manifest.encoded, LookupStatus.TORN)
                    assembler.add(_chunk(manifest, index, value))
            tensor = assembler.finish()
        except _Unavailable:
            return Lookup(LookupStatus.TIMEOUT)
        except InvalidRequest:
            return await self._reject(manifest.key, manifest.encoded, LookupStatus.CORRUPT)
        self._metrics.inc("mimo_store_bytes_total", tensor.num_bytes, op="get")
        return Lookup(LookupStatus.HIT, manifest, tensor)

    async def _reject(self, key: EmbeddingKey, seen: bytes, status: LookupStatus) -> Lookup:
        """Remove a useless manifest, so that SET NX lets the next writer in."""
        with suppress(_Unavailable):
            await self._run(_DELETE_IF_EQUAL, manifest_name(key), seen)
        return Lookup(status)

    async def _write_chunks(self, manifest: Manifest, tensor: RawTensor) -> None:
        names, size = chunk_names(manifest), self._limits.window_chunks
        chunks = list(split(tensor, manifest.chunk_bytes))
        for first in range(0, len(chunks), size):
            pipeline = self._client.pipeline(transaction=False)
            for chunk in chunks[first : first + size]:
                pipeline.set(names[chunk.index], chunk.data, ex=self._limits.chunk_ttl_s)
            await self._ask("chunks", pipeline.execute, size * manifest.chunk_bytes)
        self._metrics.inc("mimo_store_bytes_total", tensor.num_bytes, op="put")

    async def _commit(self, manifest: Manifest, *, replace: bool) -> Manifest:
        """Make the entry visible, unless another writer was first; its chunks stand then."""
        name = manifest_name(manifest.key)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(name, manifest.encoded, ex=self._limits.ttl_s, nx=not replace).get(name)
        _, standing = await self._ask("commit", pipeline.execute)
        if standing is None:
            raise Damaged("evicted as soon as it was written")
        return Manifest.decode(manifest.key, standing)

    async def _run(self, script: str, name: str, *arguments: object) -> Any:
        return await self._ask("lease", lambda: self._client.eval(script, 1, name, *arguments))

    async def _ask(
        self, op: str, call: Callable[[], Awaitable[ResultT]], num_bytes: int = 0
    ) -> ResultT:
        """Make one round trip within its time. Raises _Unavailable."""
        budget_s = self._limits.timeout_s + num_bytes * self._limits.timeout_s_per_byte
        async with self._connections:
            if not self._breaker.admit():
                raise _Unavailable
            started = self._clock()
            try:
                async with asyncio.timeout(budget_s):
                    result = await call()
            except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
                self._failed(error)
                raise _Unavailable from error
        self._metrics.observe("mimo_store_op_seconds", self._clock() - started, op=op)
        if self._breaker.is_open:
            logger.info("the embedding store answers again")
            self._breaker.succeeded()
            self._metrics.set("mimo_store_breaker_open", 0)
        return result

    def _failed(self, error: Exception) -> None:
        was_open = self._breaker.is_open
        self._breaker.failed()
        if self._breaker.is_open and not was_open:
            logger.warning("the embedding store fails; going on without it: %r", error)
            self._metrics.set("mimo_store_breaker_open", 1)


def _seal_plan(alias: str, plan: bytes) -> bytes:
    """A plan names its alias, as a manifest names its key: elsewhere it is another file's."""
    return seal(alias.encode() + plan)


def _unseal_plan(alias: str, data: bytes) -> bytes:
    """Raises Damaged, also for the plan of another alias."""
    body = unseal(data)
    if not body.startswith(alias.encode()):
        raise Damaged("the plan belongs to another alias")
    return body[len(alias) :]


def _chunk(manifest: Manifest, index: int, value: bytes) -> Chunk:
    return Chunk(
        index=index,
        offset=index * manifest.chunk_bytes,
        data=value,
        crc32c=manifest.checksums[index],
        last=index == manifest.num_chunks - 1,
    )
