"""What replicas report decides who gets the overflow, who is preferred and who is refused."""

from typing import Any

import pytest

from gateway.attempts import Attempts
from gateway.backends.replica import (
    MAX_FAILURES,
    MAX_REST_S,
    REST_S,
    ReplicaFacts,
    ReplicaState,
    ReportedLoad,
)
from gateway.budget import RESERVE
from gateway.routing import ReplicaPool
from gateway.targets import FixedTargets
from mimo.errors import MimoError, Overloaded, Reason, Unavailable
from mimo.metrics import Metrics

FACTS = ReplicaFacts("vision", "m", "fp", 8, "float32", {})


class Channel:
    def __init__(self, address: str) -> None:
        self.address = address


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pool_of(*addresses: str, clock: Clock | None = None) -> ReplicaPool:
    channel: Any = Channel
    return ReplicaPool(
        "vision",
        FixedTargets(addresses),
        Metrics("gateway"),
        open_channel=channel,
        clock=clock or Clock(),
    )


def idle(work_per_second: float = 100.0) -> ReportedLoad:
    return ReportedLoad(0.0, work_per_second, 0.0)


async def test_the_work_of_others_counts() -> None:
    pool = pool_of("a:1", "b:1")
    home = await pool.pick(b"k", cost=10.0)
    home.heard(ReportedLoad(500.0, 100.0, 5.0))
    assert await pool.pick(b"k", cost=10.0) is not home
    home.heard(idle())
    assert await pool.pick(b"k", cost=10.0) is home


async def test_work_sent_since_the_report_counts_and_is_not_counted_twice() -> None:
    (replica,) = await pool_of("a:1").replicas()
    with replica.carrying(5.0):
        assert replica.outstanding == 5.0
        replica.heard(ReportedLoad(8.0, 1.0, 8.0))  # ours and three units of somebody else's
        assert replica.outstanding == 8.0
        with replica.carrying(2.0):
            assert replica.outstanding == 10.0
            assert replica.wait_s == 10.0
    assert replica.outstanding == 3.0


async def test_load_is_time_so_a_fast_replica_takes_more() -> None:
    pool = pool_of("fast:1", "slow:1")
    fast, slow = await pool.replicas()
    fast.heard(idle(300.0))
    slow.heard(idle(100.0))
    for number in range(80):
        (await pool.pick(f"key {number}".encode(), cost=10.0)).load += 10.0
    average_s = 800.0 / 400.0
    assert fast.load / 300.0 <= 1.25 * average_s and slow.load / 100.0 <= 1.25 * average_s


async def test_a_replica_that_has_not_measured_is_an_average_one() -> None:
    pool = pool_of("a:1", "b:1", "c:1")
    measured, *_ = await pool.replicas()
    measured.heard(idle(1000.0))
    for _ in range(90):
        (await pool.pick(b"k", cost=10.0)).load += 10.0
    assert max(replica.load for replica in await pool.replicas()) <= 1.25 * 300 + 10


async def test_a_preferred_replica_may_be_busier_but_not_much() -> None:
    pool = pool_of("a:1", "b:1")
    home = await pool.pick(b"k")
    other = next(replica for replica in await pool.replicas() if replica is not home)
    assert await pool.pick(b"k", prefer=other.address) is other
    other.load = 3.0
    assert await pool.pick(b"k", prefer=other.address) is other
    other.load = 20.0
    assert await pool.pick(b"k", prefer=other.address) is home
    assert await pool.pick(b"k", prefer="gone:1") is home


async def test_work_is_refused_when_every_queue_is_too_long() -> None:
    pool = pool_of("a:1", "b:1")
    first, second = await pool.replicas()
    pool.check_room(0.0)  # nothing is known
    first.heard(ReportedLoad(100.0, 10.0, 10.0))
    second.heard(ReportedLoad(40.0, 10.0, 4.0))
    pool.check_room(5.0)
    with pytest.raises(Overloaded) as caught:
        pool.check_room(3.0)
    assert caught.value.retry_after_s == 4.0
    second.heard(ReportedLoad(0.0, 10.0, 4.0, service_s=2.0))
    with pytest.raises(Overloaded):
        pool.check_room(5.0)
    first.heard(ReportedLoad(0.0, 10.0, 31.0))
    second.heard(ReportedLoad(0.0, 10.0, 31.0))
    with pytest.raises(Overloaded):
        pool.check_room(300.0)


async def test_work_that_is_being_prepared_waits_as_well() -> None:
    pool = pool_of("a:1")
    (replica,) = await pool.replicas()
    with pool.expecting(40.0):
        replica.heard(ReportedLoad(0.0, 10.0, 0.0))
        pool.check_room(1.0)  # nobody waits there
        replica.heard(ReportedLoad(100.0, 10.0, 5.0))
        pool.check_room(9.0)
        with pytest.raises(Overloaded):
            pool.check_room(8.9)
    pool.check_room(5.0)


async def test_a_silent_replica_loses_its_calls_and_gets_no_new_ones() -> None:
    pool = pool_of("a:1", "b:1")
    home = await pool.pick(b"k")
    broken: list[MimoError] = []
    home.heard(idle())
    with home.call(broken.append):
        for _ in range(9):
            home.tick(10)
        assert broken == [] and not home.rests
        home.tick(10)
        home.tick(10)
    assert len(broken) == 1 and isinstance(broken[0], Unavailable)
    assert home.state is ReplicaState.FAILING
    assert await pool.pick(b"k") is not home
    home.heard(idle())
    assert await pool.pick(b"k") is home


async def test_a_replica_that_never_spoke_is_not_called_silent() -> None:
    (replica,) = await pool_of("a:1").replicas()
    for _ in range(100):
        replica.tick(10)
    assert not replica.rests


async def test_a_replica_that_says_it_drains_gets_no_new_work() -> None:
    pool = pool_of("a:1", "b:1")
    home = await pool.pick(b"k")
    home.heard(ReportedLoad(0.0, 1.0, 0.0, drains=True))
    assert await pool.pick(b"k") is not home


async def test_rests_grow_until_it_is_another_process() -> None:
    clock = Clock()
    (replica,) = await pool_of("a:1", clock=clock).replicas()
    rest_s = REST_S
    for _ in range(MAX_FAILURES):
        replica.failed()
    for _ in range(10):
        for _ in range(5):
            replica.failed()  # calls that fail together are one reason
        clock.now += rest_s - 0.1
        assert replica.rests
        clock.now += 0.1
        assert not replica.rests
        replica.failed()
        rest_s = min(2 * rest_s, MAX_REST_S)
    replica.introduced()
    assert not replica.rests and not replica.is_known


async def test_refused_work_is_not_offered_around_once_the_budget_is_spent() -> None:
    pool = pool_of("a:1", "b:1")
    for replica in await pool.replicas():
        replica._facts = FACTS
    for number in range(int(RESERVE) + 5):
        attempts = Attempts(pool, b"k")
        replica, _ = await attempts.next()
        if number < RESERVE:
            attempts.failed(replica, Overloaded("full"))
    # What the deposits of these attempts earned is spent as well.
    while pool.retries.try_take():
        pass
    attempts = Attempts(pool, b"k")
    replica, _ = await attempts.next()
    with pytest.raises(Overloaded, match="full"):
        attempts.failed(replica, Overloaded("full"))


async def test_work_that_a_draining_replica_refused_moves_on_for_nothing() -> None:
    pool = pool_of("a:1", "b:1")
    for replica in await pool.replicas():
        replica._facts = FACTS
    while pool.retries.try_take():
        pass
    attempts = Attempts(pool, b"k")
    replica, _ = await attempts.next()
    attempts.failed(replica, Unavailable("bye", reason=Reason.DRAINING))
    second, _ = await attempts.next()
    assert second is not replica
