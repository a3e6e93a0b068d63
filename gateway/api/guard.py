"""Who may come in: known hosts and origins, as long as we are not draining and have room."""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.errors import error_response, plain_error
from mimo.errors import Overloaded, Unavailable
from mimo.rpc.interceptors import DrainGate

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
MAX_BODIES_BYTES = 1 << 30

_HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
_PORT = re.compile(r":\d+$")


class Guard:
    """Refuses foreign hosts and origins and, while draining, new work.

    Without authentication a page of another site could talk to a server on loopback through its
    reader's browser (DNS rebinding); checking Host and Origin closes that door. ``hosts`` are names
    without a port; "*" lets everybody in. ``origins`` may call from a browser besides.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: DrainGate,
        hosts: frozenset[str] = LOCAL_HOSTS,
        origins: frozenset[str] = frozenset(),
        max_bodies_bytes: int = MAX_BODIES_BYTES,
    ) -> None:
        self._app = app
        self._gate = gate
        self._hosts = hosts
        self._origins = origins
        self._max_bodies_bytes = max_bodies_bytes
        self._bodies_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _HEALTH_PATHS:
            await self._app(scope, receive, send)
            return
        if not self._is_allowed(Headers(scope=scope)):
            refusal = plain_error(403, "this host or origin is not allowed", "permission_denied")
            await refusal(scope, receive, send)
            return
        try:
            await self._gate.enter()
        except Unavailable as error:
            await error_response(error, scope["state"]["request_id"])(scope, receive, send)
            return
        try:
            await self._within_budget(scope, receive, send)
        finally:
            await self._gate.leave()

    def _is_allowed(self, headers: Headers) -> bool:
        if "*" in self._hosts:
            return True
        origin = headers.get("origin")
        names = [headers.get("host", "")]
        if origin is not None and origin not in self._origins:
            names.append(origin.partition("://")[2])
        return all(_PORT.sub("", name).lower() in self._hosts for name in names)

    async def _within_budget(self, scope: Scope, receive: Receive, send: Send) -> None:
        """All bodies in memory together are bounded; one too many is told to come back."""
        held = 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if self._bodies_bytes + size > self._max_bodies_bytes:
                raise Overloaded("too many large requests at once", retry_after_s=1.0)
            held += size
            self._bodies_bytes += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._bodies_bytes -= held
