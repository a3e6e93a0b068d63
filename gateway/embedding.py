"""Make the embedding of an item exist: find it, join who makes it, or have it made.

A key is bound to one encoder fingerprint when the request is planned, so that during a roll-out of
encoders no request mixes two of them. No embedding passes through here unless the store is down.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from gateway import preprocessing
from gateway.attempts import Attempts, run_somewhere
from gateway.backends.encoders import (
    Encoded,
    EncodeTarget,
    MediaStream,
    encode_frames,
    encode_waveform,
)
from gateway.backends.faults import garbage
from gateway.backends.language_model import Embedding
from gateway.backends.replica import Replica, ReplicaFacts
from gateway.flights import Flights
from gateway.items import AudioPlan, DecodedImage, ImagePlan, Modality, VideoPlan
from gateway.media.decoder import MediaDecoder
from gateway.media.processor import ProcessorConfig
from gateway.planning import MediaPlanner, Medium, all_or_first_error, located
from gateway.prompt.placeholders import PromptItem
from gateway.routing import ReplicaPool
from gateway.stopwatch import Stage, Stopwatch
from mimo.errors import (
    DeadlineExceeded,
    EmbeddingMismatch,
    MimoError,
    Overloaded,
    Unavailable,
)
from mimo.metrics import AUDIO, VISION, Metrics
from mimo.store import keys
from mimo.store.base import EmbeddingStore, LookupStatus, Outcome
from mimo.store.keys import EmbeddingKey
from mimo.tensor import Buffer, RawTensor

MAX_PIXEL_BYTES = 512 << 20

_DAMAGED = (LookupStatus.TORN, LookupStatus.CORRUPT)


@dataclass(frozen=True, slots=True)
class NamedItem:
    """An item of a prompt with its name in the store and the encoder that the name belongs to."""

    item: PromptItem
    medium: Medium
    plan: ImagePlan | VideoPlan | AudioPlan
    content_digest: str
    key: EmbeddingKey
    facts: ReplicaFacts

    @property
    def component(self) -> str:
        """The encoder's."""
        return AUDIO if self.item.modality is Modality.AUDIO else VISION

    @property
    def shape(self) -> tuple[int, int]:
        """[num_rows, D]"""
        return self.item.num_rows, self.facts.hidden_size


class Embedder:
    """Names embeddings and makes them exist, through the pools of the two encoders."""

    def __init__(
        self,
        vision: ReplicaPool,
        audio: ReplicaPool,
        store: EmbeddingStore,
        decoder: MediaDecoder,
        planner: MediaPlanner,
        processor: ProcessorConfig,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vision, self._audio = vision, audio
        self._store = store
        self._decoder = decoder
        self._planner = planner
        self._processor = processor
        self._metrics = metrics
        self._clock = clock
        self._flights: Flights[Encoded] = Flights()
        self._pictures = DecodedImages(MAX_PIXEL_BYTES)

    async def check_live(self, modalities: set[Modality]) -> None:
        """Raises Unavailable naming the first modality that no encoder answers for."""
        for modality in Modality:
            if modality in modalities and not await self._pool(modality).is_live():
                raise _unavailable(modality)

    @property
    def pools(self) -> tuple[ReplicaPool, ReplicaPool]:
        return self._vision, self._audio

    async def name_all(
        self,
        items: Sequence[PromptItem],
        media: Sequence[Medium],
        tenant_salt: bytes,
        deadline: float,
        stopwatch: Stopwatch,
    ) -> list[NamedItem]:
        """Find out the key of every item. The first failure in their order is raised."""
        named = await asyncio.gather(
            *(
                self._name(item, media[item.media_index], tenant_salt, deadline, stopwatch)
                for item in items
            ),
            return_exceptions=True,
        )
        return all_or_first_error(named)

    async def _name(
        self,
        item: PromptItem,
        medium: Medium,
        tenant_salt: bytes,
        deadline: float,
        stopwatch: Stopwatch,
    ) -> NamedItem:
        """A picture is decoded to be named, unless that happened before."""
        planned = medium.planned
        plan, digest = planned.plan, planned.content_digest
        if item.is_sound_track:
            assert isinstance(planned.plan, VideoPlan) and planned.plan.sound is not None
            plan, digest = planned.plan.sound, planned.sound_digest
        if digest is None:
            self._check_room(item.modality, deadline)  # before anybody decodes
            image = await self._decode_image(medium, stopwatch)
            digest = image.content_digest
            self._pictures.keep(image)
            await self._planner.remember(medium, digest)
        facts = await self._bind(item.modality, digest)
        key = keys.embedding_key(
            keys.Modality(item.modality),
            digest,
            preprocessing.fingerprint(plan, self._processor),
            facts.fingerprint,
            tenant_salt,
        )
        return NamedItem(item, medium, plan, digest, key, facts)

    async def ensure(
        self,
        named: NamedItem,
        *,
        bypass: bool,
        repair: bool,
        deadline: float,
        stopwatch: Stopwatch,
    ) -> Embedding:
        """Make the embedding exist by ``deadline``. ``bypass`` does not look in the store.

        ``repair`` replaces an entry that the decoder could not use, and asks for the embedding
        itself in case the store is the reason.
        """
        flight = (named.key, bypass, repair)
        is_asked_for = bypass
        if bypass or repair:
            self._metrics.inc("mimo_store_lookups_total", outcome="bypass")
        elif flight not in self._flights:
            with stopwatch.stage(Stage.STORE):
                lookup = await self._store.find(named.key)
            if lookup.manifest is not None and lookup.manifest.shape == named.shape:
                self._pictures.take(named.content_digest)
                return Embedding(lookup.manifest.digest, None, Outcome.HIT, 0.0)
            # An entry of another shape under this key is as damaged as one with flipped bits.
            bypass = lookup.manifest is not None
            repair = bypass or lookup.status in _DAMAGED
        with stopwatch.stage(Stage.ENCODE):
            try:
                encoded, joined = await self._join(
                    flight,
                    lambda: self._encode(named, bypass, repair, deadline, stopwatch),
                )
            except MimoError as error:
                raise located(error, named.medium.field) from error.__cause__
        outcome, encode_ms = encoded.outcome, encoded.encode_ms
        if joined and outcome is not Outcome.HIT:
            outcome, encode_ms = Outcome.JOINED, 0.0
        elif outcome is not Outcome.JOINED and repair:
            outcome = Outcome.REPAIRED
        elif outcome is not Outcome.JOINED and is_asked_for:
            outcome = Outcome.BYPASS  # a second attempt of the same wish looks like a repair
        return Embedding(encoded.manifest_digest, encoded.tensor, outcome, encode_ms)

    async def _join(
        self, name: Hashable, work: Callable[[], Coroutine[Any, Any, Encoded]]
    ) -> tuple[Encoded, bool]:
        """Share the flight of that name. A flight has the deadline of whoever started it: those
        who may wait longer do not give up with it."""
        while True:
            is_ours = name not in self._flights
            try:
                return await self._flights.join(name, work)
            except (DeadlineExceeded, Overloaded):
                if is_ours:
                    raise

    async def _encode(
        self,
        named: NamedItem,
        bypass: bool,
        repair: bool,
        deadline: float,
        stopwatch: Stopwatch,
    ) -> Encoded:
        self._check_room(named.item.modality, deadline)
        pool = self._pool(named.item.modality)
        cost = preprocessing.work(named.plan)

        async def encode(replica: Replica, facts: ReplicaFacts, attempt: int) -> Encoded:
            target = EncodeTarget(
                key=named.key,
                encoder_fingerprint=named.facts.fingerprint,
                # An encoder tells a repair from a wish to bypass by the attempt.
                attempt=attempt + repair,
                bypass=bypass or repair,
                inline=repair,
            )
            stream = self._stream(named, stopwatch)
            timeout_s = max(0.0, deadline - self._clock())
            if isinstance(named.plan, AudioPlan):
                encoded = await encode_waveform(replica, target, named.plan, stream, timeout_s)
            else:
                encoded = await encode_frames(replica, target, named.plan, stream, timeout_s)
            if encoded.shape != named.shape:
                raise garbage(
                    f"the {pool.component} encoder",
                    f"{list(encoded.shape)} where {list(named.shape)} was planned",
                )
            return encoded

        self._metrics.inc("mimo_gateway_dispatched_work_total", cost, component=pool.component)
        self._metrics.add("mimo_gateway_held_work", cost, component=pool.component)
        try:
            attempts = Attempts(
                pool,
                bytes.fromhex(named.key),
                cost=cost,
                accepts=lambda facts: facts.fingerprint == named.facts.fingerprint,
            )
            return await run_somewhere(attempts, encode, cost)
        except (EmbeddingMismatch, Unavailable) as error:
            raise _unavailable(named.item.modality) from error
        finally:
            self._metrics.add("mimo_gateway_held_work", -cost, component=pool.component)

    def _stream(self, named: NamedItem, stopwatch: Stopwatch) -> MediaStream:
        """The medium as its encoder takes it, decoded while it is sent."""
        source, planned = named.medium.source, named.medium.planned
        match named.plan:
            case AudioPlan(num_samples=num_samples):
                return MediaStream(
                    "float32",
                    (num_samples,),
                    lambda: _buffers(self._decoder.decode_waveform(source, planned)),
                )
            case VideoPlan(frame_dtype=dtype, frames_shape=shape):
                return MediaStream(
                    dtype, shape, lambda: _buffers(self._decoder.decode_frames(source, planned))
                )
            case ImagePlan() as plan:
                shape = (1, plan.source_height, plan.source_width, 3)
                return MediaStream("uint8", shape, lambda: self._pixels(named, stopwatch))

    async def _pixels(self, named: NamedItem, stopwatch: Stopwatch) -> AsyncGenerator[Buffer, None]:
        image = self._pictures.take(named.content_digest)
        if image is None:
            image = await self._decode_image(named.medium, stopwatch)
        yield image.pixels.data

    async def _decode_image(self, medium: Medium, stopwatch: Stopwatch) -> DecodedImage:
        began = time.monotonic()
        try:
            with stopwatch.stage(Stage.DECODE_MEDIA):
                image = await self._decoder.decode_image(medium.source, medium.planned)
        except MimoError as error:
            raise located(error, medium.field) from error.__cause__
        seconds = time.monotonic() - began
        self._metrics.observe("mimo_gateway_media_decode_seconds", seconds, kind=Modality.IMAGE)
        return image

    async def _bind(self, modality: Modality, content_digest: str) -> ReplicaFacts:
        """What the encoder that this content belongs to says of itself."""
        try:
            _, facts = await Attempts(self._pool(modality), bytes.fromhex(content_digest)).next()
        except Unavailable as error:
            raise _unavailable(modality) from error
        return facts

    def _check_room(self, modality: Modality, deadline: float) -> None:
        """Raises Overloaded when no encoder could begin before ``deadline``."""
        self._pool(modality).check_room(deadline - self._clock())

    def _pool(self, modality: Modality) -> ReplicaPool:
        return self._audio if modality is Modality.AUDIO else self._vision


class DecodedImages:
    """Pictures that were decoded to be named and may be needed again to be encoded.

    Bounded in bytes: the oldest is dropped and decoded once more if it comes to that.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[str, DecodedImage] = OrderedDict()

    def keep(self, image: DecodedImage) -> None:
        self.take(image.content_digest)
        self._images[image.content_digest] = image
        self._num_bytes += image.pixels.num_bytes
        while self._num_bytes > self._max_bytes:
            self.take(next(iter(self._images)))

    def take(self, content_digest: str) -> DecodedImage | None:
        """The picture, which is not kept any longer."""
        image = self._images.pop(content_digest, None)
        if image is not None:
            self._num_bytes -= image.pixels.num_bytes
        return image


def _unavailable(modality: Modality) -> Unavailable:
    return Unavailable(
        f"{modality} input is unavailable: no encoder for it can be reached",
        retry_after_s=2.0,
        modality=modality,
    )


async def _buffers(tensors: AsyncGenerator[RawTensor, None]) -> AsyncGenerator[Buffer, None]:
    """The bytes of tensors as they come; closing this closes their source."""
    async with aclosing(tensors):
        async for tensor in tensors:
            yield tensor.data
