"""One request while its encoders and decoders work.

Both work at the same time: the decoder gets the whole prompt at once and waits for the items that
do not exist yet, so that it can begin with what comes before them.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gateway import preprocessing
from gateway.backends.language_model import DecoderItem, Embedding, Sampling, TokenRequest
from gateway.choice import Choice, Emit, Route
from gateway.embedding import Embedder, NamedItem
from gateway.generation import (
    EmbeddingCache,
    GenerationRequest,
    ItemReady,
    ItemReport,
    SpeculationReport,
    StageTimings,
    Summary,
)
from gateway.prompt.answer import Answer
from gateway.prompt.placeholders import ExpandedPrompt
from gateway.stopwatch import Stage, Stopwatch
from mimo.errors import MimoError
from mimo.metrics import AUDIO, VISION, Metrics
from mimo.store.base import Outcome

_ENCODED_HERE = (Outcome.MISS, Outcome.REPAIRED, Outcome.BYPASS)


class Item:
    """An item of the request: its name, its embedding once that is being made, its report."""

    def __init__(self, named: NamedItem, report: ItemReport) -> None:
        self.named = named
        self.report = report
        self.embedding: asyncio.Task[Embedding] | None = None
        self.is_repaired = False

    def as_decoder_item(self) -> DecoderItem:
        assert self.embedding is not None
        rows, hidden_size = self.named.shape
        return DecoderItem(
            modality=self.named.item.modality,
            key=self.named.key,
            num_rows=rows,
            hidden_size=hidden_size,
            dtype=self.named.facts.embedding_dtype,
            encoder_fingerprint=self.named.facts.fingerprint,
            embedding=self.embedding,
        )


class RunningRequest:
    """Makes embeddings exist, runs the choices, and sums up."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt: ExpandedPrompt,
        sampling: Sampling,
        *,
        answers: Sequence[Answer],
        items: Sequence[Item],
        embedder: Embedder | None,
        route: Route,
        emit: Emit,
        deadline: float,
        stopwatch: Stopwatch,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One answer per choice. ``deadline`` is on the clock; ``embedder`` is needed only when
        there are items."""
        self._request = request
        self._prompt = prompt
        self._sampling = sampling
        self._items = items
        self._embedder = embedder
        self._emit = emit
        self._stopwatch = stopwatch
        self._deadline = deadline
        self._metrics = metrics
        self._tasks = asyncio.TaskGroup()
        self._choices = [
            Choice(
                self._token_request(answer.choice_index),
                answer,
                route,
                self._repair,
                frozenset(request.stop_token_ids),
                emit,
                clock,
            )
            for answer in answers
        ]

    @property
    def stage(self) -> str:
        """Where the time goes now."""
        if any(item.report.cache is None for item in self._items):
            return "encode"
        if any(choice.report.started_at is None for choice in self._choices):
            return "queue"
        return "generate"

    async def run(self) -> None:
        """Emit everything from the first ready item to the summary."""
        async with self._tasks:
            for item in self._items:
                item.embedding = self._tasks.create_task(self._embed(item, repair=False))
            first, *others = self._choices
            for choice in others:
                self._tasks.create_task(choice.run(self._deadline))
            await first.run(self._deadline)
        self._count_work()
        await self._emit(self._summary())

    async def _embed(self, item: Item, *, repair: bool) -> Embedding:
        assert self._embedder is not None
        embedding = await self._embedder.ensure(
            item.named,
            bypass=self._request.cache.embeddings is EmbeddingCache.BYPASS,
            repair=repair,
            deadline=self._deadline,
            stopwatch=self._stopwatch,
        )
        item.report = replace(
            item.report,
            cache=embedding.outcome,
            encode_ms=item.report.encode_ms + embedding.encode_ms,
        )
        await self._emit(ItemReady(item.report))
        return embedding

    async def _repair(
        self, index: int, used: "asyncio.Future[Embedding]", error: MimoError
    ) -> None:
        """Encode an item again, once; raises the decoder's error when that did not help.

        Another choice may have had it repaired since this one began.
        """
        item = self._items[index]
        if item.embedding is not used:
            return
        if item.is_repaired:
            raise error
        item.is_repaired = True
        self._metrics.inc(
            "mimo_gateway_redispatched_total", component="llm", reason="embedding_missing"
        )
        item.embedding = self._tasks.create_task(self._embed(item, repair=True))

    def _token_request(self, choice_index: int) -> Callable[[], TokenRequest]:
        """The call of a choice, with the embeddings as they stand when it is made."""
        request = self._request
        return lambda: TokenRequest(
            prompt_ids=self._prompt.ids,
            items=[item.as_decoder_item() for item in self._items],
            spans=self._prompt.spans,
            sampling=self._sampling,
            grammar=request.grammar,
            speculation=request.speculation,
            cache=request.cache,
            cache_salt=request.tenant_salt,
            choice_index=choice_index,
            priority=request.priority,
        )

    def _count_work(self) -> None:
        """Encoder work that this request caused, as autoscaling wants to know it."""
        for component in (VISION, AUDIO):
            done = sum(
                preprocessing.work(item.named.plan)
                for item in self._items
                if item.named.component == component and item.report.cache in _ENCODED_HERE
            )
            if done:
                self._metrics.inc("mimo_gateway_dispatched_requests_total", component=component)
                self._metrics.inc(
                    "mimo_gateway_dispatched_work_squared_total", done**2, component=component
                )

    def _summary(self) -> Summary:
        reports = [choice.report for choice in self._choices]
        stopwatch = self._stopwatch
        firsts = [report.first_token_at for report in reports if report.first_token_at is not None]
        return Summary(
            prompt=replace(self._prompt.usage, cached_tokens=reports[0].cached_tokens),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
            timings_ms=StageTimings(
                queue=max(report.queue_ms for report in reports),
                fetch=stopwatch.ms(Stage.FETCH),
                decode_media=stopwatch.ms(Stage.DECODE_MEDIA),
                encode=stopwatch.ms(Stage.ENCODE),
                store=stopwatch.ms(Stage.STORE),
                prefill=max(report.prefill_ms for report in reports),
                first_token=stopwatch.ms_until(min(firsts)) if firsts else 0.0,
                total=stopwatch.total_ms,
            ),
            items=tuple(item.report for item in self._items),
            speculation=SpeculationReport(
                _sum_by_position(report.drafted for report in reports),
                _sum_by_position(report.accepted for report in reports),
            ),
            model_fingerprint=reports[0].fingerprint,
        )


def _sum_by_position(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))
