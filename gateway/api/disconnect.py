"""When the client goes away, so does its work."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CancelOnDisconnect:
    """Cancels the application when its client disconnects: a server alone tells only those who ask,
    and a handler that waits for a decoder does not ask."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body_is_over = asyncio.Event()

        async def watched_receive() -> Message:
            if body_is_over.is_set():
                await asyncio.wait({gone})
                return {"type": "http.disconnect"}
            message = await receive()
            if not message.get("more_body", False):
                body_is_over.set()
            return message

        async def until_gone() -> None:
            await body_is_over.wait()
            while (await receive())["type"] != "http.disconnect":
                pass

        async def answer() -> None:
            await self._app(scope, watched_receive, send)

        gone = asyncio.create_task(until_gone())
        work = asyncio.create_task(answer())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()  # without effect on work that is done
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()
