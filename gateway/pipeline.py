"""A request's journey: plan, check, name, encode, generate.

Everything that can refuse a request happens before any encoder works. The pipeline orchestrates,
its parts do the work.
"""

import asyncio
import hashlib
import struct
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from gateway.choice import Emit, Route
from gateway.conversation import Conversation
from gateway.embedding import Embedder, NamedItem
from gateway.generation import Event, GenerationRequest, ItemReport, PromptUsage, Started
from gateway.model import Model
from gateway.planning import MediaPlanner, Medium
from gateway.prompt.answer import Answer
from gateway.prompt.placeholders import ExpandedPrompt, expand
from gateway.prompt.reasoning import Phase
from gateway.routing import ReplicaPool
from gateway.running import Item, RunningRequest
from gateway.sampling import check_sampling, resolve_sampling
from gateway.stopwatch import Stopwatch
from mimo.errors import DeadlineExceeded, InvalidRequest, MimoError, Reason, Unavailable
from mimo.metrics import Metrics
from mimo.rpc.status import from_exception

QUEUED_EVENTS = 64  # then the decoders wait for the reader
AFFINITY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class MediaServices:
    """What a multimodal model needs besides its decoder."""

    planner: MediaPlanner
    embedder: Embedder


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt before anything was encoded. ``items`` are reported without an outcome."""

    prompt: ExpandedPrompt
    phase: Phase
    media: tuple[Medium, ...]
    items: tuple[ItemReport, ...]


class Pipeline:
    """Answers requests. ``media`` is None for a model that takes text only."""

    def __init__(
        self,
        model: Model,
        llm: ReplicaPool,
        media: MediaServices | None,
        metrics: Metrics,
        *,
        max_timeout_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._llm = llm
        self._media = media
        self._metrics = metrics
        self._max_timeout_s = max_timeout_s
        self._clock = clock

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of a request: one Started first, one Summary last. Close it to cancel.

        Raises MimoError; what this process can hold against a request before the first event.
        """
        events: asyncio.Queue[Event | MimoError | None] = asyncio.Queue(QUEUED_EVENTS)
        running = asyncio.create_task(self._generate(request, events))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, MimoError):
                    raise event
                yield event
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def count(self, request: GenerationRequest) -> Started:
        """What a request would start with. Plans its media; needs no encoder and no decoder.

        A prompt longer than the context is counted, not refused.
        """
        stopwatch = Stopwatch(self._clock)
        async with asyncio.timeout(min(request.timeout_s, self._max_timeout_s)):
            planned = await self.plan(request.conversation, request.tenant_salt, stopwatch)
        return Started(request.request_id, planned.prompt.usage, planned.items)

    async def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each component ("vision", "audio", "llm") that can be reached."""
        pools = [self._llm, *(self._media.embedder.pools if self._media else ())]
        found: dict[str, str] = {}
        for pool in pools:
            facts = await pool.known_facts()
            if facts:
                found[pool.component] = facts[0].fingerprint
        return found

    async def plan(
        self, conversation: Conversation, tenant_salt: bytes, stopwatch: Stopwatch
    ) -> PlannedPrompt:
        """Render the conversation, plan all media and expand. Raises InvalidRequest."""
        rendered = self._model.template.render(conversation)
        media: list[Medium] = []
        if any(conversation.media_parts()):
            media = await self._media_services().planner.plan(conversation, tenant_salt, stopwatch)
        # In a thread: a million characters take the tokenizer a good part of a second.
        prompt = await asyncio.to_thread(
            expand,
            rendered.segments,
            [medium.planned for medium in media],
            self._model.tokenizer,
            self._model.media_token_ids,
        )
        items = tuple(
            ItemReport(
                item.media_index,
                item.modality,
                item.num_rows,
                bytes=media[item.media_index].planned.num_source_bytes,
            )
            for item in prompt.items
        )
        return PlannedPrompt(prompt, rendered.phase, tuple(media), items)

    async def _generate(
        self, request: GenerationRequest, events: "asyncio.Queue[Event | MimoError | None]"
    ) -> None:
        """Run a request; its last event is None, or the error that ended it."""
        running: RunningRequest | None = None
        try:
            timeout_s = min(request.timeout_s, self._max_timeout_s)
            async with asyncio.timeout(timeout_s):
                running = await self._prepare(request, events.put, self._clock() + timeout_s)
                await running.run()
        except* Exception as failures:
            error = from_exception(_first(failures))
            if isinstance(error, DeadlineExceeded):
                error.metadata.setdefault("stage", running.stage if running else "plan")
            await events.put(error)
        else:
            await events.put(None)

    async def _prepare(
        self, request: GenerationRequest, emit: Emit, deadline: float
    ) -> RunningRequest:
        """Everything that can refuse a request, the cheapest first; then say that it started."""
        stopwatch = Stopwatch(self._clock)
        check_sampling(request, self._model)
        await self._check_live(request.conversation)
        planned = await self.plan(request.conversation, request.tenant_salt, stopwatch)
        route = Route(self._llm, _affinity(request, planned.prompt), request.n)
        room = await self._room(planned.prompt, route)
        items: list[NamedItem] = []
        if planned.media:
            items = await self._media_services().embedder.name_all(
                planned.prompt.items, planned.media, request.tenant_salt, stopwatch
            )
        await emit(Started(request.request_id, planned.prompt.usage, planned.items))
        self._metrics.inc("mimo_gateway_dispatched_requests_total", component="llm")
        self._metrics.inc(
            "mimo_gateway_dispatched_prompt_tokens_total",
            planned.prompt.usage.prompt_tokens,
            component="llm",
        )
        return RunningRequest(
            request,
            planned.prompt,
            resolve_sampling(request, self._model, room),
            answers=[
                Answer(
                    index,
                    self._model.tokenizer,
                    self._model.think_tags,
                    planned.phase,
                    stop=request.stop,
                    return_token_ids=request.return_token_ids,
                )
                for index in range(request.n)
            ],
            items=[Item(*pair) for pair in zip(items, planned.items, strict=True)],
            embedder=self._media.embedder if self._media else None,
            route=route,
            emit=emit,
            deadline=deadline,
            stopwatch=stopwatch,
            metrics=self._metrics,
            clock=self._clock,
        )

    async def _check_live(self, conversation: Conversation) -> None:
        """Nobody fetches or decodes media for a request that cannot be answered."""
        modalities = {part.modality for _, part in conversation.media_parts() if part.modality}
        if modalities:
            await self._media_services().embedder.check_live(modalities)
        if not await self._llm.is_live():
            raise Unavailable(
                "no language model can be reached", retry_after_s=2.0, component="llm"
            )

    async def _room(self, prompt: ExpandedPrompt, route: Route) -> int:
        """Tokens that the context leaves for the output. Raises InvalidRequest without any."""
        _, facts = await route.replica()
        limit = min(
            self._model.max_context_tokens,
            facts.limits.get("max_context_tokens", self._model.max_context_tokens),
        )
        room = limit - prompt.usage.prompt_tokens
        if room < 1:
            raise _too_long(prompt.usage, limit)
        return room

    def _media_services(self) -> MediaServices:
        if self._media is None:
            raise InvalidRequest(
                f"{self._model.name} takes text only",
                reason=Reason.MEDIA_MODALITY,
                field="messages",
            )
        return self._media


def _affinity(request: GenerationRequest, prompt: ExpandedPrompt) -> bytes:
    """Prompts of a tenant that begin alike go to the same decoder, which remembers beginnings."""
    beginning = prompt.ids[:AFFINITY_TOKENS]
    digest = hashlib.sha256(request.tenant_salt)
    digest.update(struct.pack(f"<{len(beginning)}I", *beginning))
    return digest.digest()


def _too_long(usage: PromptUsage, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt is {usage.prompt_tokens} tokens long ({usage.text_tokens} of text, "
        f"{usage.image_tokens} of pictures, {usage.video_tokens} of video, {usage.audio_tokens} of "
        f"sound); the context holds {limit}, with at least one for the answer",
        reason=Reason.CONTEXT_LENGTH_EXCEEDED,
        field="messages",
        limit=limit,
        text=usage.text_tokens,
        image=usage.image_tokens,
        video=usage.video_tokens,
        audio=usage.audio_tokens,
    )


def _first(failures: BaseExceptionGroup[Exception]) -> BaseException:
    """The failure that the others followed from."""
    failure = failures.exceptions[0]
    return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure
