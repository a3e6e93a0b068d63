"""What happens around every call of ours: request id, errors, in-flight accounting, draining.

A caller that streams is heard out before its call ends; ``mimo.rpc.incoming`` says why. Only
``/mimo.`` methods are touched: the health service answers Watch as a coroutine that writes to
its context, so a stream guard around it would break every probe that watches.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from mimo.errors import Cancelled, Internal, MimoError, Reason, Unavailable
from mimo.logs import bind_request_id
from mimo.rpc.incoming import Incoming
from mimo.rpc.status import abort, from_exception

REQUEST_ID_KEY = "x-request-id"

logger = logging.getLogger(__name__)

_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

# Streams that last as long as the peer lives: they neither hold up a drain nor are refused by it.
_WATCHES = frozenset({"/mimo.v1.Replica/WatchLoad", "/mimo.v1.Replica/Describe"})


def request_id_or_new(given: str) -> str:
    """The id a client chose, or one of ours when it is none."""
    return given if _VALID_REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(13)}"


class DrainGate:
    """Counts calls in flight and, once closed, refuses new ones so that the last can finish."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def enter(self) -> None:
        """Raises Unavailable (DRAINING) once the gate is closed."""
        if self.draining:
            raise Unavailable("this replica is draining", reason=Reason.DRAINING)
        self._in_flight += 1
        self._is_empty.clear()

    def leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._is_empty.set()

    async def close_and_wait(self, seconds: float) -> int:
        """Refuse new calls; wait for the running ones. Returns how many were still running."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._is_empty.wait()
        except TimeoutError:
            logger.warning("drain time is over", extra={"in_flight": self._in_flight})
        return self._in_flight


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Binds the request id, translates errors and keeps the gate, for every ``/mimo.`` method."""

    def __init__(self, gate: DrainGate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith("/mimo."):
            return handler
        request_id = _request_id(handler_call_details.invocation_metadata)
        gate = None if method in _WATCHES else self._gate
        call = _Call(method, request_id, gate, is_upload=handler.request_streaming)
        wrap: dict[tuple[bool, bool], tuple[Callable[..., Any], str, Callable[[Any], Any]]] = {
            (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary", call.unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream", call.stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary", call.unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream", call.stream),
        }
        build, attribute, guard = wrap[handler.request_streaming, handler.response_streaming]
        return build(
            guard(getattr(handler, attribute)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class _Call:
    """Guards one call's handler. ``is_upload``: the caller sends a stream."""

    def __init__(
        self, method: str, request_id: str, gate: DrainGate | None, *, is_upload: bool
    ) -> None:
        self._method = method
        self._request_id = request_id
        self._gate = gate
        self._is_upload = is_upload
        self._code = ""

    def unary(self, handler: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def guarded(request: Any, context: Any) -> Any:
            with bind_request_id(self._request_id), self._logged():
                try:
                    async with self._admitted(request) as received:
                        await self._greet(context)
                        return await handler(received, context)
                except (Exception, asyncio.CancelledError) as error:
                    await self._fail(context, error)

        return guarded

    def stream(self, handler: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Any:
        async def guarded(request: Any, context: Any) -> AsyncGenerator[Any, None]:
            with bind_request_id(self._request_id), self._logged():
                try:
                    async with self._admitted(request) as received:
                        await self._greet(context)
                        async with contextlib.aclosing(handler(received, context)) as responses:
                            async for response in responses:
                                yield response
                except (Exception, asyncio.CancelledError) as error:
                    await self._fail(context, error)

        return guarded

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """One line a call, so that its request id leads through every process it touched."""
        if self._gate is None:
            yield
            return
        began = time.monotonic()
        self._code = "OK"
        try:
            yield
        except asyncio.CancelledError:
            self._code = Cancelled.code
            raise
        finally:
            seconds = round(time.monotonic() - began, 4)
            extra = {"method": self._method, "code": self._code, "seconds": seconds}
            logger.info("call", extra=extra)

    @contextlib.asynccontextmanager
    async def _admitted(self, request: Any) -> AsyncIterator[Any]:
        """What the handler receives, once the gate is passed.

        A caller that streams is heard out before its call ends, also when it is refused.
        """
        received = Incoming(request) if self._is_upload else contextlib.nullcontext(request)
        try:
            if self._gate is not None:
                self._gate.enter()
        except Unavailable:
            async with received:
                raise
        try:
            async with received as stream_or_message:
                yield stream_or_message
        finally:
            if self._gate is not None:
                self._gate.leave()

    async def _greet(self, context: Any) -> None:
        await context.send_initial_metadata(((REQUEST_ID_KEY, self._request_id),))

    async def _fail(self, context: Any, error: BaseException) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error  # the handler has already answered
        if isinstance(error, asyncio.CancelledError):
            raise error  # the peer is gone; nothing can be answered
        translated = from_exception(error)
        self._code = translated.code
        if isinstance(translated, Internal):
            logger.error("call failed", extra={"method": self._method}, exc_info=error)
        await abort(context, _with_request_id(translated, self._request_id))


def _with_request_id(error: MimoError, request_id: str) -> MimoError:
    error.metadata.setdefault("request_id", request_id)
    return error


def _request_id(metadata: Any) -> str:
    given = next((value for key, value in metadata or () if key == REQUEST_ID_KEY), "")
    return request_id_or_new(str(given))
