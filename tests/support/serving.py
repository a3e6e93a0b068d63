"""A service on a real port of this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from mimo.metrics import Metrics
from mimo.rpc.server import ServerConfig, Service, serve

SettingsT = TypeVar("SettingsT", bound=ServerConfig)


@asynccontextmanager
async def serving(
    settings: SettingsT,
    metrics: Metrics,
    service: Callable[[SettingsT, Metrics], AbstractAsyncContextManager[Service]],
) -> AsyncIterator[str]:
    """Load and serve on a free port; gives the address. Drains when the block is left.

    Raises what loading raises.
    """
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(
            settings,
            "127.0.0.1:0",
            metrics,
            lambda: service(settings, metrics),
            stop=stop,
            on_ready=lambda address, _: ready.set_result(address),
        )
    )
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield ready.result()
    finally:
        stop.set()
        await task
