"""Callers of this process that want the same embedding share one flight: one encode, one upload."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from mimo.batching import Slot
from mimo.errors import DeadlineExceeded
from mimo.tensor import Assembler, Chunk, RawTensor

ProductT = TypeVar("ProductT")


class Flight:
    """One piece of work and those who wait for it, as the work sees them.

    Every waiter brings an upload, and none is read until the work asks for the payload. Then the
    first waiter's is; should that waiter leave or its upload break or stall, the next one's.
    """

    def __init__(self, stall_s: float) -> None:
        self.num_waiters = 0
        self.deadline = -math.inf  # the latest of the waiters' deadlines
        self._stall_s = stall_s
        self._slot: Slot[Any, Any] | None = None
        self._payload: asyncio.Future[RawTensor] = asyncio.get_running_loop().create_future()
        self._is_wanted = asyncio.Event()
        self._turn = asyncio.Lock()

    def watch(self, slot: Slot[Any, Any]) -> None:
        """Move the slot's deadline whenever a patient waiter joins."""
        self._slot = slot

    async def payload(self) -> RawTensor:
        """Ask for the payload and wait for it."""
        self._is_wanted.set()
        return await self._payload

    def join(self, deadline: float) -> None:
        self.num_waiters += 1
        self.deadline = max(deadline, self.deadline)
        if self._slot is not None:
            self._slot.deadline = self.deadline

    async def upload(
        self, new_assembler: Callable[[], Assembler], chunks: AsyncIterator[Chunk]
    ) -> None:
        """Read one waiter's upload if and when it is needed. Raises what is wrong with it."""
        await self._is_wanted.wait()
        async with self._turn:
            if self._payload.done():
                return
            payload = await receive(new_assembler(), chunks, self._stall_s)
            if not self._payload.done():
                self._payload.set_result(payload)


class SingleFlight(Generic[ProductT]):
    """At most one flight per name. A flight is cancelled only when its last waiter leaves.

    ``stall_s`` is how long an upload that is needed may pause.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._flights: dict[Hashable, tuple[Flight, asyncio.Task[ProductT]]] = {}

    async def fly(
        self,
        name: Hashable,
        work: Callable[[Flight], Coroutine[Any, Any, ProductT]],
        new_assembler: Callable[[], Assembler],
        chunks: AsyncIterator[Chunk],
        deadline: float,
    ) -> tuple[ProductT, bool]:
        """Start ``work``, or join the flight of that name. Returns its product and whether joined.

        May return before ``chunks`` is exhausted. Raises what the work raised, or what is wrong
        with this caller's own upload while no product exists.
        """
        joined = name in self._flights
        flight, task = self._flights.get(name) or self._start(name, work)
        flight.join(deadline)
        upload = asyncio.create_task(flight.upload(new_assembler, chunks))
        try:
            await asyncio.wait({task, upload}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                upload.result()
                await asyncio.wait({task})
            return task.result(), joined
        finally:
            flight.num_waiters -= 1
            if flight.num_waiters == 0 and not task.done():
                self._forget(name, task)
                task.cancel()
            upload.cancel()
            await asyncio.wait({upload})
            _retrieve(upload)

    def _start(
        self, name: Hashable, work: Callable[[Flight], Coroutine[Any, Any, ProductT]]
    ) -> tuple[Flight, asyncio.Task[ProductT]]:
        flight = Flight(self._stall_s)
        task = asyncio.create_task(work(flight))
        self._flights[name] = flight, task
        task.add_done_callback(lambda task: self._forget(name, task))
        return flight, task

    def _forget(self, name: Hashable, task: asyncio.Task[ProductT]) -> None:
        if name in self._flights and self._flights[name][1] is task:
            del self._flights[name]
        if task.done():
            _retrieve(task)


async def receive(assembler: Assembler, chunks: AsyncIterator[Chunk], stall_s: float) -> RawTensor:
    """One upload. Raises what is wrong with it, and DeadlineExceeded when it pauses too long: a
    caller that sends nothing holds up the queue and all who wait with it."""
    try:
        while not assembler.is_complete:
            async with asyncio.timeout(stall_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            assembler.add(chunk)
    except TimeoutError as error:
        raise DeadlineExceeded(f"no chunk within {stall_s:g} s") from error
    return assembler.finish()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take note of an exception that nobody is left to hear of, or asyncio complains."""
    if not task.cancelled():
        task.exception()
