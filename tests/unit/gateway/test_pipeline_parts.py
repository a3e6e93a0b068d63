"""The small parts of the pipeline: shared flights, kept pictures, stage times."""

import asyncio

import pytest

from gateway.embedding import DecodedImages
from gateway.flights import Flights
from gateway.items import DecodedImage
from gateway.stopwatch import Stage, Stopwatch
from mimo.errors import InvalidRequest
from mimo.tensor import RawTensor


class Work:
    """Work that waits to be let go, and counts its beginnings and cancellations."""

    def __init__(self) -> None:
        self.num_started = self.num_cancelled = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.num_started += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.num_started


async def started(flights: Flights[int], work: Work, count: int) -> list["asyncio.Task[object]"]:
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(flights.join("k", work)) for _ in range(count)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_those_who_come_later_join() -> None:
    flights, work = Flights[int](), Work()
    tasks = await started(flights, work, 3)
    assert "k" in flights
    work.go.set()
    assert await asyncio.gather(*tasks) == [(1, False), (1, True), (1, True)]
    assert "k" not in flights
    assert await flights.join("k", work) == (2, False)


async def test_work_stops_with_its_last_waiter() -> None:
    flights, work = Flights[int](), Work()
    first, second = await started(flights, work, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert work.num_cancelled == 0
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await asyncio.sleep(0)
    assert work.num_cancelled == 1
    assert "k" not in flights


async def test_a_failure_is_everybodys_and_is_not_remembered() -> None:
    flights, work = Flights[int](), Work()
    tasks = await started(flights, work, 2)
    work.error = InvalidRequest("no")
    work.go.set()
    assert await asyncio.gather(*tasks, return_exceptions=True) == [work.error, work.error]
    work.error = None
    assert await flights.join("k", work) == (2, False)


def image(digest: str, num_bytes: int) -> DecodedImage:
    return DecodedImage(RawTensor("uint8", (num_bytes,), bytes(num_bytes)), digest)


def test_kept_pictures_are_bounded_and_the_oldest_goes_first() -> None:
    images = DecodedImages(max_bytes=10)
    images.keep(image("a", 4))
    images.keep(image("b", 4))
    images.keep(image("c", 4))
    assert images.take("a") is None
    assert images.take("b") is not None
    assert images.take("b") is None
    images.keep(image("c", 4))
    images.keep(image("d", 6))
    assert images.take("c") is not None and images.take("d") is not None
    images.keep(image("huge", 11))
    assert images.take("huge") is None


def test_stages_that_overlap_count_once() -> None:
    now = 0.0
    stopwatch = Stopwatch(lambda: now)
    with stopwatch.stage(Stage.ENCODE):
        now = 1.0
        with stopwatch.stage(Stage.ENCODE), stopwatch.stage(Stage.STORE):
            now = 3.0
        now = 4.0
    now = 6.0
    with stopwatch.stage(Stage.ENCODE):
        now = 6.5
    assert stopwatch.ms(Stage.ENCODE) == pytest.approx(4500)
    assert stopwatch.ms(Stage.STORE) == pytest.approx(2000)
    assert stopwatch.ms(Stage.FETCH) == 0
    assert stopwatch.total_ms == pytest.approx(6500)
    assert stopwatch.ms_until(1.5) == pytest.approx(1500)
