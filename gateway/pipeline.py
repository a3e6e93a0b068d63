"""A request's journey: plan, check, name, encode, generate.

Everything that can refuse a request happens before any encoder works. The pipeline orchestrates,
its parts do the work.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from gateway.admission import Admission, Place
from gateway.affinity import PrefixMemory, beginnings
from gateway.choice import Emit, Route
from gateway.conversation import Conversation
from gateway.embedding import Embedder, NamedItem
from gateway.generation import Event, GenerationRequest, ItemReport, PromptUsage, Started, joined
from gateway.grammar import behind_reasoning
from gateway.held import HeldBytes, Hold
from gateway.items import PlannedMedia
from gateway.mailbox import Mailbox
from gateway.model import Model
from gateway.offload import offload
from gateway.planning import MediaPlanner, Medium
from gateway.prompt.answer import Answer
from gateway.prompt.placeholders import ExpandedPrompt, expand
from gateway.prompt.reasoning import Phase
from gateway.prompt.segments import Segment, Text
from gateway.routing import ReplicaPool
from gateway.running import Item, RunningRequest
from gateway.sampling import check_sampling, resolve_sampling
from gateway.stopwatch import Stopwatch
from gateway.vitals import LoopLag
from mimo.errors import DeadlineExceeded, InvalidRequest, MimoError, Reason, Unavailable
from mimo.metrics import Metrics
from mimo.rpc.status import from_exception

QUEUED_EVENTS = 64  # then the decoders wait for the reader
FEW_TURNS = 32  # about a millisecond of the template
FEW_CHARACTERS = 2048  # about half a millisecond of the tokenizer
FEW_TOKENS = 8192  # about half a millisecond of hashing


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
        memory: HeldBytes | None = None,
        lag: LoopLag | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._llm = llm
        self._media = media
        self._metrics = metrics
        self._max_timeout_s = max_timeout_s
        self._clock = clock
        self._memory = memory or HeldBytes()
        self._admission = Admission(llm, max_timeout_s, lag or LoopLag(metrics), clock)
        self._prefixes = PrefixMemory()

    def place(self, timeout_s: float) -> AbstractContextManager[Place]:
        """A place for a request, while the block runs. Costs nothing: ask for it before anything
        is read or done for the request. Raises Overloaded when no decoder could answer in time."""
        return self._admission.place(timeout_s)

    async def generate(
        self, request: GenerationRequest, place: Place | None = None
    ) -> AsyncGenerator[Event, None]:
        """The events of a request: one Started first, one Summary last. Close it to cancel.

        ``place`` is the one that the request was given when it arrived; without it, it gets one
        now. Raises MimoError; what this process can hold against a request before the first event.
        """
        with ExitStack() as stack:
            place = place or stack.enter_context(self.place(request.timeout_s))
            place.deadline = min(place.deadline, self._clock() + request.timeout_s)
            events: Mailbox[Event] = Mailbox(QUEUED_EVENTS)
            running = asyncio.create_task(self._generate(request, events.put, place))
            running.add_done_callback(lambda _: events.end())
            try:
                while news := joined(await events.take()):
                    if self._clock() > place.deadline:  # late is no answer, however near it was
                        raise DeadlineExceeded("the deadline passed", stage="deliver")
                    for event in news:
                        yield event
                await running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def count(self, request: GenerationRequest) -> Started:
        """What a request would start with. Plans its media; needs no encoder and no decoder.

        A prompt longer than the context is counted, not refused.
        """
        stopwatch = Stopwatch(self._clock)
        async with asyncio.timeout(min(request.timeout_s, self._max_timeout_s)):
            with self._memory.holding() as hold:
                planned = await self.plan(
                    request.conversation, request.tenant_salt, stopwatch, hold
                )
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
        self, conversation: Conversation, tenant_salt: bytes, stopwatch: Stopwatch, hold: Hold
    ) -> PlannedPrompt:
        """Render the conversation, plan all media and expand. Raises InvalidRequest. ``hold``
        counts what is fetched."""
        num_turns = len(conversation.messages) + len(conversation.tools)
        rendered = await offload(num_turns, FEW_TURNS, self._model.template.render, conversation)
        media: list[Medium] = []
        if any(conversation.media_parts()):
            planner = self._media_services().planner
            media = await planner.plan(conversation, tenant_salt, stopwatch, hold)
        prompt = await self._expand(rendered.segments, [medium.planned for medium in media])
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

    async def _expand(
        self, segments: Sequence[Segment], media: Sequence[PlannedMedia]
    ) -> ExpandedPrompt:
        """In a thread when it is long: a million characters take a good part of a second."""
        num_characters = sum(len(each.text) for each in segments if isinstance(each, Text))
        tokenizer, media_ids = self._model.tokenizer, self._model.media_token_ids
        return await offload(
            num_characters, FEW_CHARACTERS, expand, segments, media, tokenizer, media_ids
        )

    async def _generate(self, request: GenerationRequest, emit: Emit, place: Place) -> None:
        """Run a request. Raises MimoError."""
        running: RunningRequest | None = None
        failure: MimoError | None = None
        try:
            began = self._clock()
            async with asyncio.timeout(place.deadline - began):
                has_media = any(request.conversation.media_parts())
                wait_s = self._media.planner.wait_s if self._media and has_media else 0.0
                self._admission.confirm(place, request.n, has_media=has_media, wait_s=wait_s)
                with self._memory.holding() as hold:
                    running = await self._prepare(request, emit, place.deadline, hold)
                    self._admission.prepared(place, self._clock() - began, has_media=has_media)
                    await running.run()
        except* Exception as failures:
            failure = from_exception(_first(failures))
            if isinstance(failure, DeadlineExceeded):
                failure.metadata.setdefault("stage", running.stage if running else "plan")
            if request.grammar is not None and failure.field == "grammar":
                failure.field = request.grammar.field  # as the client calls it
        if failure is not None:
            raise failure

    async def _prepare(
        self, request: GenerationRequest, emit: Emit, deadline: float, hold: Hold
    ) -> RunningRequest:
        """Everything that can refuse a request, the cheapest first; then say that it started."""
        stopwatch = Stopwatch(self._clock)
        check_sampling(request, self._model)
        await self._check_live(request.conversation)
        planned = await self.plan(request.conversation, request.tenant_salt, stopwatch, hold)
        request = replace(request, grammar=behind_reasoning(request.grammar, planned.phase))
        route = await self._route(request, planned.prompt)
        room = await self._room(planned.prompt, route)
        sampling = resolve_sampling(request, self._model, room)
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
            sampling,
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

    async def _route(self, request: GenerationRequest, prompt: ExpandedPrompt) -> Route:
        """Prompts of a tenant that begin alike go to the decoder that remembers the beginning."""
        ids, salt = prompt.ids, request.tenant_salt
        digests = await offload(len(ids), FEW_TOKENS, beginnings, ids, salt)
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
