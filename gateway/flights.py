"""Work that several requests of this process wait for together."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Flight(Generic[ResultT]):
    task: asyncio.Task[ResultT]
    num_waiters: int = 0


class Flights(Generic[ResultT]):
    """At most one flight per name. It is cancelled only when its last waiter leaves, and what it
    raises is raised for all of them."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[ResultT]] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._flights

    async def join(
        self, name: Hashable, work: Callable[[], Coroutine[Any, Any, ResultT]]
    ) -> tuple[ResultT, bool]:
        """The result of the work of that name, started unless it runs; and whether it ran."""
        joined = name in self._flights
        if not joined:
            self._flights[name] = _Flight(asyncio.create_task(work()))
        flight = self._flights[name]
        if not joined:
            flight.task.add_done_callback(lambda _: self._land(name, flight))
        flight.num_waiters += 1
        try:
            return await asyncio.shield(flight.task), joined
        finally:
            flight.num_waiters -= 1
            if flight.num_waiters == 0 and not flight.task.done():
                self._land(name, flight)
                flight.task.cancel()

    def _land(self, name: Hashable, flight: _Flight[ResultT]) -> None:
        if self._flights.get(name) is flight:
            del self._flights[name]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # noted, even if the last waiter has just left
