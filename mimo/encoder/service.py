"""From a key and an upload to an embedding in the store, at most once at a time.

Join a call of this process that wants the same key; else look it up; else wait for the lease or
for the entry of whoever holds it; else batch, encode, store. The upload is not read before it is
needed, so a caller is answered early when there is nothing to encode. A store that is down makes
every call an encode and every answer inline, and fails none.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from mimo.batching import Batch, Batcher, Load, Slot
from mimo.encoder.flight import Flight, SingleFlight, receive
from mimo.encoder.request import Encoded, Encoder, EncodeRequest, PlanT
from mimo.errors import DeadlineExceeded, EmbeddingMismatch, Overloaded
from mimo.metrics import Metrics
from mimo.store import EmbeddingStore, LookupStatus, Manifest, Outcome
from mimo.store.lease import LeaseTimes, turn
from mimo.tensor import Assembler, Chunk, RawTensor, num_bytes

_DAMAGED = (LookupStatus.TORN, LookupStatus.CORRUPT)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Product:
    """What a flight brings home. ``stored`` is what the store holds, ``fresh`` what was encoded."""

    outcome: Outcome
    stored: Manifest | None
    fresh: tuple[Manifest, RawTensor] | None = None
    encode_ms: float = 0.0


class EncodeService(Generic[PlanT]):
    """The encoder behind a servicer.

    Costs are in the component's unit of work. ``work_per_second`` is the rate measured at start.
    ``upload_stall_s`` is how long an upload may pause. ``min_ms_per_mib``: embeddings that are
    cheaper to encode than to move are answered inline and never stored. ``on_failure`` is called in
    the event loop when the encoder raised a ``fatal`` error; nothing is encoded from then on.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        encoder: Encoder[PlanT],
        metrics: Metrics,
        *,
        encoder_fingerprint: str,
        max_batch_cost: float,
        max_queued_cost: float,
        max_batch_items: int = 64,
        max_wait_s: float = 0.0,
        max_payload_bytes: int = 1 << 31,
        upload_stall_s: float = 10.0,
        work_per_second: float | None = None,
        min_ms_per_mib: float = 2.0,
        lease_times: LeaseTimes | None = None,
        fatal: tuple[type[Exception], ...] = (),
        on_failure: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._encoder_fingerprint = encoder_fingerprint
        self._max_payload_bytes = max_payload_bytes
        self._min_ms_per_mib = min_ms_per_mib
        self._upload_stall_s = upload_stall_s
        self._lease_times = lease_times
        self._clock = clock
        self._flights: SingleFlight[_Product] = SingleFlight(upload_stall_s)
        self._batcher: Batcher[tuple[PlanT, RawTensor], RawTensor] = Batcher(
            encoder.encode,
            max_cost=max_batch_cost,
            max_items=max_batch_items,
            max_queued_cost=max_queued_cost,
            max_wait_s=max_wait_s,
            work_per_second=work_per_second,
            on_batch=self._record_batch,
            fatal=fatal,
            on_failure=on_failure,
            clock=clock,
            thread_name=f"{metrics.component}-device",
        )

    @property
    def load(self) -> Load:
        return self._batcher.load

    async def encode(self, request: EncodeRequest[PlanT], chunks: AsyncIterator[Chunk]) -> Encoded:
        """Make the embedding of ``request.key`` exist. ``chunks`` may be left unread.

        Raises EmbeddingMismatch for a key of another encoder, InvalidRequest for a bad upload,
        Overloaded, DeadlineExceeded, Unavailable while closing, and what the encoder raises.
        """
        try:
            encoded = await self._encode(request, chunks)
        except BaseException as error:
            self._count(request, _failure(error))
            raise
        self._count(request, _SUCCESS[encoded.outcome])
        return encoded

    async def compute(
        self,
        plan: PlanT,
        cost: float,
        payload: tuple[str, tuple[int, ...]],
        chunks: AsyncIterator[Chunk],
        deadline: float = math.inf,
    ) -> RawTensor:
        """The encoder's answer to one payload, without key or store.

        ``payload`` is its dtype and shape; ``chunks`` are read once there is room in the queue.
        Raises as ``encode`` does.
        """
        with self._admit(cost, deadline, payload) as slot:
            assembler = Assembler(*payload, max_bytes=self._max_payload_bytes)
            received = await receive(assembler, chunks, self._upload_stall_s)
            done = await slot.run((plan, received))
        return done.value

    async def aclose(self) -> None:
        """Let the running batch end and refuse the rest. The store stays open."""
        await self._batcher.close()

    async def _encode(self, request: EncodeRequest[PlanT], chunks: AsyncIterator[Chunk]) -> Encoded:
        if request.encoder_fingerprint != self._encoder_fingerprint:
            raise EmbeddingMismatch(
                "the key belongs to another encoder",
                field="encoder_fingerprint",
                expected=self._encoder_fingerprint,
            )
        product, joined = await self._flights.fly(
            (request.key, request.bypass),
            lambda flight: self._produce(flight, request),
            partial(
                Assembler,
                request.payload_dtype,
                request.payload_shape,
                max_bytes=self._max_payload_bytes,
            ),
            chunks,
            request.deadline,
        )
        outcome, encode_ms = product.outcome, product.encode_ms
        if joined and outcome is not Outcome.HIT:
            outcome, encode_ms = Outcome.JOINED, 0.0
        if product.stored is not None and not request.inline:
            return Encoded(product.stored, outcome, encode_ms)
        if product.fresh is not None:
            manifest, tensor = product.fresh
            return Encoded(manifest, outcome, encode_ms, tensor)
        lookup = await self._store.get(request.key)
        if lookup.manifest is not None:
            return Encoded(lookup.manifest, outcome, encode_ms, lookup.tensor)
        # Found, and gone before it could be read: its upload is still unread.
        again = replace(request, bypass=True, attempt=request.attempt + 1)
        return await self._encode(again, chunks)

    async def _produce(self, flight: Flight, request: EncodeRequest[PlanT]) -> _Product:
        if request.bypass:
            self._metrics.inc("mimo_store_lookups_total", outcome="bypass")
            # A first attempt that bypasses is a wish; a later one follows a bad or lost entry.
            outcome = Outcome.REPAIRED if request.attempt else Outcome.BYPASS
            return await self._compute(flight, request, outcome)
        lookup = await self._store.find(request.key)
        if lookup.manifest is not None:
            return _Product(Outcome.HIT, lookup.manifest)
        async with turn(self._store, request.key, self._metrics, self._lease_times) as manifest:
            if manifest is not None:
                return _Product(Outcome.JOINED, manifest)
            outcome = Outcome.REPAIRED if lookup.status in _DAMAGED else Outcome.MISS
            return await self._compute(flight, request, outcome)

    async def _compute(
        self, flight: Flight, request: EncodeRequest[PlanT], outcome: Outcome
    ) -> _Product:
        header = request.payload_dtype, request.payload_shape
        with self._admit(request.cost, flight.deadline, header) as slot:
            flight.watch(slot)
            self._metrics.inc("mimo_encoder_admitted_work_total", request.cost)
            started = self._clock()
            payload = await flight.payload()
            self._observe_stage("fetch", self._clock() - started)
            done = await slot.run((request.plan, payload))
        self._metrics.inc("mimo_encoder_completed_work_total", request.cost)
        self._metrics.observe("mimo_encoder_queue_wait_seconds", done.queue_s)
        manifest = await asyncio.to_thread(  # checksums: milliseconds for those of a long video
            Manifest.describe,
            request.key,
            done.value,
            encoder_fingerprint=self._encoder_fingerprint,
            encode_ms=done.device_s * 1000,
        )
        stored = await self._keep(manifest, done.value, replace=request.bypass)
        return _Product(outcome, stored, (manifest, done.value), manifest.encode_ms)

    @contextmanager
    def _admit(
        self, cost: float, deadline: float, payload: tuple[str, tuple[int, ...]]
    ) -> Iterator[Slot[tuple[PlanT, RawTensor], RawTensor]]:
        """Room in the queue. The load is published on the way in and out, whatever happens."""
        try:
            with self._batcher.admit(cost, deadline, num_bytes(*payload)) as slot:
                self._publish_load()
                yield slot
        finally:
            self._publish_load()

    async def _keep(
        self, manifest: Manifest, tensor: RawTensor, *, replace: bool
    ) -> Manifest | None:
        """Store an embedding that is worth it. None: the answer must carry it."""
        if manifest.encode_ms < self._min_ms_per_mib * manifest.num_bytes / _MIB:
            return None
        started = self._clock()
        stored = await self._store.put(manifest, tensor, replace=replace)
        self._observe_stage("store_put", self._clock() - started)
        return stored

    def _count(self, request: EncodeRequest[PlanT], outcome: str) -> None:
        self._metrics.inc("mimo_encoder_items_total", kind=request.modality, outcome=outcome)

    def _observe_stage(self, stage: str, seconds: float) -> None:
        self._metrics.observe("mimo_encoder_encode_seconds", seconds, stage=stage)

    def _record_batch(self, batch: Batch) -> None:
        self._observe_stage("tower", batch.busy_s)
        self._metrics.inc("mimo_encoder_busy_seconds_total", batch.busy_s)
        self._metrics.observe("mimo_encoder_batch_work", batch.work)
        self._metrics.observe("mimo_encoder_batch_fill_ratio", batch.fill)
        self._publish_load()

    def _publish_load(self) -> None:
        load = self._batcher.load
        self._metrics.set("mimo_encoder_queued_work", load.queued_work)
        self._metrics.set("mimo_encoder_running_work", load.running_work)
        self._metrics.set("mimo_encoder_capacity_work_per_second", load.work_per_second or 0.0)
        self._metrics.set("mimo_replica_predicted_wait_seconds", load.predicted_wait_s)


_SUCCESS = {
    Outcome.HIT: "hit",
    Outcome.MISS: "encoded",
    Outcome.BYPASS: "encoded",
    Outcome.JOINED: "joined",
    Outcome.REPAIRED: "repaired",
}


def _failure(error: BaseException) -> str:
    match error:
        case Overloaded():
            return "rejected"
        case DeadlineExceeded():
            return "expired"
        case asyncio.CancelledError():
            return "cancelled"
    return "failed"
