"""When requests go out: closed loops wait for answers, open loops do not."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

Result = TypeVar("Result")


async def closed_loop(
    ask: Callable[[int], Awaitable[Result]], numbers: Iterable[int], *, workers: int
) -> list[Result]:
    """So many askers, each with the next number as soon as it has its answer, until there is none.

    Answers are in the order in which they came.
    """
    left, answers = iter(numbers), list[Result]()

    async def work() -> None:
        for number in left:
            answers.append(await ask(number))

    async with asyncio.TaskGroup() as askers:
        for _ in range(workers):
            askers.create_task(work())
    return answers


async def open_loop(
    ask: Callable[[int, float], Awaitable[Result]], arrivals: Iterable[float]
) -> list[Result]:
    """Ask at the given seconds from now on, whatever became of what was asked before.

    ``ask`` receives a running number and the moment at which it was due, on the monotonic clock:
    a generator that cannot keep up is late, and the delay belongs to the latency. Answers are in
    the order of the arrivals.
    """
    began, asked = time.monotonic(), list[asyncio.Task[Result]]()
    async with asyncio.TaskGroup() as asking:
        for number, arrival in enumerate(arrivals):
            due = began + arrival
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            asked.append(asking.create_task(_awaited(ask(number, due))))
    return [task.result() for task in asked]


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Moments of a Poisson process of ``rate`` events a second, in seconds, without end. The same
    seed gives the same moments."""
    chance, moment = random.Random(seed), 0.0
    while True:
        moment += chance.expovariate(rate)
        yield moment


async def _awaited(result: Awaitable[Result]) -> Result:
    return await result
