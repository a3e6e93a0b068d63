"""Work that grows with what clients send: done at once when it is little, else in a thread.

Long work waits for threads of its own, so that a few long prompts never keep the rest waiting.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import ParamSpec, TypeVar

FEW_BYTES = 64 << 10  # to decode or digest: about a tenth of a millisecond
LONG = 256  # times what is done at once: some hundred milliseconds of the tokenizer

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


async def offload(
    size: int,
    most: int,
    work: Callable[ParamsT, ResultT],
    *arguments: ParamsT.args,
    **named: ParamsT.kwargs,
) -> ResultT:
    """Its result. Up to a size of ``most`` a thread would take longer than the work itself."""
    if size <= most:
        return work(*arguments, **named)
    if size > LONG * most:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_long_work(), partial(work, *arguments, **named))
    return await asyncio.to_thread(work, *arguments, **named)


@cache
def _long_work() -> ThreadPoolExecutor:
    """Of the whole process, made when it is first needed."""
    return ThreadPoolExecutor(os.cpu_count(), "long-work")
