"""Which replica gets the work: stable, bounded, and around those that fail."""

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.attempts import MAX_ATTEMPTS, Attempts, run_somewhere
from gateway.backends.replica import MAX_FAILURES, REST_S, Replica, ReplicaFacts
from gateway.routing import ReplicaPool
from gateway.targets import DNS_INTERVAL_S, DnsTargets, FileTargets, FixedTargets, parse_targets
from mimo.errors import (
    ConfigError,
    EmbeddingMismatch,
    InvalidRequest,
    MimoError,
    Overloaded,
    Reason,
    Unavailable,
)
from mimo.metrics import Metrics


class Channel:
    """A channel that is never used but to be closed."""

    def __init__(self, address: str) -> None:
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class MovingTargets:
    def __init__(self, *addresses: str) -> None:
        self.current = addresses

    async def addresses(self) -> tuple[str, ...]:
        return self.current


FACTS = ReplicaFacts("vision", "m", "fp", 8, "float32", {})


def pool_of(targets: Any, clock: Clock | None = None) -> ReplicaPool:
    channel: Any = Channel
    return ReplicaPool(
        "vision", targets, Metrics("gateway"), open_channel=channel, clock=clock or Clock()
    )


def three() -> ReplicaPool:
    return pool_of(FixedTargets(("a:1", "b:1", "c:1")))


KEYS = [f"key {number}".encode() for number in range(300)]


async def know(pool: ReplicaPool, facts: ReplicaFacts = FACTS) -> None:
    """As if every replica had described itself."""
    for replica in await pool.replicas():
        replica._facts = facts


async def test_equal_work_goes_to_one_replica_and_different_work_spreads() -> None:
    pool = three()
    first = [(await pool.pick(key)).address for key in KEYS]
    assert first == [(await pool.pick(key)).address for key in KEYS]
    assert all(70 < count < 130 for count in Counter(first).values())


async def test_a_lost_replica_moves_only_its_own_work() -> None:
    targets = MovingTargets("a:1", "b:1", "c:1")
    pool = pool_of(targets)
    before = {key: (await pool.pick(key)).address for key in KEYS}
    targets.current = ("a:1", "c:1")
    for key, address in before.items():
        if address != "b:1":
            assert (await pool.pick(key)).address == address


async def test_a_hot_replica_sends_its_overflow_to_the_next() -> None:
    pool = three()
    first = await pool.pick(b"hot")
    with first.carrying(4.0):
        second = await pool.pick(b"hot")
        assert second is not first
        with second.carrying(4.0):
            third = await pool.pick(b"hot")
            assert third not in (first, second)
            with third.carrying(4.0):
                assert await pool.pick(b"hot") is first
    assert first.load == 0.0
    assert await pool.pick(b"hot") is first


async def test_no_replica_carries_much_more_than_the_average() -> None:
    pool = three()
    loads: Counter[str] = Counter()
    for _ in range(60):
        replica = await pool.pick(b"one hot key")
        replica.load += 1.0
        loads[replica.address] += 1
    assert max(loads.values()) <= 1.25 * 20 + 1


async def test_three_failures_in_a_row_are_a_rest_and_a_success_ends_the_count() -> None:
    clock = Clock()
    pool = pool_of(FixedTargets(("a:1", "b:1")), clock)
    first = await pool.pick(b"k")
    for _ in range(MAX_FAILURES - 1):
        first.failed()
    assert await pool.pick(b"k") is first
    first.succeeded()
    first.failed()
    assert await pool.pick(b"k") is first
    for _ in range(MAX_FAILURES):
        first.failed()
    assert await pool.pick(b"k") is not first
    clock.now += REST_S
    assert await pool.pick(b"k") is first


async def test_resting_replicas_are_used_when_no_other_is_left() -> None:
    pool = three()
    for replica in await pool.replicas():
        replica.failed(drains=True)
    assert await pool.pick(b"k")


async def test_work_moves_on_while_replicas_are_at_fault() -> None:
    pool = three()
    await know(pool)
    errors: list[MimoError] = [Unavailable("gone"), Overloaded("full")]
    seen: list[tuple[str, int]] = []

    async def work(replica: Replica, facts: ReplicaFacts, attempt: int) -> str:
        seen.append((replica.address, attempt))
        if errors:
            raise errors.pop(0)
        return facts.fingerprint

    assert await run_somewhere(Attempts(pool, b"k"), work) == "fp"
    assert len({address for address, _ in seen}) == 3
    assert [attempt for _, attempt in seen] == [0, 1, 2]


async def test_the_last_failure_is_raised_when_none_is_left() -> None:
    pool = three()
    await know(pool)

    async def work(replica: Replica, facts: ReplicaFacts, attempt: int) -> None:
        raise Overloaded(f"full {attempt}", retry_after_s=attempt)

    with pytest.raises(Overloaded, match="full 2"):
        await run_somewhere(Attempts(pool, b"k"), work)


async def test_the_clients_own_fault_is_not_tried_again() -> None:
    pool = three()
    await know(pool)
    calls = []

    async def work(replica: Replica, facts: ReplicaFacts, attempt: int) -> None:
        calls.append(replica)
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        await run_somewhere(Attempts(pool, b"k"), work)
    assert len(calls) == 1
    assert await pool.pick(b"k") is calls[0]


async def test_replicas_of_another_encoder_are_passed_over() -> None:
    pool = three()
    for number, replica in enumerate(await pool.replicas()):
        replica._facts = ReplicaFacts("vision", "m", f"fp{number}", 8, "float32", {})

    async def work(replica: Replica, facts: ReplicaFacts, attempt: int) -> str:
        return facts.fingerprint

    for key in KEYS[:20]:
        attempts = Attempts(pool, key, accepts=lambda facts: facts.fingerprint == "fp1")
        assert await run_somewhere(attempts, work) == "fp1"
    with pytest.raises(Unavailable, match="no vision replica"):
        await run_somewhere(Attempts(pool, b"k", accepts=lambda facts: False), work)


async def test_a_draining_replica_rests_at_once_and_a_stranger_is_asked_again() -> None:
    pool = three()
    await know(pool)
    draining, stranger, _ = await pool.replicas()
    pool.failed(draining, Unavailable("bye", reason=Reason.DRAINING))
    assert draining.rests and draining.state == "draining"
    pool.failed(stranger, EmbeddingMismatch("another encoder"))
    assert not stranger.rests and not stranger.is_known


async def test_work_waits_for_the_last_replica_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(FixedTargets(("a:1",)))
    answers: list[ReplicaFacts | MimoError] = [FACTS, Unavailable("x"), Unavailable("x"), FACTS]
    answer_with(monkeypatch, answers)
    errors: list[MimoError] = [Unavailable("lost at work")]

    async def work(replica: Replica, facts: ReplicaFacts, attempt: int) -> int:
        if errors:
            raise errors.pop(0)
        return attempt

    assert await run_somewhere(Attempts(pool, b"k"), work) == 1
    assert answers == []


async def test_work_that_nobody_took_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(FixedTargets(("a:1",)))
    answers: list[ReplicaFacts | MimoError] = [Unavailable("10.0.0.1 refused"), FACTS]
    answer_with(monkeypatch, answers)
    with pytest.raises(Unavailable, match="no vision replica can take the request"):
        await Attempts(pool, b"k").next()
    assert len(answers) == 1


async def test_work_that_is_lost_again_and_again_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(FixedTargets(("a:1",)))
    answer_with(monkeypatch, [FACTS] * 9)
    calls = []

    async def work(replica: Replica, facts: ReplicaFacts, attempt: int) -> None:
        calls.append(attempt)
        raise Unavailable("lost")

    with pytest.raises(Unavailable):
        await run_somewhere(Attempts(pool, b"k"), work)
    assert calls == list(range(MAX_ATTEMPTS))


def answer_with(monkeypatch: pytest.MonkeyPatch, answers: list[ReplicaFacts | MimoError]) -> None:
    """What replicas say when they are asked for their facts, one answer per question."""

    async def facts(replica: Replica) -> ReplicaFacts:
        answer = answers.pop(0)
        if isinstance(answer, MimoError):
            raise answer
        return answer

    monkeypatch.setattr(Replica, "facts", facts)
    monkeypatch.setattr("gateway.attempts.PAUSE_S", 0.0)


async def test_endpoints_are_counted_by_state() -> None:
    pool = three()
    await know(pool)
    lost, draining, _ = await pool.replicas()
    pool.failed(lost, Unavailable("gone"))
    pool.failed(draining, Unavailable("bye", reason=Reason.DRAINING))
    counts = {
        state: pool._metrics.value(
            "mimo_gateway_upstream_endpoints", component="vision", state=state
        )
        for state in ("ready", "failing", "draining", "connecting")
    }
    assert counts == {"ready": 1, "failing": 1, "draining": 1, "connecting": 0}


# ── targets ──


async def test_fixed_targets_are_checked() -> None:
    targets = parse_targets("a:1, b:2", "--vision")
    assert await targets.addresses() == ("a:1", "b:2")
    for text in ("", "a", "a:", "a:x", "a:99999", ":1"):
        with pytest.raises(ConfigError, match="--vision"):
            parse_targets(text, "--vision")


async def test_a_target_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "vision.json"
    targets = parse_targets(f"file:{path}", "--vision")
    assert isinstance(targets, FileTargets)
    assert await targets.addresses() == ()

    def replace(content: str) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(content)
        os.replace(fresh, path)

    replace(json.dumps(["a:1"]))
    assert await targets.addresses() == ("a:1",)
    replace(json.dumps(["a:1", "b:1"]))
    assert await targets.addresses() == ("a:1", "b:1")
    replace("[")
    assert await targets.addresses() == ("a:1", "b:1")
    path.unlink()
    caplog.clear()
    for _ in range(3):  # as every request does
        assert await targets.addresses() == ("a:1", "b:1")
    assert len(caplog.records) == 1


async def test_a_name_is_looked_up_again_and_a_failure_keeps_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[list[str] | OSError] = [["10.0.0.2", "10.0.0.1"], OSError("no"), ["fd00::1"]]

    async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(0, 0, 0, "", (address, port)) for address in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    clock = Clock()
    targets = DnsTargets("vision", 50051, clock=clock)
    assert await targets.addresses() == ("10.0.0.1:50051", "10.0.0.2:50051")
    assert await targets.addresses() == ("10.0.0.1:50051", "10.0.0.2:50051")
    clock.now += DNS_INTERVAL_S
    assert await looked_up(targets) == ("10.0.0.1:50051", "10.0.0.2:50051")
    clock.now += DNS_INTERVAL_S
    assert await looked_up(targets) == ("[fd00::1]:50051",)


async def looked_up(targets: DnsTargets) -> tuple[str, ...]:
    """The list after the lookup that asking for it begins."""
    await targets.addresses()
    assert targets._lookup is not None
    await targets._lookup
    return await targets.addresses()


async def test_a_name_server_that_hangs_holds_nobody_up_who_has_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.Event().wait()
        return [(0, 0, 0, "", ("10.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    clock = Clock()
    targets = DnsTargets("vision", 50051, clock=clock)
    assert await targets.addresses() == ("10.0.0.1:50051",)
    for _ in range(3):
        clock.now += DNS_INTERVAL_S
        async with asyncio.timeout(5):
            assert await targets.addresses() == ("10.0.0.1:50051",)
        await asyncio.sleep(0)
    assert asked == 2


async def test_those_who_come_during_the_first_lookup_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = asyncio.Event()

    async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        await answered.wait()
        return [(0, 0, 0, "", ("10.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    targets = DnsTargets("vision", 50051)
    asking = [asyncio.create_task(targets.addresses()) for _ in range(2)]
    await asyncio.sleep(0)
    answered.set()
    assert await asyncio.gather(*asking) == [("10.0.0.1:50051",)] * 2


async def test_dns_targets_are_recognised() -> None:
    assert isinstance(parse_targets("dns:///vision.mimo:50051", "--vision"), DnsTargets)


async def test_closing_closes_every_channel() -> None:
    pool = three()
    replicas = await pool.replicas()
    await pool.close()
    channels: list[Any] = [replica.channel for replica in replicas]
    assert all(channel.is_closed for channel in channels)
