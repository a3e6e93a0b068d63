"""Durations of late: a mean that follows, and forgets."""

import pytest

from gateway.recent import HALF_LIFE_S, RecentMean


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_follows_what_is_added() -> None:
    recent = RecentMean(Clock())
    assert recent.seconds == 0.0
    for _ in range(50):
        recent.add(3.0)
    assert recent.seconds == pytest.approx(3.0, rel=1e-3)


def test_it_fades_while_nothing_is_added() -> None:
    clock = Clock()
    recent = RecentMean(clock)
    for _ in range(50):
        recent.add(4.0)
    clock.now += 2 * HALF_LIFE_S
    assert recent.seconds == pytest.approx(1.0, rel=1e-3)
