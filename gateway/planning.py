"""From a media part to its plan: get the bytes, then plan them unless somebody did so before.

A plan is remembered under an alias of the file, the tenant and everything that planning depends on,
never under an embedding's key: the same file is planned once and stays planned when the encoders
change.
"""

import asyncio
import copy
import dataclasses
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.conversation import Conversation
from gateway.held import Hold
from gateway.items import MediaPart, MediaUrl, Modality, PlannedMedia
from gateway.media.decoder import PLANNER_VERSION, MediaDecoder
from gateway.media.fetch import Fetcher
from gateway.media.limits import Limits
from gateway.media.payload import decode_data_url, is_data_url
from gateway.media.processor import ProcessorConfig
from gateway.offload import FEW_BYTES, offload
from gateway.stopwatch import Stage, Stopwatch
from gateway.uploads import SCHEME as UPLOAD_SCHEME
from gateway.uploads import Uploads
from mimo.errors import InvalidRequest, MimoError, NotFound, Reason
from mimo.metrics import Metrics
from mimo.store.base import EmbeddingStore
from mimo.store.keys import alias_key

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Medium:
    """A planned medium with the file it came from. ``field`` is its path in the request."""

    field: str
    source: bytes
    planned: PlannedMedia
    alias: str


def all_or_first_error(outcomes: Sequence[ResultT | BaseException]) -> list[ResultT]:
    """What ``asyncio.gather`` collected; the first exception in order is raised instead."""
    results: list[ResultT] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def located(error: MimoError, field: str) -> MimoError:
    """The error with the path of the part it concerns, if it is the client's fault.

    A copy, because one failure may reach several requests with different paths.
    """
    if not isinstance(error, InvalidRequest | NotFound):
        return error
    error = copy.copy(error)
    error.field = error.field or field
    return error


class MediaPlanner:
    """Plans the media of a request. Errors carry the path of the part they come from."""

    def __init__(
        self,
        decoder: MediaDecoder,
        processor: ProcessorConfig,
        limits: Limits,
        fetcher: Fetcher,
        uploads: Uploads,
        store: EmbeddingStore,
        metrics: Metrics,
    ) -> None:
        self._decoder = decoder
        self._processor = dataclasses.asdict(processor)
        self._limits = limits
        self._fetcher = fetcher
        self._uploads = uploads
        self._store = store
        self._metrics = metrics

    @property
    def wait_s(self) -> float:
        """How long media that nobody has seen would take now to be planned and decoded."""
        return 2.0 * self._decoder.wait_s

    async def plan(
        self, conversation: Conversation, tenant_salt: bytes, stopwatch: Stopwatch, hold: Hold
    ) -> list[Medium]:
        """Plan every media part, in order. The first error in that order is raised. ``hold``
        counts what is fetched."""
        parts = list(conversation.media_parts())
        self._check_counts([part.modality for _, part in parts])
        planned = await asyncio.gather(
            *(self._plan(field, part, tenant_salt, stopwatch, hold) for field, part in parts),
            return_exceptions=True,
        )
        media = all_or_first_error(planned)
        self._check_counts([medium.planned.modality for medium in media])
        return media

    async def remember(self, medium: Medium, content_digest: str) -> None:
        """Complete the remembered plan of a picture with what only its pixels could tell."""
        planned = dataclasses.replace(medium.planned, content_digest=content_digest)
        await self._store.put_alias(medium.alias, planned.to_json().encode())

    async def _plan(
        self, field: str, part: MediaPart, tenant_salt: bytes, stopwatch: Stopwatch, hold: Hold
    ) -> Medium:
        try:
            with stopwatch.stage(Stage.FETCH):
                source = await self._read(part, tenant_salt, hold)
            alias = await self._alias(source, part, tenant_salt)
            with stopwatch.stage(Stage.STORE):
                planned = _remembered(await self._store.get_alias(alias))
            if planned is None:
                planned = await self._probe(source, part, stopwatch)
                if planned.content_digest is not None:
                    await self._store.put_alias(alias, planned.to_json().encode())
        except MimoError as error:
            raise located(error, field) from error.__cause__
        self._count(part, planned)
        return Medium(field, source, planned, alias)

    async def _probe(self, source: bytes, part: MediaPart, stopwatch: Stopwatch) -> PlannedMedia:
        began = time.monotonic()
        with stopwatch.stage(Stage.DECODE_MEDIA):
            planned = await self._decoder.plan(
                source, part.options, expected=part.modality, limits=self._limits
            )
        seconds = time.monotonic() - began
        self._metrics.observe("mimo_gateway_media_decode_seconds", seconds, kind=planned.modality)
        return planned

    async def _read(self, part: MediaPart, tenant_salt: bytes, hold: Hold) -> bytes:
        source = part.source
        if isinstance(source, bytes):
            return source
        if is_data_url(source.url):
            return await offload(len(source.url), FEW_BYTES, decode_data_url, source.url)
        if source.url.startswith(UPLOAD_SCHEME):
            upload = await self._uploads.get(source.url, tenant_salt)
            if upload is None:
                raise NotFound("unknown or expired upload", reason=Reason.MEDIA_NOT_FOUND)
            return upload
        kinds = list(Modality) if part.modality is None else [part.modality]
        return await self._fetcher.fetch(
            source.url,
            modality=part.modality,
            max_bytes=max(map(self._limits.source_bytes, kinds)),
            hold=hold,
        )

    async def _alias(self, source: bytes, part: MediaPart, tenant_salt: bytes) -> str:
        hashed = await offload(len(source), FEW_BYTES, hashlib.sha256, source)
        options = {
            "modality": part.modality,
            "options": dataclasses.asdict(part.options),
            "processor": self._processor,
        }
        return alias_key(
            tenant_salt, hashed.hexdigest(), options, PLANNER_VERSION, self._decoder.decoder_version
        )

    def _check_counts(self, modalities: Sequence[Modality | None]) -> None:
        counts = [("media", len(modalities), self._limits.max_items)]
        for modality in Modality:
            counts.append((modality, modalities.count(modality), self._limits.items(modality)))
        for kind, count, most in counts:
            if count > most:
                raise InvalidRequest(
                    f"{count} {kind} items; the limit is {most}",
                    reason=Reason.TOO_MANY_MEDIA,
                    field="messages",
                    limit=most,
                )

    def _count(self, part: MediaPart, planned: PlannedMedia) -> None:
        source = "inline"
        if isinstance(part.source, MediaUrl) and not is_data_url(part.source.url):
            source = "upload" if part.source.url.startswith(UPLOAD_SCHEME) else "url"
        self._metrics.inc(
            "mimo_gateway_media_bytes_total",
            planned.num_source_bytes,
            kind=planned.modality,
            source=source,
        )


def _remembered(data: bytes | None) -> PlannedMedia | None:
    """A plan of an earlier request. One that cannot be read counts as none."""
    if data is None:
        return None
    try:
        return PlannedMedia.from_json(data.decode())
    except (ValueError, TypeError, KeyError):
        logger.warning("unreadable media plan in the store")
        return None
