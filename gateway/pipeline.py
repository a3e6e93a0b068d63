"""A request's journey: plan, check, name, encode, generate.

Everything that can refuse a request happens before any encoder works. The pipeline orchestrates,
its parts do the work.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from gateway.affinity import PrefixMemory, beginnings
from gateway.choice import Emit, Route
from gateway.conversation import Conversation
from gateway.embedding import Embedder, NamedItem
from gateway.generation import Event, GenerationRequest, ItemReport, PromptUsage, Started
from gateway.grammar import behind_reasoning
from gateway.model import Model
from gateway.planning import MediaPlanner, Medium
from gateway.prompt.answer import Answer
from gateway.prompt.placeholders import ExpandedPrompt, expand
from gateway.prompt.reasoning import Phase
from gateway.recent import RecentMean
from gateway.routing import ReplicaPool
from gateway.running import Item, RunningRequest
from gateway.sampling import check_sampling, resolve_sampling
from gateway.stopwatch import Stopwatch
from mimo.errors import DeadlineExceeded, InvalidRequest, MimoError, Reason, Unavailable
from mimo.metrics import Metrics
from mimo.rpc.status import from_exception

# Of the time that is left: predictions err, and what is let in and not finished is for nothing.
MARGIN = 0.8
QUEUED_EVENTS = 64  # then the decoders wait for the reader


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
        self._prefixes = PrefixMemory()
        self._preparations = {has_media: RecentMean(clock) for has_media in (False, True)}

    def check_room(self, timeout_s: float) -> None:
        """Raises Overloaded when no decoder could answer in that time. Costs nothing: ask before
        anything is done for a request, and before its first event again."""
        self._llm.check_room(min(timeout_s, self._max_timeout_s))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of a request: one Started first, one Summary last. Close it to cancel.

        Raises MimoError; what this process can hold against a request before the first event.
        """
        timeout_s = min(request.timeout_s, self._max_timeout_s)
        deadline = self._clock() + timeout_s
        events: asyncio.Queue[Event | MimoError | None] = asyncio.Queue(QUEUED_EVENTS)
        running = asyncio.create_task(self._generate(request, events, deadline))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, MimoError):
                    raise event
                if self._clock() > deadline:  # what is late is no answer, however near it was
                    raise DeadlineExceeded("the deadline passed", stage="deliver")
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
        self,
        request: GenerationRequest,
        events: "asyncio.Queue[Event | MimoError | None]",
        deadline: float,
    ) -> None:
        """Run a request; its last event is None, or the error that ended it."""
        running: RunningRequest | None = None
        try:
            async with asyncio.timeout(deadline - self._clock()):
                left_s = deadline - self._clock()
                self.check_room(MARGIN * left_s - self._preparation_s(request))
                with self._llm.expecting(float(request.n)):
                    began = self._clock()
                    running = await self._prepare(request, events.put, deadline)
                    self._preparations[running.has_media].add(self._clock() - began)
                await running.run()
        except* Exception as failures:
            error = from_exception(_first(failures))
            if isinstance(error, DeadlineExceeded):
                error.metadata.setdefault("stage", running.stage if running else "plan")
            if request.grammar is not None and error.field == "grammar":
                error.field = request.grammar.field  # as the client calls it
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
        request = replace(request, grammar=behind_reasoning(request.grammar, planned.phase))
        route = self._route(request, planned.prompt)
        room = await self._room(planned.prompt, route)
        items: list[NamedItem] = []
        if planned.media:
            items = await self._media_services().embedder.name_all(
                planned.prompt.items, planned.media, request.tenant_salt, deadline, stopwatch
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

    def _preparation_s(self, request: GenerationRequest) -> float:
        """Time that a request needs before a decoder gets it, as things are going."""
        has_media = any(request.conversation.media_parts())
        lately_s = self._preparations[has_media].seconds
        if self._media is None or not has_media:
            return lately_s
        return max(lately_s, self._media.planner.wait_s)

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

    def _route(self, request: GenerationRequest, prompt: ExpandedPrompt) -> Route:
        """Prompts of a tenant that begin alike go to the decoder that remembers the beginning."""
        digests = beginnings(prompt.ids, request.tenant_salt)
        return Route(
            self._llm,
            digests[0],
            request.n,
            prefer=self._prefixes.find(digests),
            on_settled=lambda address: self._prefixes.remember(digests, address),
        )

    def _media_services(self) -> MediaServices:
        if self._media is None:
            raise InvalidRequest(
                f"{self._model.name} takes text only",
                reason=Reason.MEDIA_MODALITY,
                field="messages",
            )
        return self._media


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
