"""The engine's thread and its asynchronous face.

One thread owns scheduler, cache and device. The event loop talks to it through an inbox, and it
answers with one ``call_soon_threadsafe`` per step, whatever the batch. A caller that goes away puts
an abort into the inbox; its blocks are free before the next step is planned. A thread that does not
come out of a step is given up on, and all calls with it.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from mimo.errors import MimoError, Overloaded, Reason, Unavailable
from services.llm.engine.core import EngineCore, Progress
from services.llm.engine.meter import Load, Meter
from services.llm.engine.request import FinishReason, Request
from services.llm.model.parallel import RankLost

logger = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
LOST_STEP_S = 2.0  # what a step gets to end in when it cannot end well
WATCH_S = 1.0  # between two looks at the step that runs


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request's first step ran. ``Request.timing`` says how long it had waited."""


Event = Admitted | Progress


class Engine:
    """Many callers' streams around one :class:`EngineCore`.

    ``max_waiting`` bounds requests submitted and not yet finished beyond those that run. A step
    that takes longer than ``max_step_s`` is taken for a hang.

    ``on_failure`` is called in the event loop, with the reason, when the thread died or hangs;
    every call has failed by then.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        meter: Meter | None = None,
        max_waiting: int = 4096,
        max_step_s: float = 90.0,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._core = core
        self._meter = meter or Meter()
        self._max_unfinished = max_waiting + core.scheduler.max_running
        self._clock = clock
        self._on_failure = on_failure
        self._inbox: deque[Callable[[], list[Progress]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._max_step_s = max_step_s
        self._last_step_s = max_step_s
        self._round: object | None = None  # what the thread is at; None while it waits
        self._streams: dict[Request, asyncio.Queue[Event]] = {}  # owned by the event loop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._watching: asyncio.Task[None]

    @property
    def max_draft_tokens(self) -> int:
        return self._core.max_draft_tokens

    @property
    def max_context(self) -> int:
        """Tokens of one request, prompt and output."""
        return self._core.scheduler.max_context

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Events are delivered in ``loop``."""
        self._loop = loop
        self._thread.start()
        self._watching = loop.create_task(self._watch())

    async def stop(self) -> None:
        """End what still runs as UNAVAILABLE and join the thread, unless it hangs."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._watching.cancel()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, self._last_step_s)
        self._fail_all(Unavailable("this replica is stopping", reason=Reason.DRAINING))

    def give_up(self, reason: str) -> None:
        """End what runs as UNAVAILABLE at once, and start nothing more: the thread may be stuck in
        a step that cannot end well."""
        with self._wake:
            self._stopping = True
            self._last_step_s = LOST_STEP_S
            self._wake.notify()
        self._fail_all(Unavailable(reason))

    def load(self) -> Load:
        return self._meter.load(self._core.scheduler, len(self._streams))

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run a request; the last event has a ``finish_reason``. Closing the iterator aborts it.

        Raises InvalidRequest or Overloaded before anything runs, and whatever ends the request.
        """
        self._check_admission(request)
        stream: asyncio.Queue[Event] = asyncio.Queue()
        self._streams[request] = stream
        request.timing.submitted = self._clock()
        self._post(lambda: self._add(request))
        is_over = False
        try:
            while not is_over:
                event = await stream.get()
                if isinstance(event, Progress):
                    if event.error is not None:
                        raise event.error
                    is_over = event.finish_reason is not None
                yield event
        finally:
            self._streams.pop(request, None)
            if not is_over:  # nothing to do where the engine itself ended it
                self._post(lambda: self._abort(request))

    def supply(self, request: Request, item_index: int, rows: Any) -> None:
        """The embedding of a pending item has arrived. rows: [num_rows, D]."""
        self._post(lambda: self._supply(request, item_index, rows))

    def fail(self, request: Request, error: MimoError) -> None:
        """End a request's stream with an error, for instance because an item never arrives."""
        self._deliver([(request, _failure(request, error))])

    # ── in the event loop ──

    def _check_admission(self, request: Request) -> None:
        self._core.scheduler.check(request)
        if self._stopping or not self._thread.is_alive():
            raise Unavailable("this replica is stopping", reason=Reason.DRAINING)
        wait = self.load().predicted_wait_s
        service = self._meter.service_s(request.params.max_tokens)
        too_long = wait > MAX_WAIT_S or wait + service > request.deadline - self._clock()
        # Work that was begun elsewhere is not thrown away because of a prediction.
        is_new = request.num_output_tokens == 0
        if (too_long and is_new) or len(self._streams) >= self._max_unfinished:
            raise Overloaded(
                "the queue is longer than this request may wait", retry_after_s=max(wait, 1.0)
            )

    def _post(self, command: Callable[[], list[Progress]]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _deliver(self, events: list[tuple[Request, Event]]) -> None:
        for request, event in events:
            stream = self._streams.get(request)
            if stream is not None:
                stream.put_nowait(event)

    def _fail_all(self, error: MimoError) -> None:
        for request, stream in self._streams.items():
            stream.put_nowait(_failure(request, error))

    async def _watch(self) -> None:
        """Give up on a step that does not end.

        Looks are counted, not time: while the whole process stands still, none is taken.
        """
        seen, num_looks = None, 0
        while self._thread.is_alive():
            await asyncio.sleep(WATCH_S)
            num_looks = num_looks + 1 if self._round is seen is not None else 0
            seen = self._round
            if num_looks * WATCH_S >= self._max_step_s:
                reason = f"a step of the engine did not end in {self._max_step_s:g} s"
                logger.error(reason)
                self.give_up(reason)
                return self._on_failure(reason)

    def _report_failure(self, reason: str) -> None:
        self._fail_all(Unavailable(reason))
        self._on_failure(reason)

    # ── in the engine thread ──

    def _run(self) -> None:
        try:
            is_busy = False
            while (commands := self._next_commands(is_busy)) is not None:
                self._round = commands
                progress = [p for command in commands for p in command()]
                progress += self._core.expire(self._clock())
                is_busy = self._step(progress)
                self._round = None
        except BaseException as error:
            logger.exception("the engine thread died")
            reason = "the engine stopped on an error; the log says which"
            if isinstance(error, RankLost):
                reason = str(error)
            self._loop.call_soon_threadsafe(self._report_failure, reason)

    def _next_commands(self, is_busy: bool) -> list[Callable[[], list[Progress]]] | None:
        """What arrived since the last step; waits while there is nothing to do. None: stop."""
        with self._wake:
            if not (is_busy or self._inbox or self._stopping):
                left = self._core.next_deadline() - self._clock()
                self._wake.wait(None if math.isinf(left) else max(left, 0.0))
            if self._stopping:
                return None
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _step(self, ended: list[Progress]) -> bool:
        """Run one step and report it. Whether there may be more to run at once."""
        began = self._clock()
        step = self._core.step()
        now = self._clock()
        events: list[tuple[Request, Event]] = []
        for scheduled in step.plan.scheduled:
            timing = scheduled.request.timing
            if not scheduled.is_decode:
                timing.prefill_s += now - began
            if timing.admitted is None:
                timing.admitted = began
                self._meter.record_admission(scheduled.request)
                events.append((scheduled.request, Admitted()))
        for progress in step.progress:
            if progress.tokens and progress.request.timing.first_token is None:
                progress.request.timing.first_token = now
        events += [(progress.request, progress) for progress in (*ended, *step.progress)]
        self._meter.record_step(self._core.scheduler, step, now - began)
        self._meter.record_ends(ended)
        if events:
            self._loop.call_soon_threadsafe(self._deliver, events)
        return bool(step.plan.scheduled or step.plan.preempted)

    def _add(self, request: Request) -> list[Progress]:
        reason = request.finish_reason  # a resumed request may be complete already
        if reason is not None:
            return [Progress(request, finish_reason=reason, first_index=request.num_output_tokens)]
        self._core.add(request)
        return []

    def _abort(self, request: Request) -> list[Progress]:
        if self._core.is_unfinished(request):
            self._core.remove(request)
            self._meter.record_abort()
        return []

    def _supply(self, request: Request, item_index: int, rows: Any) -> list[Progress]:
        request.item_rows[item_index] = rows
        request.pending_items.discard(item_index)
        return []


def _failure(request: Request, error: MimoError) -> Progress:
    return Progress(request, finish_reason=FinishReason.ERROR, error=error)
