"""Server-sent events the way the OpenAI clients read them.

One ``data:`` line per event, nothing but that: an ``event:``, ``id:`` or ``retry:`` line breaks at
least one of the common clients. A keep-alive is a comment with a single line feed.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.errors import error_object
from mimo.errors import Cancelled, MimoError
from mimo.rpc.status import from_exception

KEEP_ALIVE = b": ka\n"
DONE = b"data: [DONE]\n\n"

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

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
    return b"data: " + _JSON.encode(payload).encode() + b"\n\n"


class EventStream(Response):
    """An answer in events. ``chunks`` come in batches that are sent together; it is closed in the
    end, whatever happens.

    The status line is sent with the first chunk, or after a while: what fails before is raised and
    can still become a real HTTP error. What fails later becomes an error event, so that a stream
    never ends as if it were complete when it is not, and is raised as well.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Sequence[Mapping[str, Any]], None],
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
        with _Wire(send, self.raw_headers, self._patience) as wire:
            try:
                async with aclosing(self._chunks) as batches:
                    async for batch in batches:
                        await wire.send(b"".join(map(frame, batch)))
            except Exception as error:
                if wire.has_begun:
                    failure = frame(self._error(from_exception(error)))
                    await wire.send(failure + DONE, more=False)
                raise
            await wire.send(DONE, more=False)

    def _error(self, error: MimoError) -> dict[str, object]:
        body = error_object(error, self._request_id)
        return {"error": {**body["error"], "request_id": self._request_id}}


class _Wire:
    """The sending side of a stream. Inside ``with``, a timer sees to it that the stream is never
    silent for long and that its reader reads: one timer, not one for each message."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], patience: Patience) -> None:
        self.has_begun = False
        self._send = send
        self._headers = headers
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._owner = asyncio.current_task()
        self._since = self._loop.time()  # of the silence, or of the message that is being sent
        self._num_sending = 0
        self._is_stuck = False
        self._keep_alive: asyncio.Task[None] | None = None
        self._interval_s = min(patience.keep_alive_s, patience.reader_s)
        self._timer = self._loop.call_later(min(patience.hold_s, self._interval_s), self._look)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raises Cancelled for a reader that does not read; the connection is then broken off."""
        self._timer.cancel()
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if self._is_stuck and kind is asyncio.CancelledError and self._owner is not None:
            self._owner.uncancel()
            raise Cancelled("the client reads too slowly") from None

    async def send(self, data: bytes, *, more: bool = True) -> None:
        self._num_sending += 1
        if self._keep_alive is not None:  # still on its way
            await asyncio.wait({self._keep_alive})
        await self._pass_on(data, more=more)

    async def _pass_on(self, data: bytes, *, more: bool = True) -> None:
        """Send a message that has been counted."""
        self._since = self._loop.time()
        if not self.has_begun:
            self.has_begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._since = self._loop.time()
        self._num_sending -= 1
        self._keep_alive = None

    def _look(self) -> None:
        """Is it time to say something, or to give the reader up? Look again when it may be."""
        now, patience = self._loop.time(), self._patience
        if self._num_sending:
            due = self._since + patience.reader_s
            if now >= due and self._owner is not None:
                self._is_stuck = True
                self._owner.cancel()
                return
        else:
            silence_s = patience.keep_alive_s if self.has_begun else patience.hold_s
            due = self._since + silence_s
            if now >= due:
                self._num_sending += 1
                self._keep_alive = self._loop.create_task(self._pass_on(KEEP_ALIVE))
        self._timer = self._loop.call_at(min(due, now + self._interval_s), self._look)
