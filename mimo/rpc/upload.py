"""The request stream of a call that uploads one tensor: a start, then chunks.

A call must not end while its caller is still writing: with grpc.aio the blocked write fails first,
and the caller sees INTERNAL instead of the status that was sent. Whoever answers or refuses early
therefore reads on, and throws away what comes, until the caller stops.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Generic, Literal, Protocol, Self, TypeVar

from mimo.errors import InvalidRequest, Reason
from mimo.rpc.tensors import chunk_from_proto
from mimo.tensor import Chunk
from mimo.v1 import tensor_pb2

# A caller that neither sends nor half-closes for so long is not writing, and can be answered.
QUIET_S = 1.0


class UploadMessage(Protocol):
    """A request message that is a ``start`` or a ``chunk``."""

    @property
    def chunk(self) -> tensor_pb2.TensorChunk: ...

    def WhichOneof(self, oneof_group: Literal["message"]) -> str | None: ...


MessageT = TypeVar("MessageT", bound=UploadMessage)


class Upload(Generic[MessageT]):
    """Reads an upload inside ``async with``, and reads it to its end when the block is left."""

    def __init__(self, messages: AsyncIterator[MessageT]) -> None:
        self._messages = messages
        self._read: asyncio.Task[MessageT | None] | None = None

    async def start(self) -> MessageT:
        """The first message. Raises InvalidRequest unless it is a ``start``."""
        message = await self._next()
        if message is None or message.WhichOneof("message") != "start":
            raise InvalidRequest(
                "the first message must be a start", reason=Reason.MISSING_FIELD, field="start"
            )
        return message

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """What follows the start. Raises InvalidRequest for anything but chunks."""
        while (message := await self._next()) is not None:
            if message.WhichOneof("message") != "chunk":
                raise InvalidRequest("only chunks may follow the start of an upload")
            yield chunk_from_proto(message.chunk)

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

    async def _next(self) -> MessageT | None:
        """The next message, None at the end.

        A reader that gives up leaves its read to the next one: a stream whose read was cancelled
        cannot be read again.
        """
        if self._read is None:
            self._read = asyncio.create_task(self._receive())
        message = await asyncio.shield(self._read)
        self._read = None
        return message

    async def _receive(self) -> MessageT | None:
        return await anext(aiter(self._messages), None)

    async def _discard(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(QUIET_S):
                    if await self._next() is None:
                        return

    async def _stop_reading(self) -> None:
        if self._read is not None:
            self._read.cancel()
            await asyncio.gather(self._read, return_exceptions=True)
