"""Batches for one device: what is queued while it is busy becomes the next batch.

Work is measured in the caller's unit (patches, seconds, tokens). The queue is bounded: work that
does not fit, or cannot be done by its deadline, is refused at once and told when to come back.
The device is driven from one thread of its own, one batch at a time.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from mimo.errors import DeadlineExceeded, Internal, Overloaded, Reason, Unavailable

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica says about itself. All in units of work and seconds."""

    queued_work: float
    running_work: float
    work_per_second: float | None  # None until something was measured
    predicted_wait_s: float


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that has run, for metrics."""

    num_items: int
    work: float
    fill: float  # work over the budget of one batch
    busy_s: float


@dataclass(frozen=True, slots=True)
class Done(Generic[ResultT]):
    """An item's result, how long it waited, and its share of the device's time."""

    value: ResultT
    queue_s: float
    device_s: float


class Batcher(Generic[ItemT, ResultT]):
    """Calls ``run`` with batches of at most ``max_cost`` work and ``max_items`` items.

    An item that alone exceeds ``max_cost`` runs alone. What waits is bounded in work, in number and
    in bytes: a large picture may be little work. With ``max_wait_s`` an idle device waits so
    long for company; by default it starts at once, and batches form only while it is busy.
    ``work_per_second`` is the rate measured at start, if it was.

    An error of type ``fatal`` says that the device is broken: its batch and all that waits end as
    Unavailable, nothing runs any more, and ``on_failure`` is told why.
    """

    def __init__(
        self,
        run: Callable[[Sequence[ItemT]], Sequence[ResultT]],
        *,
        max_cost: float,
        max_items: int,
        max_queued_cost: float,
        max_queued_items: int = 4096,
        max_queued_bytes: int = 1 << 30,
        max_wait_s: float = 0.0,
        work_per_second: float | None = None,
        on_batch: Callable[[Batch], None] | None = None,
        fatal: tuple[type[Exception], ...] = (),
        on_failure: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
        thread_name: str = "device",
    ) -> None:
        self._run = run
        self._max_cost = max_cost
        self._max_items = max_items
        self._max_queued_cost = max_queued_cost
        self._max_queued_items = max_queued_items
        self._max_queued_bytes = max_queued_bytes
        self._max_wait_s = max_wait_s
        self._on_batch = on_batch
        self._fatal = fatal
        self._on_failure = on_failure
        self._clock = clock
        self._rate = _Rate(work_per_second)
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._admitted: set[Slot[ItemT, ResultT]] = set()  # not yet on the device
        self._queue: deque[Slot[ItemT, ResultT]] = deque()  # those of them that have their item
        self._running: list[Slot[ItemT, ResultT]] = []
        self._arrived = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None
        self._closed = False

    @contextmanager
    def admit(
        self, cost: float, deadline: float = math.inf, num_bytes: int = 0
    ) -> Iterator["Slot[ItemT, ResultT]"]:
        """Reserve room in the queue, so that an upload is refused before it starts, not after.

        Raises Overloaded, with a time to retry after, when the queue is full or the deadline (on
        ``clock``) would pass before the item's turn; Unavailable once closed.
        """
        if self._closed:
            raise Unavailable("shutting down", reason=Reason.DRAINING)
        load = self.load
        # An empty queue takes anything: an item larger than the queue must run some time.
        is_full = bool(self._admitted) and (
            load.queued_work + cost > self._max_queued_cost
            or len(self._admitted) >= self._max_queued_items
            or sum(slot.num_bytes for slot in self._admitted) + num_bytes > self._max_queued_bytes
        )
        is_late = self._clock() + load.predicted_wait_s > deadline
        if is_full or is_late:
            raise Overloaded(
                "the queue is full" if is_full else "the queue is longer than the deadline allows",
                retry_after_s=min(max(load.predicted_wait_s, 0.1), 30.0),
            )
        slot: Slot[ItemT, ResultT] = Slot(self, cost, deadline, num_bytes)
        self._admitted.add(slot)
        try:
            yield slot
        finally:
            self._admitted.discard(slot)

    @property
    def load(self) -> Load:
        queued = sum(slot.cost for slot in self._admitted)
        running = sum(slot.cost for slot in self._running)
        rate = self._rate.work_per_second
        wait_s = 0.0
        if rate:
            elapsed = self._clock() - self._running[0].started if self._running else 0.0
            wait_s = max(0.0, running / rate - elapsed) + queued / rate
        return Load(queued, running, rate, wait_s)

    async def close(self) -> None:
        """Refuse what waits, let the running batch end, and stop the thread."""
        self._closed = True
        self._arrived.set()
        if self._dispatcher is not None:
            await self._dispatcher
        self._device.shutdown()

    async def _enqueue(self, slot: "Slot[ItemT, ResultT]") -> Done[ResultT]:
        if self._closed:
            raise Unavailable("shutting down", reason=Reason.DRAINING)
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch())
        slot.queued = self._clock()
        self._queue.append(slot)
        self._arrived.set()
        return await slot.done  # cancelled with its waiter; the dispatcher then skips it

    async def _dispatch(self) -> None:
        try:
            while not self._closed:
                if self._queue and self._max_wait_s:
                    await self._gather()
                if batch := self._take():
                    await self._execute(batch)
                else:
                    self._arrived.clear()
                    await self._arrived.wait()
        finally:  # however it ends, nobody may wait for a batch that never comes
            self._closed = True
            for slot in self._queue:
                slot.fail(Unavailable("shutting down", reason=Reason.DRAINING))

    async def _gather(self) -> None:
        """Wait for a full batch, but not longer than the oldest item allows."""
        try:
            async with asyncio.timeout(self._max_wait_s):
                while not self._closed and not self._is_batch_full:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return

    @property
    def _is_batch_full(self) -> bool:
        waiting = [slot.cost for slot in self._queue if not slot.done.done()]
        return len(waiting) >= self._max_items or sum(waiting) >= self._max_cost

    def _take(self) -> list["Slot[ItemT, ResultT]"]:
        """The next batch in order of arrival, without items that nobody awaits or that expired."""
        batch: list[Slot[ItemT, ResultT]] = []
        cost = 0.0
        now = self._clock()
        while self._queue:
            slot = self._queue[0]
            if slot.deadline <= now:
                slot.fail(DeadlineExceeded("the deadline passed while the item was queued"))
            if not slot.done.done():
                over = cost + slot.cost > self._max_cost or len(batch) >= self._max_items
                if batch and over:
                    break
                batch.append(slot)
                cost += slot.cost
            self._queue.popleft()
        return batch

    async def _execute(self, batch: list["Slot[ItemT, ResultT]"]) -> None:
        started = self._clock()
        for slot in batch:
            slot.started = started
        self._running = batch
        self._admitted.difference_update(batch)
        loop = asyncio.get_running_loop()
        try:
            items = [slot.item for slot in batch]
            results = await loop.run_in_executor(self._device, self._run_isolated, items)
        finally:
            self._running = []
        if broken := next((r for r in results if isinstance(r, self._fatal)), None):
            return self._give_up(batch, broken)
        busy_s = self._clock() - started
        work = sum(slot.cost for slot in batch)
        for slot, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                slot.fail(result)
            else:
                share = slot.cost / work if work else 1 / len(batch)
                slot.succeed(Done(result, started - slot.queued, busy_s * share))
        fill = work / self._max_cost
        self._rate.record(work, busy_s, fill)
        if self._on_batch is not None:
            self._on_batch(Batch(len(batch), work, fill, busy_s))

    def _give_up(self, batch: list["Slot[ItemT, ResultT]"], error: Exception) -> None:
        logger.error("the device is broken", exc_info=error)
        self._closed = True
        for slot in batch:
            slot.fail(Unavailable("the device is broken"))
        self._on_failure("the device is broken; the log says how")

    def _run_isolated(self, items: list[ItemT]) -> Sequence[ResultT | Exception]:
        """Runs in the device thread. A batch that fails is run again one by one: one bad item must
        not fail its neighbours."""
        try:
            results = self._run(items)
            if len(results) != len(items):
                raise Internal(f"{len(results)} results for a batch of {len(items)}")
            return results
        except Exception as error:
            if len(items) == 1 or isinstance(error, self._fatal):
                return [error] * len(items)
            return [self._run_isolated([item])[0] for item in items]


class Slot(Generic[ItemT, ResultT]):
    """Room in the queue for one item. ``deadline`` may be moved while the item waits."""

    def __init__(
        self, batcher: Batcher[ItemT, ResultT], cost: float, deadline: float, num_bytes: int
    ) -> None:
        self.cost = cost
        self.deadline = deadline
        self.num_bytes = num_bytes
        self.queued = 0.0
        self.started = 0.0
        self.item: ItemT
        self.done: asyncio.Future[Done[ResultT]] = asyncio.get_running_loop().create_future()
        self._batcher = batcher

    async def run(self, item: ItemT) -> Done[ResultT]:
        """Queue the item and wait for its result. Raises what ``run`` raised, DeadlineExceeded when
        it expired before its turn, Unavailable when the batcher closed."""
        self.item = item
        return await self._batcher._enqueue(self)

    def succeed(self, done: Done[ResultT]) -> None:
        if not self.done.done():
            self.done.set_result(done)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Rate:
    """Work per second while busy. Wall time would make an idle device look slow.

    A measured start value is only refined, within half and one and a half times, by batches that
    are more than half full; without one every batch counts, the first ones most.
    """

    ALPHA = 0.05

    def __init__(self, start: float | None) -> None:
        self.work_per_second = start
        self._start = start
        self._num_batches = 0

    def record(self, work: float, busy_s: float, fill: float) -> None:
        if busy_s <= 0 or work <= 0 or (self._start is not None and fill <= 0.5):
            return
        self._num_batches += 1
        measured = work / busy_s
        if self.work_per_second is None:
            self.work_per_second = measured
            return
        alpha = self.ALPHA if self._start is not None else max(self.ALPHA, 1 / self._num_batches)
        rate = self.work_per_second + alpha * (measured - self.work_per_second)
        if self._start is not None:
            rate = min(max(rate, 0.5 * self._start), 1.5 * self._start)
        self.work_per_second = rate
