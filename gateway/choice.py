"""One choice of a request: a sequence of tokens, wherever it runs, as a stream of text."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from gateway.attempts import Attempts
from gateway.backends.faults import garbage
from gateway.backends.language_model import (
    DecoderFinished,
    DecoderStarted,
    DecoderTokens,
    Embedding,
    Sampling,
    TokenRequest,
    generate_tokens,
)
from gateway.backends.replica import Replica, ReplicaFacts
from gateway.generation import ChoiceFinished, Event, FinishReason
from gateway.prompt.answer import Answer
from gateway.routing import ReplicaPool
from mimo.errors import EmbeddingMismatch, EmbeddingMissing, MimoError

Emit = Callable[[Event], Awaitable[None]]


class Route:
    """The decoder of one request. All choices run there, where they share the prompt's blocks; when
    it fails they move on together."""

    def __init__(
        self,
        pool: ReplicaPool,
        key: bytes,
        num_choices: int,
        *,
        prefer: str | None = None,
        on_settled: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``prefer`` is the address of a decoder that knows the prompt's beginning, if any does;
        ``on_settled`` is told the address of each one that is chosen."""
        self._attempts = Attempts(pool, key, cost=float(num_choices), prefer=prefer)
        self._on_settled = on_settled
        self._current: tuple[Replica, ReplicaFacts] | None = None
        self._searching = asyncio.Lock()

    async def replica(self) -> tuple[Replica, ReplicaFacts]:
        """Where to run now. Raises the last failure when no replica is left."""
        async with self._searching:
            if self._current is None:
                self._current = await self._attempts.next()
                self._on_settled(self._current[0].address)
            return self._current

    def failed(self, replica: Replica, error: MimoError) -> None:
        """Move on. Raises the error when another replica would do no better."""
        if self._current is not None and self._current[0] is replica:
            self._attempts.failed(replica, error)
            self._current = None


@dataclass(slots=True)
class ChoiceReport:
    """What a choice adds to the summary. Times are milliseconds; ``drafted`` and ``accepted`` count
    by draft position."""

    fingerprint: str = ""
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    started_at: float | None = None  # admitted by a decoder
    first_token_at: float | None = None
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


class Choice:
    """Runs one sequence to its end, through repairs and changes of replica.

    The client sees one stream without a repeated or missing token: what was received is sent along
    as prior output, and the token at a position depends only on seed, choice and position.
    """

    def __init__(
        self,
        request: Callable[[], TokenRequest],
        answer: Answer,
        route: Route,
        repair: Callable[[int, "asyncio.Future[Embedding]", MimoError], Awaitable[None]],
        reported_stop_ids: frozenset[int],
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``request`` gives the call as things stand; ``repair`` has an item encoded again, given
        its index, the embedding that was no good and the decoder's error; ``reported_stop_ids`` are
        those the client asked for."""
        self.report = ChoiceReport()
        self._request = request
        self._answer = answer
        self._route = route
        self._repair = repair
        self._reported_stop_ids = reported_stop_ids
        self._emit = emit
        self._clock = clock
        self._ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return self._answer.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._answer.num_reasoning_tokens

    async def run(self, deadline: float) -> None:
        """``deadline`` is on the clock."""
        while True:
            replica, _ = await self._route.replica()
            request = replace(self._request(), prior_output_ids=tuple(self._ids))
            try:
                with replica.carrying(1.0):
                    await self._run(replica, request, deadline)
                replica.succeeded()
                return
            except (EmbeddingMissing, EmbeddingMismatch) as error:
                index = error.metadata.get("item_index", "")
                if not index.isdecimal() or int(index) >= len(request.items):
                    raise
                await self._repair(int(index), request.items[int(index)].embedding, error)
            except MimoError as error:
                if await self._was_over(request.sampling):
                    return
                self._route.failed(replica, error)

    async def _was_over(self, sampling: Sampling) -> bool:
        """Whether all but the decoder's last word had arrived when the call broke off."""
        if self._ids and self._ids[-1] in sampling.stop_token_ids and not sampling.ignore_stop:
            await self._finish(FinishReason.STOP, self._ids[-1])
        elif len(self._ids) >= sampling.max_tokens:
            await self._finish(FinishReason.LENGTH, None)
        else:
            return False
        return True

    async def _run(self, replica: Replica, request: TokenRequest, deadline: float) -> None:
        timeout_s = max(0.0, deadline - self._clock())
        finished: DecoderFinished | None = None
        async with aclosing(generate_tokens(replica, request, timeout_s)) as events:
            async for event in events:
                match event:
                    case DecoderStarted():
                        self._note_started(event)
                    case DecoderTokens():
                        await self._take(event)
                        if self._answer.stop_string is not None:
                            break  # closing the iterator cancels the call
                    case DecoderFinished():
                        self.report.prefill_ms = event.prefill_ms
                        self.report.drafted = event.drafted
                        self.report.accepted = event.accepted
                        finished = event
        if finished is None or self._answer.stop_string is not None:
            await self._finish(FinishReason.STOP, None)
        else:
            await self._finish(finished.reason, finished.stop_token_id)

    def _note_started(self, started: DecoderStarted) -> None:
        self.report.fingerprint = started.fingerprint
        if self.report.started_at is None:
            self.report.started_at = self._clock()
            self.report.cached_tokens = started.cached_tokens
            self.report.queue_ms = started.queue_ms

    async def _take(self, delivery: DecoderTokens) -> None:
        if delivery.first_index != len(self._ids):
            raise garbage(
                "the decoder",
                f"output position {delivery.first_index}, expected {len(self._ids)}",
            )
        if self.report.first_token_at is None:
            now = self.report.first_token_at = self._clock()
            self.report.prefill_ms = (now - (self.report.started_at or now)) * 1000
        self._ids += [token.id for token in delivery.tokens]
        await self._emit_all(self._answer.feed(delivery.tokens))

    async def _finish(self, reason: FinishReason, stop_token_id: int | None) -> None:
        await self._emit_all(self._answer.finish())
        reported = stop_token_id in self._reported_stop_ids
        await self._emit(
            ChoiceFinished(
                self._answer.choice_index,
                reason,
                stop_string=self._answer.stop_string,
                stop_token_id=stop_token_id if reported else None,
            )
        )

    async def _emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            await self._emit(event)
