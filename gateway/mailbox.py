"""Events on their way from the tasks that work for a request to the one that answers it."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class Mailbox(Generic[EventT]):
    """Bounded, with one reader, who takes all that there is at once: who falls behind has less to
    do for each event, not more."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._events: list[EventT] = []
        self._is_over = False
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()

    async def put(self, event: EventT) -> None:
        """Waits while the box is full."""
        while len(self._events) >= self._size:
            room = asyncio.get_running_loop().create_future()
            self._writers.append(room)
            await room
        self._events.append(event)
        self._wake_reader()

    def end(self) -> None:
        """Nothing follows."""
        self._is_over = True
        self._wake_reader()

    async def take(self) -> list[EventT]:
        """Everything that has come since the last time; nothing once it is over."""
        if not self._events and not self._is_over:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        taken, self._events = self._events, []
        while self._writers:
            room = self._writers.popleft()
            if not room.done():
                room.set_result(None)
        return taken

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
