"""One route of the REST face: its call is counted and logged, its errors become answers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.metering import CallMeter
from mimo.errors import Cancelled, Internal
from mimo.rpc.status import from_exception

Handler = Callable[[Request], Awaitable[Response]]
Admit = Callable[[Request], AbstractContextManager[Any]]

logger = logging.getLogger(__name__)


class Endpoint:
    """Runs a handler and sends its response. What either raises is answered unless an answer has
    begun: a stream tells its reader itself how it failed.

    ``admit`` looks at the head of a request alone and may refuse it; what it gives is the request's
    ``state.place`` until the answer is over.
    """

    def __init__(
        self, meter: CallMeter, method: str, handler: Handler, admit: Admit = nullcontext
    ) -> None:
        self._meter = meter
        self._method = method
        self._handler = handler
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        began = time.monotonic()
        code = "OK"
        request = Request(scope, receive)
        try:
            with self._meter.call(self._method), self._admit(request) as place:
                request.state.place = place
                response = await self._handler(request)
                await response(scope, receive, watched)
        except asyncio.CancelledError:
            code = Cancelled.code
            raise
        except Exception as error:
            translated = from_exception(error)
            code = translated.code
            if isinstance(translated, Internal):
                logger.error("call failed", extra={"method": self._method}, exc_info=error)
            if not started:
                answer = error_response(translated, scope["state"]["request_id"])
                await answer(scope, receive, send)
        finally:
            seconds = round(time.monotonic() - began, 4)
            extra = {"method": self._method, "code": code, "seconds": seconds}
            logger.info("call", extra=extra)
