"""Closed and open loops, and when the requests of an open one are due."""

import asyncio
import itertools
import statistics

import pytest

from mimo.cli.load.loops import closed_loop, open_loop, poisson
from mimo.cli.load.run import DEFAULT_CONCURRENCY, DEFAULT_REQUESTS, Schedule, num_distinct_media
from mimo.cli.load.workload import Workload, WorkloadName
from mimo.errors import ConfigError


async def test_a_closed_loop_asks_so_many_at_once_and_each_number_once() -> None:
    at_once, most, asked = 0, 0, list[int]()

    async def ask(number: int) -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        asked.append(number)
        for _ in range(1 + number % 3):
            await asyncio.sleep(0)
        at_once -= 1
        return number

    answers = await closed_loop(ask, range(20), workers=3)
    assert sorted(answers) == asked == list(range(20))
    assert most == 3


async def test_an_asker_of_a_closed_loop_waits_for_its_answer() -> None:
    first_may_end, asked = asyncio.Event(), list[int]()

    async def ask(number: int) -> None:
        asked.append(number)
        if number == 0:
            await first_may_end.wait()
        if number == 4:
            first_may_end.set()

    await closed_loop(ask, range(6), workers=2)
    assert asked == [0, 1, 2, 3, 4, 5]  # the second asker alone, until number 4

    with pytest.raises(TimeoutError):
        first_may_end.clear()
        async with asyncio.timeout(0.01):
            await closed_loop(ask, range(3), workers=1)


async def test_an_open_loop_waits_for_nobody() -> None:
    all_asked = asyncio.Event()

    async def ask(number: int, due: float) -> float:
        if number == 9:
            all_asked.set()
        await all_asked.wait()  # would never come true if anybody were waited for
        return due

    arrivals = [number / 1000 for number in range(10)]
    dues = await open_loop(ask, arrivals)
    assert [due - dues[0] for due in dues] == pytest.approx(arrivals, abs=1e-9)


def test_poisson_arrivals_are_the_same_for_the_same_seed_and_come_at_the_rate() -> None:
    moments = list(itertools.islice(poisson(5.0, seed=3), 20_000))
    assert moments == list(itertools.islice(poisson(5.0, seed=3), 20_000))
    assert moments != list(itertools.islice(poisson(5.0, seed=4), 20_000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *moments])]
    assert min(gaps) > 0
    # Of exponential gaps mean and deviation are equal, and a share of 1/e is above the mean.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.03)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)


def test_a_schedule_ends_by_number_or_by_time_whichever_is_first() -> None:
    def num_arrivals(requests: int | None, duration_s: float | None) -> int:
        schedule = Schedule(rate=10.0, requests=requests, duration_s=duration_s, seed=1)
        return len(list(schedule.arrivals()))

    in_ten_seconds = sum(moment < 10 for moment in itertools.islice(poisson(10.0, 1), 1000))
    assert num_arrivals(None, 10.0) == in_ten_seconds
    assert num_arrivals(7, 10.0) == 7
    assert num_arrivals(1000, 10.0) == in_ten_seconds
    assert num_arrivals(None, None) == DEFAULT_REQUESTS
    assert list(Schedule(requests=5).numbers()) == [0, 1, 2, 3, 4]
    assert Schedule(requests=5).workers == DEFAULT_CONCURRENCY
    assert list(Schedule(requests=5, duration_s=1e-9).numbers()) == []


def test_a_schedule_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        Schedule(rate=1.0, concurrency=1)
    with pytest.raises(ConfigError, match="above 0"):
        Schedule(rate=0.0)


@pytest.mark.parametrize(
    ("name", "given", "requests", "expected"),
    [
        ("text", 0, None, 0),
        ("image", 3, None, 3),
        ("image", 0, 10, 10),
        ("mixed", 0, 10, 3),  # four kinds in turn
    ],
)
def test_media_are_as_many_as_asked_for_or_as_there_are_requests(
    name: WorkloadName, given: int, requests: int | None, expected: int
) -> None:
    workload = make_workload(name, distinct_media=given)
    schedule = Schedule(requests=requests, duration_s=None if requests else 1.0)
    assert num_distinct_media(workload, schedule) == expected


def test_media_without_number_are_refused() -> None:
    with pytest.raises(ConfigError, match="--distinct-media"):
        num_distinct_media(make_workload("mixed"), Schedule(duration_s=1.0))


def make_workload(name: WorkloadName, distinct_media: int = 0) -> Workload:
    return Workload(
        name=name, input_tokens=4, output_tokens=2, distinct_media=distinct_media, seed=0, salt="s"
    )
