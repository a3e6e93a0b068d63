"""What every answer carries in its header, an error's included."""

from importlib.metadata import version

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mimo.logs import bind_request_id
from mimo.rpc.interceptors import REQUEST_ID_KEY, request_id_or_new


class CommonHeaders:
    """Gives every request its id, echoes it, and adds what keeps browsers careful."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = {
            "x-mimo-version": version("mimo-serve"),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_or_new(Headers(scope=scope).get(REQUEST_ID_KEY, ""))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update({REQUEST_ID_KEY: request_id, **self._headers})
                headers.setdefault("cache-control", "no-store")
            await send(message)

        with bind_request_id(request_id):
            await self._app(scope, receive, send_with_headers)
