"""Pages of other origins that may read our answers. None, unless listed."""

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ALLOWED_HEADERS = re.compile(
    r"authorization|content-type|idempotency-key|x-request-(id|timeout-ms)|x-stainless-[\w-]+",
    re.ASCII | re.IGNORECASE,
)
_EXPOSED_HEADERS = "x-request-id, x-ignored-params, retry-after"
_MAX_AGE_S = 600


class Cors:
    """Answers preflights of the listed origins and marks answers to them as readable."""

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin not in self._origins or origin is None:
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await Response(None, 204, self._preflight(headers, origin))(scope, receive, send)
            return

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["access-control-allow-origin"] = origin
                answer["access-control-expose-headers"] = _EXPOSED_HEADERS
                answer.add_vary_header("origin")
            await send(message)

        await self._app(scope, receive, send_readable)

    def _preflight(self, headers: Headers, origin: str) -> dict[str, str]:
        wanted = headers.get("access-control-request-headers", "").split(",")
        allowed = [name.strip() for name in wanted if _ALLOWED_HEADERS.fullmatch(name.strip())]
        answer = {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": ", ".join(allowed),
            "access-control-max-age": str(_MAX_AGE_S),
            "vary": "origin",
        }
        if headers.get("access-control-request-private-network") == "true":
            answer["access-control-allow-private-network"] = "true"
        return answer
