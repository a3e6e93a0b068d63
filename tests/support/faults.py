"""A seeded schedule of faults on a running system, one at a time."""

import asyncio
import contextlib
import os
import random
import signal
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.live import Stack, scrape

LEAVES = ("vision", "audio", "llm")
ROLES = (*LEAVES, "redis")
FREEZE_S = (7.0, 9.0)  # longer than a silence that is noticed
PAUSE_S = 3.0  # between everything being well again and the next fault
RECOVERY_S = 90.0


@dataclass(frozen=True)
class Fault:
    """``kill`` is SIGKILL, ``freeze`` SIGSTOP and later SIGCONT, ``freeze+kill`` then SIGKILL."""

    role: str
    index: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.role}-{self.index}"


def schedule(seed: int, replicas: int = 2) -> Iterator[Fault]:
    """Endless. Every victim has its turn before any has the next; the kinds take turns too."""
    chance = random.Random(seed)
    victims = [(role, index) for role in LEAVES for index in range(replicas)] + [("redis", 0)]
    kinds = {victim: chance.sample(("kill", "freeze", "freeze+kill"), 3) for victim in victims}
    turn = 0
    while True:
        for victim in chance.sample(victims, len(victims)):
            yield Fault(*victim, kinds[victim][turn % 3])
        turn += 1


class FaultInjector:
    """Hurts one process at a time, and knows when the system is whole again."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack = stack
        self._chance = random.Random(f"freeze {seed}")
        self._schedule = schedule(seed)
        self.done: list[tuple[float, Fault]] = []  # with the time on time.monotonic

    def by_role(self) -> "Counter[str]":
        return Counter(fault.role for _, fault in self.done)

    def by_victim(self) -> "Counter[tuple[str, int]]":
        return Counter((fault.role, fault.index) for _, fault in self.done)

    async def strike(self) -> Fault:
        """The next fault of the schedule; returns when the system is whole again."""
        fault = next(self._schedule)
        pid = int(self._stack.processes(fault.role)[fault.index]["pid"])
        self.done.append((time.monotonic(), fault))
        with contextlib.suppress(ProcessLookupError):
            if fault.kind == "kill":
                os.kill(pid, signal.SIGKILL)
            else:
                await self._freeze(pid, kill=fault.kind == "freeze+kill")
        await self.recovered(pid if "kill" in fault.kind else 0)
        return fault

    async def recovered(self, dead: int = 0) -> None:
        """Wait until every process answers and ``dead`` has a successor."""
        deadline = time.monotonic() + RECOVERY_S
        while not await asyncio.to_thread(self._is_whole, dead):
            if time.monotonic() > deadline:
                raise AssertionError("the system did not recover:\n" + "".join(self._stack.output))
            await asyncio.sleep(0.1)

    async def _freeze(self, pid: int, *, kill: bool) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._chance.uniform(*FREEZE_S))
        finally:
            os.kill(pid, signal.SIGKILL if kill else signal.SIGCONT)

    def _is_whole(self, dead: int) -> bool:
        processes = self._stack.state["processes"]
        if any(entry["pid"] == dead for entry in processes):
            return False
        try:
            for entry in self._stack.processes("redis"):
                with contextlib.closing(redis.Redis.from_url(entry["address"])) as client:
                    client.ping()
            (gateway,) = self._stack.processes("gateway")
            # What the gateway shows may be a moment old: a successor that answers is not.
            if not all(
                _answers(entry["ops"]) for role in LEAVES for entry in self._stack.processes(role)
            ):
                return False
            ready = {
                labels["component"]: value
                for name, labels, value in scrape(gateway["metrics"])
                if name == "mimo_gateway_upstream_endpoints" and labels["state"] == "ready"
            }
        except (redis.exceptions.RedisError, urllib.error.URLError, OSError, grpc.RpcError):
            return False
        return all(ready[role] == len(self._stack.processes(role)) for role in LEAVES)


def _answers(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="readiness")
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
    return bool(status == health_pb2.HealthCheckResponse.SERVING)
