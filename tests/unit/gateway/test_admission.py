"""Who is let in, and how long that counts for the others."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.admission import (
    CROWD,
    DELIVERY_S,
    DELIVERY_SHARE,
    LOOP_WAITS,
    MARGIN,
    UNREAD_S,
    Admission,
)
from gateway.backends.replica import ReplicaFacts, ReportedLoad
from gateway.routing import ReplicaPool
from gateway.targets import FixedTargets
from gateway.vitals import LoopLag
from mimo.errors import Overloaded
from mimo.metrics import Metrics

RATE = 10.0  # requests a second
METRICS = Metrics("gateway")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def busy_pool(wait_s: float, *, clock: Clock | None = None) -> ReplicaPool:
    """One decoder with a queue that is so long."""
    pool = ReplicaPool("llm", FixedTargets(("a:1",)), Metrics("gateway"), clock=clock or Clock())
    (replica,) = await pool.replicas()
    replica.heard(ReportedLoad(0.0, RATE, wait_s))
    return pool


async def test_who_cannot_be_answered_in_time_is_not_let_in() -> None:
    admission = Admission(await busy_pool(4.0), 300.0, LoopLag(METRICS))
    with admission.place(4.01 / MARGIN):
        pass
    with pytest.raises(Overloaded), admission.place(3.99 / MARGIN):
        pass


async def test_the_deadline_leaves_time_for_delivery_and_has_a_bound() -> None:
    clock = Clock()
    admission = Admission(await busy_pool(0.0, clock=clock), 300.0, LoopLag(METRICS), clock)
    with admission.place(1.0) as hasty, admission.place(float("inf")) as patient:
        assert hasty.deadline == pytest.approx(101.0 - DELIVERY_SHARE)
        assert patient.deadline == pytest.approx(400.0 - DELIVERY_S)


async def test_a_place_counts_until_it_is_left() -> None:
    admission = Admission(await busy_pool(4.0), 300.0, LoopLag(METRICS))
    with admission.place(10.0) as first:
        first.hold(20.0)
        with pytest.raises(Overloaded), admission.place(5.5 / MARGIN):
            pass
        first.leave()
        with admission.place(5.5 / MARGIN):
            pass
        first.hold(20.0)
    with admission.place(5.5 / MARGIN):
        pass


async def test_what_runs_at_once_does_not_wait_and_what_is_more_does() -> None:
    pool = await busy_pool(0.0)
    (replica,) = await pool.replicas()
    replica._facts = ReplicaFacts("llm", "m", "f", 8, "float32", {"max_running_requests": 4})
    admission = Admission(pool, 300.0, LoopLag(METRICS))
    with admission.place(1.0) as crowd:
        crowd.hold(4.0)
        with admission.place(0.01):
            pass
        crowd.hold(8.0)  # four of them wait for four ends
        with pytest.raises(Overloaded), admission.place(0.39 / MARGIN):
            pass
        with admission.place(0.41 / MARGIN):
            pass
    with replica.carrying(8.0), pytest.raises(Overloaded), admission.place(0.39 / MARGIN):
        pass


async def test_a_head_without_a_body_does_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert UNREAD_S < 5.0
    monkeypatch.setattr("gateway.admission.UNREAD_S", 0.0)
    admission = Admission(await busy_pool(4.0), 300.0, LoopLag(METRICS))
    with admission.place(10.0), admission.place(10.0):
        with pytest.raises(Overloaded):
            admission._llm.check_room(4.1)
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(0.0, passed.set)  # after the timers before it
        await passed.wait()
        admission._llm.check_room(4.1)


async def test_a_head_counts_for_longer_when_the_loop_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.admission.UNREAD_S", 0.0)
    monkeypatch.setattr("gateway.admission.CROWD", 0)
    lag = LoopLag(METRICS)
    lag._mean_s = 0.01
    admission = Admission(await busy_pool(4.0), 300.0, lag)
    with admission.place(20.0):
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(0.0, passed.set)
        await passed.wait()
        with pytest.raises(Overloaded):
            admission._llm.check_room(4.05)


async def test_who_was_let_in_stays_unless_it_is_hopeless() -> None:
    clock = Clock()
    pool = await busy_pool(4.0, clock=clock)
    (replica,) = await pool.replicas()
    admission = Admission(pool, 300.0, LoopLag(METRICS), clock)
    with admission.place(10.0) as place:
        clock.now += 5.0  # 5 s are left, and the margin is used up
        admission.confirm(place, 1.0, has_media=True, wait_s=0.9)
        with pytest.raises(Overloaded):
            admission.confirm(place, 1.0, has_media=True, wait_s=1.1)
        replica.heard(ReportedLoad(0.0, RATE, 5.1))
        with pytest.raises(Overloaded):
            admission.confirm(place, 1.0, has_media=False)


async def test_the_time_that_preparing_takes_lately_counts() -> None:
    clock = Clock()
    pool = await busy_pool(4.0, clock=clock)
    admission = Admission(pool, 300.0, LoopLag(METRICS), clock)
    with admission.place(10.0) as place:
        for _ in range(100):
            admission.prepared(place, 2.0, has_media=True)
        with pytest.raises(Overloaded), admission.place(5.9 / MARGIN):
            pass
        with admission.place(6.1 / MARGIN):
            pass
        place.deadline = clock.now + 5.9
        with pytest.raises(Overloaded):
            admission.confirm(place, 1.0, has_media=True)
        admission.confirm(place, 1.0, has_media=False)
    clock.now += 60.0  # forgotten
    with admission.place(4.1 / MARGIN):
        pass


async def test_in_a_crowd_the_lag_of_the_loop_counts_and_among_few_it_does_not() -> None:
    lag = LoopLag(METRICS)
    lag._mean_s = 0.1
    admission = Admission(await busy_pool(0.0), 300.0, lag)
    hopeless, enough = (factor * LOOP_WAITS * 0.1 / MARGIN for factor in (0.9, 1.1))
    with ExitStack() as crowd:
        for _ in range(CROWD):
            crowd.enter_context(admission.place(hopeless))
        with pytest.raises(Overloaded), admission.place(hopeless):
            pass
        with admission.place(enough):
            pass
    with admission.place(hopeless):
        pass


async def test_the_lag_of_the_loop_is_seen_while_it_grows_and_forgotten() -> None:
    clock, metrics = Clock(), Metrics("gateway")
    lag = LoopLag(metrics, clock)
    assert lag.seconds == 0.0
    running = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    clock.now += 2.0  # and the loop still has not come round
    assert 0.5 < lag.seconds < 2.0
    count = "mimo_gateway_event_loop_lag_seconds"
    while not metrics.value(count):
        await asyncio.sleep(0)
    assert 0.5 < lag.seconds < 2.0
    while metrics.value(count) < 12:
        clock.now = lag._due
        await asyncio.sleep(0)
    assert lag.seconds < 0.05
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
