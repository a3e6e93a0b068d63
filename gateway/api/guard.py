"""Who may come in: known hosts and origins, as long as we are not draining and have room."""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.errors import error_response, plain_error
from gateway.held import HeldBytes
from mimo.errors import Unavailable
from mimo.rpc.interceptors import DrainGate

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})

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
        memory: HeldBytes | None = None,
    ) -> None:
        self._app = app
        self._gate = gate
        self._hosts = hosts
        self._origins = origins
        self._memory = memory or HeldBytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _HEALTH_PATHS:
            await self._app(scope, receive, send)
            return
        if foreign := self._foreign(Headers(scope=scope)):
            refusal = plain_error(403, foreign, "permission_denied")
            await refusal(scope, receive, send)
            return
        try:
            self._gate.enter()
        except Unavailable as error:
            await error_response(error, scope["state"]["request_id"])(scope, receive, send)
            return
        try:
            with self._memory.holding() as hold:

                async def counted() -> Message:
                    message = await receive()
                    hold(len(message.get("body", b"")))
                    return message

                await self._app(scope, counted, send)
        finally:
            self._gate.leave()

    def _foreign(self, headers: Headers) -> str:
        """Why the sender may not come in, and the option that would let it; else nothing."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if "*" in self._hosts:
            return ""
        if not self._is_known(host):
            return f"host {host[:80]!r} is not allowed: it is not among the gateway's --hosts"
        if origin is None or origin in self._origins or self._is_known(origin.partition("://")[2]):
            return ""
        return (
            f"origin {origin[:80]!r} is not allowed: it is not among the gateway's --cors-origins"
        )

    def _is_known(self, name: str) -> bool:
        return _PORT.sub("", name).lower() in self._hosts
