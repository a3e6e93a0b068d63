"""Decide what a step runs, and take in what it produced. No torch, no clock, no I/O.

A request always owes the cache the tokens ``[num_cached_tokens, num_tokens)``. A prompt being
prefilled owes many and runs them in chunks; a decoding request owes one, its newest; a preempted
one owes everything again. So one rule plans all three, and a step that reaches the newest token
samples the next one.

Order within a step: decodes first (they are short and someone is reading), then chunks of running
prefills, then admissions, until the token budget is spent. A request that begins like one whose
prompt runs in this very step waits for it, and takes its blocks over in the next.
"""

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mimo.errors import InvalidRequest, Overloaded, Reason
from services.llm.engine.acceptance import Acceptance
from services.llm.engine.block_manager import BlockManager
from services.llm.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Positions ``[start, start + num_tokens)`` of a request, then its drafts, run in this step."""

    request: Request
    start: int
    num_tokens: int
    draft_ids: tuple[int, ...] = ()
    is_decode: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft_ids)

    @property
    def samples(self) -> bool:
        """Whether the newest token is among the rows, so that the next one is sampled."""
        return self.stop == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step meant for one request: the tokens it gained, and why it is over, if it is."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class Scheduler:
    """Continuous batching over a fixed pool of blocks.

    ``max_running``: requests that hold blocks at once. ``max_step_tokens``: rows of one step.
    ``max_context``: tokens of one request, prompt and output; the pool may allow fewer.
    """

    def __init__(
        self, blocks: BlockManager, *, max_running: int, max_step_tokens: int, max_context: int
    ) -> None:
        self.blocks = blocks
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.max_context = min(max_context, blocks.max_request_tokens)
        self._model_context = max_context
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank; these hold blocks
        self._acceptance = Acceptance()  # of all requests; where new ones begin
        self._arrivals = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that must be prefilled before everything waiting has its first token."""
        return sum(
            request.num_tokens - request.num_cached_tokens
            for request in (*self.waiting, *self.running)
            if not request.is_decoding
        )

    def add(self, request: Request) -> None:
        """Queue a request that passed :meth:`check`."""
        self._arrivals += 1
        request.arrival = self._arrivals
        request.acceptance = self._acceptance.copy()
        insort(self.waiting, request, key=_rank)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest or Overloaded when a request can never run. Any thread may ask."""
        if request.num_tokens == 0:
            raise InvalidRequest("the prompt is empty", field="prompt_ids")
        if request.num_tokens >= self._model_context:
            raise InvalidRequest(
                f"{request.num_tokens} tokens leave no room in a context of {self._model_context}",
                reason=Reason.CONTEXT_LENGTH_EXCEEDED,
                field="prompt_ids",
                limit=self._model_context,
                value=request.num_tokens,
            )
        if request.num_tokens >= self.max_context:
            raise Overloaded(
                f"{request.num_tokens} tokens never fit into this replica's KV cache",
                reason=Reason.CAPACITY,
                limit=self.max_context,
            )

    def remove(self, request: Request) -> None:
        """Forget an unfinished request and free its blocks."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.blocks.release(request)

    def plan(self) -> Plan:
        """Choose this step's rows and reserve the blocks they write to."""
        return _Planning(self).plan()

    def commit(self, plan: Plan, sampled: Mapping[Request, Sequence[int]]) -> list[Advance]:
        """Record that the plan ran. ``sampled``: accepted drafts and the token after them.

        A sampling request without an entry, or removed since, is left as it was.
        """
        running = set(self.running)
        return [
            self._advance(scheduled, sampled.get(scheduled.request, ()))
            for scheduled in plan.scheduled
            if scheduled.request in running
            and (scheduled.request in sampled or not scheduled.samples)
        ]

    def num_draft_tokens(self, request: Request) -> int:
        """How many tokens are worth drafting: as deep as drafts hold, fewer under load, none beyond
        the request's end."""
        room = min(
            request.params.max_tokens - request.num_output_tokens,
            self.max_context - request.num_tokens,
        )
        is_busy = len(self.running) > self.max_running // 2
        most = min(request.max_draft_tokens, room - 1, 1 if is_busy else room)
        return request.acceptance.depth(max(most, 0))

    def _advance(self, scheduled: ScheduledRequest, sampled: Sequence[int]) -> Advance:
        request = scheduled.request
        request.num_cached_tokens = scheduled.stop
        request.draft_ids = []
        gained: list[int] = []
        reason = None
        for token_id in sampled:
            request.append(token_id)
            gained.append(token_id)
            reason = request.finish_reason
            if reason is None and request.num_tokens >= self.max_context:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        if scheduled.is_decode:
            # A draft past the end of the answer may have held; nobody gained by it.
            num_drafted = len(scheduled.draft_ids)
            num_accepted = min(len(sampled) - 1, len(gained))
            request.record_drafts(num_drafted, num_accepted)
            request.acceptance.record(num_drafted, num_accepted)
            self._acceptance.record(num_drafted, num_accepted, weight=0.02)
        request.num_cached_tokens += max(len(gained) - 1, 0)  # accepted drafts are cached already
        if request.max_draft_tokens == 0:
            request.num_settled_tokens = request.num_cached_tokens
        if reason is not None:
            self.blocks.publish(request)
            self.remove(request)
        return Advance(request, tuple(gained), reason)


class _Planning:
    """One call of :meth:`Scheduler.plan`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._budget = scheduler.max_step_tokens
        self._scheduled: dict[Request, ScheduledRequest] = {}
        self._preempted: list[Request] = []

    def plan(self) -> Plan:
        # Not at commit: until the drafter has followed, it still writes to the rows of the step.
        for request in self._scheduler.running:
            self._blocks.publish(request)
            self._blocks.drop_behind(request)
        for request in self._running(decoding=True):
            self._decode(request)
        for request in self._running(decoding=False):
            self._prefill(request)
        if not self._preempted:  # what was just taken away must not go to a newcomer
            self._admit()
        return Plan(tuple(self._scheduled.values()), tuple(self._preempted))

    def _running(self, *, decoding: bool) -> Iterator[Request]:
        for request in tuple(self._scheduler.running):
            if request not in self._preempted and request.is_decoding == decoding:
                yield request

    def _decode(self, request: Request) -> None:
        if self._budget == 0:
            return
        drafts = tuple(request.draft_ids[: self._budget - 1])
        if drafts and not self._blocks.reserve(request, request.num_tokens + len(drafts)):
            drafts = ()  # speculation never costs another request its blocks
        if self._reserve(request, request.num_tokens):
            start = request.num_cached_tokens
            self._schedule(ScheduledRequest(request, start, 1, drafts, is_decode=True))

    def _prefill(self, request: Request) -> None:
        stop = min(request.num_ready_tokens, request.num_cached_tokens + self._budget)
        if stop <= request.num_cached_tokens:
            return  # budget spent, or waiting for an item
        coverable = self._blocks.num_coverable_tokens(request)
        if coverable > request.num_cached_tokens:
            stop = min(stop, coverable)
        if self._reserve(request, stop):
            start = request.num_cached_tokens
            self._schedule(ScheduledRequest(request, start, stop - start))

    def _admit(self) -> None:
        scheduler = self._scheduler
        for request in tuple(scheduler.waiting):
            if self._budget == 0 or len(scheduler.running) == scheduler.max_running:
                return
            num_found = self._blocks.find(request)
            if num_found == 0 and request.num_ready_tokens == 0:
                continue  # it begins with an item that has not arrived
            if self._is_underway(request, num_found):
                continue
            if not self._blocks.can_admit(request, num_found):
                return  # in order: a large request is not starved by small ones
            scheduler.waiting.remove(request)
            insort(scheduler.running, request, key=_rank)
            self._blocks.take_over(request, num_found)
            if request.num_preemptions == 0:
                request.num_found_tokens = min(request.num_cached_tokens, request.num_prompt_tokens)
            self._blocks.reserve(request, request.num_tokens, only_full=True)
            self._prefill(request)

    def _is_underway(self, request: Request, num_found: int) -> bool:
        """Whether a prompt that runs in this step computes the request's next block, too."""
        if not request.use_prefix_cache or num_found == self._blocks.max_found(request):
            return False
        content, stop = request.block_hashes[num_found], (num_found + 1) * self._blocks.block_size
        return any(
            content in other.block_hashes[num_found : num_found + 1]
            for other, scheduled in self._scheduled.items()
            if not scheduled.is_decode and other.num_settled_tokens < stop
        )

    def _schedule(self, scheduled: ScheduledRequest) -> None:
        self._scheduled[scheduled.request] = scheduled
        self._budget -= scheduled.num_rows

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve blocks, preempting from the back of the queue. False: the request sits out."""
        while not self._blocks.reserve(request, num_tokens):
            victim = self._victim(behind=request)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, behind: Request) -> Request | None:
        """The last in rank after ``behind`` that this step does not run."""
        for candidate in reversed(self._scheduler.running):
            if candidate.rank <= behind.rank:
                return None
            if candidate not in self._scheduled:
                return candidate
        return None

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; its tokens stay, their KV is computed again later."""
        self._blocks.publish(request)
        self._blocks.release(request)
        request.num_cached_tokens = 0
        request.draft_ids = []
        request.num_preemptions += 1
        self._scheduler.running.remove(request)
        insort(self._scheduler.waiting, request, key=_rank)
        self._preempted.append(request)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
