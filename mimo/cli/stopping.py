"""Running a command's coroutine so that SIGTERM and Ctrl-C unwind it cleanly."""

import asyncio
import signal
from collections.abc import Callable, Coroutine

import typer


def run_until_signal(body: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run ``body`` to its end; a signal cancels it, its ``finally`` blocks run, exit status 130."""
    if not asyncio.run(_run(body)):
        raise typer.Exit(130)


async def _run(body: Callable[[], Coroutine[None, None, None]]) -> bool:
    task = asyncio.create_task(body())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _cancel_once, task)
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True


def _cancel_once(task: asyncio.Task[None]) -> None:
    """A second signal must not cut the clean-up of the first one short."""
    if not task.cancelling():
        task.cancel()
