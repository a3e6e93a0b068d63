"""A request stream that uploads one tensor: a start, then chunks."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal, Protocol, TypeVar

from mimo.errors import InvalidRequest, Reason
from mimo.rpc.tensors import chunk_from_proto
from mimo.tensor import Chunk
from mimo.v1 import tensor_pb2


class StartMessage(Protocol):
    """A request message whose first is a ``start``."""

    def WhichOneof(self, oneof_group: Literal["message"]) -> str | None: ...


class ChunkMessage(StartMessage, Protocol):
    """A request message that is a ``start`` or a ``chunk``."""

    @property
    def chunk(self) -> tensor_pb2.TensorChunk: ...


MessageT = TypeVar("MessageT", bound=StartMessage)


async def read_start(messages: AsyncIterator[MessageT]) -> MessageT:
    """The first message. Raises InvalidRequest unless it is a ``start``."""
    message = await anext(messages, None)
    if message is None or message.WhichOneof("message") != "start":
        raise InvalidRequest(
            "the first message must be a start", reason=Reason.MISSING_FIELD, field="start"
        )
    return message


async def read_chunks(messages: AsyncIterator[ChunkMessage]) -> AsyncGenerator[Chunk, None]:
    """What follows the start. Raises InvalidRequest for anything but chunks."""
    async for message in messages:
        if message.WhichOneof("message") != "chunk":
            raise InvalidRequest("only chunks may follow the start of an upload", field="message")
        yield chunk_from_proto(message.chunk)
