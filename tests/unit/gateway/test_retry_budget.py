"""Second attempts are a tenth of the first ones, a reserve, and a trickle."""

import asyncio

import pytest

from gateway.budget import RATIO, RESERVE, RESERVE_PER_S, RetryBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def drained(clock: Clock) -> RetryBudget:
    budget = RetryBudget(clock)
    for _ in range(int(RESERVE)):
        assert budget.try_take()
    return budget


def test_a_reserve_is_there_from_the_start_and_then_it_is_spent() -> None:
    assert not drained(Clock()).try_take()


def test_ten_first_attempts_earn_a_second_one() -> None:
    budget = drained(Clock())
    for _ in range(round(1 / RATIO)):
        assert not budget.try_take()
        budget.deposit()
    assert budget.try_take()
    assert not budget.try_take()


def test_time_earns_too_and_never_more_than_the_reserve() -> None:
    clock = Clock()
    budget = drained(clock)
    clock.now += 1.0
    assert sum(budget.try_take() for _ in range(1000)) == RESERVE_PER_S
    clock.now += 3600.0
    assert sum(budget.try_take() for _ in range(1000)) == RESERVE


async def test_lost_work_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    budget = drained(clock)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for _ in range(3):
        await budget.take()
    assert sum(slept) == pytest.approx(3 / RESERVE_PER_S)
