"""The request stream of a call, which must be read to its end before the call may end.

With grpc.aio a write that is blocked when its call ends fails first, and the caller sees INTERNAL
instead of the status that was sent. Whoever answers or refuses early therefore reads on, and throws
away what comes, until the caller stops or patience is at an end.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Generic, Self, TypeVar

# A caller that neither sends nor half-closes for so long is not writing, and can be answered.
QUIET_S = 1.0

# Nobody is listened to for longer, whatever the caller still has to say.
PATIENCE_S = 10.0

MessageT = TypeVar("MessageT")


class Incoming(AsyncIterator[MessageT], Generic[MessageT]):
    """The messages of a caller inside ``async with``; what is left is read when the block ends.

    A reader that gives up leaves its read to the next one: a stream of grpc.aio whose read was
    cancelled cannot be read again.
    """

    def __init__(self, messages: AsyncIterator[MessageT]) -> None:
        self._messages = messages
        self._read: asyncio.Task[MessageT | None] | None = None

    async def __anext__(self) -> MessageT:
        if self._read is None:
            self._read = asyncio.create_task(self._receive())
        message = await asyncio.shield(self._read)
        self._read = None
        if message is None:
            raise StopAsyncIteration
        return message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None or issubclass(kind, Exception):  # else the caller itself is gone
                await self._discard()
        finally:
            await self._stop_reading()

    async def _receive(self) -> MessageT | None:
        return await anext(aiter(self._messages), None)

    async def _discard(self) -> None:
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with asyncio.timeout(QUIET_S):
                        await anext(self)

    async def _stop_reading(self) -> None:
        if self._read is not None:
            self._read.cancel()
            await asyncio.gather(self._read, return_exceptions=True)
