"""The front of this package: plan a file, then decode what the plan says.

Planning and decoding are separate jobs, because most of the time a plan is all that is needed: the
prompt may be too long, or the embedding may already exist.
"""

import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import metadata
from typing import Any

from gateway.items import (
    AudioPlan,
    DecodedImage,
    ImagePlan,
    MediaOptions,
    Modality,
    PlannedMedia,
    ResizedBy,
    VideoPlan,
)
from gateway.media.channel import Kind
from gateway.media.facts import AudioFacts, Facts, ImageFacts, VideoFacts, facts_from_json
from gateway.media.faults import beyond
from gateway.media.limits import MIB, Limits
from gateway.media.options import check_options
from gateway.media.plan.audio import plan_audio
from gateway.media.plan.image import plan_image
from gateway.media.plan.video import plan_video
from gateway.media.processor import ProcessorConfig
from gateway.media.sniff import Format, default_modality, sniff
from gateway.media.workers import Job, WorkerPool
from gateway.offload import offload
from mimo.errors import Internal, InvalidRequest, Reason
from mimo.store.keys import content_digest_video
from mimo.tensor import RawTensor

# Raise when the same facts give other plans, or the same file other pixels or samples.
PLANNER_VERSION = "1"
_DECODING_VERSION = "1"


class MediaDecoder:
    """Plans and decodes media in the pool's workers.

    Every failure is InvalidRequest with a media reason and no field: the caller knows which part of
    its request the bytes came from. A full pool raises Overloaded.
    """

    def __init__(self, pool: WorkerPool, processor: ProcessorConfig, limits: Limits) -> None:
        self._pool = pool
        self._processor = processor
        self._limits = limits
        self.decoder_version = " ".join(
            f"{name}={version}"
            for name, version in (
                ("gateway", _DECODING_VERSION),
                ("av", metadata.version("av")),
                ("pillow", metadata.version("pillow")),
            )
        )

    @property
    def wait_s(self) -> float:
        """How long a job would take now, from asking for it to its end."""
        return self._pool.wait_s

    async def plan(
        self,
        source: bytes,
        options: MediaOptions,
        *,
        expected: Modality | None,
        limits: Limits | None = None,
    ) -> PlannedMedia:
        """Find out what ``source`` is and what it will become.

        ``expected`` None takes whatever the file holds. ``limits`` (of every method) replaces the
        service's for one tenant. Sound is decoded to count its samples; of a video only the first
        frame is.
        """
        limits = limits or self._limits
        check_options(options)
        format = sniff(source, expected)
        modality = expected or default_modality(format)
        _check_bytes(source, modality, limits)
        digest = await _sha256(source)
        try:
            facts = await self._probe(source, digest, format, modality, options, limits)
        except InvalidRequest as error:
            if expected or modality is not Modality.VIDEO or error.reason != Reason.MEDIA_EMPTY:
                raise
            # A container without pictures, sent by a client that left the modality to us.
            return await self.plan(source, options, expected=Modality.AUDIO, limits=limits)
        return self._plan(facts, digest, format, len(source), options)

    async def decode_image(
        self, source: bytes, planned: PlannedMedia, *, limits: Limits | None = None
    ) -> DecodedImage:
        """All pixels of a planned picture. Raises InvalidRequest when they are corrupt."""
        plan = planned.plan
        assert isinstance(plan, ImagePlan)
        size = (plan.source_height, plan.source_width)
        job = self._job("decode_image", planned, limits, orientation=plan.orientation, size=size)
        digest, pixels = "", bytearray()
        async with aclosing(self._pool.run(job, source, planned.source_digest)) as messages:
            async for kind, payload in messages:
                if kind is Kind.FACTS:
                    digest = str(_json(payload)["content_digest"])
                else:
                    pixels = payload
        return DecodedImage(RawTensor("uint8", (*size, 3), pixels), digest)

    async def decode_frames(
        self, source: bytes, planned: PlannedMedia, *, limits: Limits | None = None
    ) -> AsyncGenerator[RawTensor, None]:
        """The frames of a planned video, one at a time: [H, W, 3] of ``plan.frames_shape``.

        The worker decodes only one frame ahead of the caller. Close the generator to stop early.
        """
        plan = planned.plan
        assert isinstance(plan, VideoPlan)
        resized = plan.resized_by is ResizedBy.GATEWAY
        job = self._job(
            "decode_frames",
            planned,
            limits,
            stream_index=plan.stream_index,
            frame_indices=plan.frame_indices,
            source_size=(plan.source_height, plan.source_width),
            target_size=(plan.target_height, plan.target_width) if resized else None,
            orientation=plan.orientation,
        )
        num_frames, *shape = plan.frames_shape
        missing = num_frames
        async with aclosing(self._pool.run(job, source, planned.source_digest)) as messages:
            async for _, payload in messages:
                missing -= 1
                yield RawTensor(plan.frame_dtype, tuple(shape), payload)
        if missing:
            raise Internal("a media worker sent a wrong number of frames")

    async def decode_waveform(
        self, source: bytes, planned: PlannedMedia, *, limits: Limits | None = None
    ) -> AsyncGenerator[RawTensor, None]:
        """The sound of a planned clip, or of a planned video that has some: mono float32 pieces of
        about a second that add up to ``num_samples``. Close the generator to stop early."""
        plan = planned.plan.sound if isinstance(planned.plan, VideoPlan) else planned.plan
        assert isinstance(plan, AudioPlan)
        job = self._job(
            "decode_waveform",
            planned,
            limits,
            stream_index=plan.stream_index,
            sample_rate=plan.sample_rate,
            num_samples=plan.num_samples,
        )
        missing = plan.num_samples
        async with aclosing(self._pool.run(job, source, planned.source_digest)) as messages:
            async for _, payload in messages:
                num_samples = len(payload) // 4
                missing -= num_samples
                yield RawTensor("float32", (num_samples,), payload)
        if missing:
            raise Internal("a media worker sent a wrong number of samples")

    async def _probe(
        self,
        source: bytes,
        digest: str,
        format: Format,
        modality: Modality,
        options: MediaOptions,
        limits: Limits,
    ) -> Facts:
        parameters: dict[str, Any] = {}
        if modality is Modality.IMAGE:
            parameters["exif"] = options.exif
        elif modality is Modality.VIDEO:
            parameters["use_audio_track"] = options.use_audio_track
        job = Job(
            operation=f"probe_{modality.value}",
            format=format.name,
            parameters=parameters,
            cpu_s=limits.cpu_s(modality),
            memory_bytes=limits.memory_bytes(modality),
            limits=limits,
        )
        report: dict[str, Any] = {}
        async with aclosing(self._pool.run(job, source, digest)) as messages:
            async for _, payload in messages:
                report = _json(payload)
        return facts_from_json(report)

    def _plan(
        self,
        facts: Facts,
        digest: str,
        format: Format,
        num_source_bytes: int,
        options: MediaOptions,
    ) -> PlannedMedia:
        plan: ImagePlan | AudioPlan | VideoPlan
        content_digest: str | None = None
        sound_digest: str | None = None
        match facts:
            case ImageFacts():
                modality = Modality.IMAGE
                plan = plan_image(
                    facts.height, facts.width, facts.orientation, options, self._processor
                )
            case AudioFacts():
                modality = Modality.AUDIO
                plan = self._plan_sound(facts)
                content_digest = facts.content_digest
            case VideoFacts():
                modality = Modality.VIDEO
                plan = plan_video(
                    stream_index=facts.stream_index,
                    height=facts.height,
                    width=facts.width,
                    orientation=facts.orientation,
                    num_frames=facts.num_frames,
                    frame_rate=facts.frame_rate,
                    sound=self._plan_sound(facts.sound) if facts.sound else None,
                    options=options,
                    config=self._processor,
                )
                sound_digest = facts.sound.content_digest if facts.sound else None
                content_digest = content_digest_video(
                    digest,
                    plan.stream_index,
                    plan.frame_indices,
                    plan.timestamps,
                    plan.orientation,
                    self.decoder_version,
                )
        return PlannedMedia(
            modality=modality,
            plan=plan,
            format=format.name,
            num_source_bytes=num_source_bytes,
            source_digest=digest,
            content_digest=content_digest,
            sound_digest=sound_digest,
        )

    def _plan_sound(self, facts: AudioFacts) -> AudioPlan:
        return plan_audio(
            stream_index=facts.stream_index,
            source_rate=facts.sample_rate,
            source_channels=facts.channels,
            num_source_samples=facts.num_samples,
            config=self._processor,
        )

    def _job(
        self, operation: str, planned: PlannedMedia, limits: Limits | None, **parameters: Any
    ) -> Job:
        limits = limits or self._limits
        return Job(
            operation=operation,
            format=planned.format,
            parameters=parameters,
            cpu_s=limits.cpu_s(planned.modality),
            memory_bytes=limits.memory_bytes(planned.modality),
            limits=limits,
        )


def _check_bytes(source: bytes, modality: Modality, limits: Limits) -> None:
    most = limits.source_bytes(modality)
    if len(source) > most:
        raise beyond(
            "bytes",
            len(source),
            most,
            f"{modality.value} is {len(source) / MIB:.1f} MiB; the limit is {most / MIB:g}",
        )


def _json(payload: bytearray) -> dict[str, Any]:
    try:
        return dict(json.loads(payload))
    except (TypeError, ValueError) as error:
        raise Internal("a media worker sent a malformed report") from error


async def _sha256(source: bytes) -> str:
    hashed = await offload(len(source), MIB, hashlib.sha256, source)
    return hashed.hexdigest()
