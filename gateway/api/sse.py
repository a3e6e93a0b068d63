"""Server-sent events the way the OpenAI clients read them.

One ``data:`` line per event, nothing but that: an ``event:``, ``id:`` or ``retry:`` line breaks at
least one of the common clients. A keep-alive is a comment with a single line feed.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.errors import error_object
from mimo.errors import Cancelled, MimoError
from mimo.rpc.status import from_exception

KEEP_ALIVE = b": ka\n"
DONE = b"data: [DONE]\n\n"

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: how long a status line may wait for the first event, how long a stream stays silent,
    how long a reader may take to take what was sent."""

    hold_s: float = 15.0
    keep_alive_s: float = 10.0
    reader_s: float = 60.0


PATIENCE = Patience()


def frame(payload: Mapping[str, Any]) -> bytes:
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


class EventStream(Response):
    """An answer in events. ``chunks`` is closed in the end, whatever happens.

    The status line is sent with the first chunk, or after a while: what fails before is raised and
    can still become a real HTTP error. What fails later becomes an error event, so that a stream
    never ends as if it were complete when it is not, and is raised as well.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Mapping[str, Any], None],
        request_id: str,
        headers: Mapping[str, str],
        patience: Patience = PATIENCE,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = MutableHeaders({**HEADERS, **headers}).raw
        self._chunks = chunks
        self._request_id = request_id
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Chunks are made in a task of their own: not waiting for one any longer must not cancel it.
        queue: asyncio.Queue[bytes | Exception] = asyncio.Queue(1)
        producer = asyncio.create_task(self._produce(queue))
        try:
            first = await _next(queue, self._patience.hold_s)
            if isinstance(first, Exception):
                raise first
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._relay(first, queue, send)
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    async def _produce(self, queue: "asyncio.Queue[bytes | Exception]") -> None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await queue.put(frame(chunk))
            await queue.put(DONE)
        except Exception as error:
            await queue.put(error)

    async def _relay(
        self, item: bytes | Exception, queue: "asyncio.Queue[bytes | Exception]", send: Send
    ) -> None:
        while not isinstance(item, Exception):
            await self._send(send, item, more=item is not DONE)
            if item is DONE:
                return
            item = await _next(queue, self._patience.keep_alive_s)
        failure = frame(self._error(from_exception(item)))
        await self._send(send, failure + DONE, more=False)
        raise item

    async def _send(self, send: Send, data: bytes, *, more: bool) -> None:
        """Raises Cancelled for a reader that does not read; the connection is then broken off."""
        try:
            async with asyncio.timeout(self._patience.reader_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise Cancelled("the client reads too slowly") from None

    def _error(self, error: MimoError) -> dict[str, object]:
        body = error_object(error, self._request_id)
        return {"error": {**body["error"], "request_id": self._request_id}}


async def _next(queue: "asyncio.Queue[bytes | Exception]", timeout_s: float) -> bytes | Exception:
    """What comes next, or a keep-alive when nothing does for so long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await queue.get()
    except TimeoutError:
        return KEEP_ALIVE
