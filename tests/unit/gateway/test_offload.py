"""Work that grows with what clients send, and the threads that it takes."""

import asyncio
import threading

from gateway.offload import LONG, offload

MOST = 10
MANY = 64  # more than there are threads of any kind


async def test_little_work_is_done_at_once() -> None:
    assert await offload(MOST, MOST, threading.current_thread) is threading.current_thread()


async def test_long_work_leaves_threads_to_the_rest() -> None:
    end = threading.Event()
    long = [asyncio.create_task(offload(LONG * MOST + 1, MOST, end.wait)) for _ in range(MANY)]
    await asyncio.sleep(0)  # all of it is under way, or waits for a thread
    try:
        async with asyncio.timeout(30):
            thread = await offload(MOST + 1, MOST, threading.current_thread)
    finally:
        end.set()
        assert all(await asyncio.gather(*long))
    assert thread is not threading.current_thread()
