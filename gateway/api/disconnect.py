"""When the client goes away, so does its work."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CancelOnDisconnect:
    """Cancels the application when its client disconnects: a server alone tells only those who ask,
    and a handler that waits for a decoder does not ask."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.current_task()
        assert work is not None
        watch: asyncio.Task[None] | None = None
        is_gone = False

        async def until_gone() -> None:
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            work.cancel()

        async def watched_receive() -> Message:
            nonlocal watch
            if watch is not None:
                await asyncio.wait({watch})
                return {"type": "http.disconnect"}
            message = await receive()
            if not message.get("more_body", False):
                watch = asyncio.create_task(until_gone())
            return message

        try:
            await self._app(scope, watched_receive, send)
        except asyncio.CancelledError:
            if not is_gone:
                raise
            work.uncancel()
        finally:
            if watch is not None:
                watch.cancel()
