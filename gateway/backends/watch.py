"""Following what replicas say of their load, and noticing when they say nothing.

A replica reports at least once a second. One that falls silent is frozen, whatever TCP says: its
calls are broken off, so that they go on elsewhere, and it gets no new ones until it speaks again.
Silence is counted in ticks of this process, and only those that come in time, so that neither a
pause of our own nor a crowd that keeps us from listening is held against anyone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

import grpc

from gateway.backends.replica import Replica, ReportedLoad
from mimo.v1 import replica_pb2, replica_pb2_grpc

TICK_S = 0.5
LATE_TICK_S = 1.0  # since the one before: we have not been listening
SILENT_TICKS = 10  # 5 s without a word
RETRY_S = 0.25


class LoadWatch:
    """Follows a changing set of replicas until cancelled."""

    def __init__(
        self,
        replicas: Callable[[], Awaitable[Collection[Replica]]],
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``changed`` is called whenever the state of a replica may have."""
        self._replicas = replicas
        self._changed = changed
        self._clock = clock
        self._followers: dict[Replica, asyncio.Task[None]] = {}

    async def run(self) -> None:
        looked = self._clock()
        try:
            while True:
                before, looked = looked, self._clock()
                await self._look(counts=looked - before < LATE_TICK_S)
                await asyncio.sleep(TICK_S)
        finally:
            for follower in self._followers.values():
                follower.cancel()
            await asyncio.gather(*self._followers.values(), return_exceptions=True)

    async def _look(self, *, counts: bool) -> None:
        replicas = await self._replicas()
        for gone in self._followers.keys() - set(replicas):
            self._followers.pop(gone).cancel()
        for replica in replicas:
            if replica not in self._followers:
                self._followers[replica] = asyncio.create_task(_follow(replica, self._changed))
            if counts:
                replica.tick(SILENT_TICKS)
        self._changed()


async def _follow(replica: Replica, changed: Callable[[], None]) -> None:
    """Read the reports of one replica, through its restarts."""
    stub = replica_pb2_grpc.ReplicaStub(replica.channel)
    while True:
        call = stub.WatchLoad(replica_pb2.WatchLoadRequest())
        is_first = True
        try:
            async for report in call:
                if is_first:
                    replica.introduced()
                    is_first = False
                replica.heard(_load_from_proto(report))
                changed()
        except grpc.RpcError:
            pass
        finally:
            call.cancel()
            replica.unwatched()
            changed()
        await asyncio.sleep(RETRY_S)


def _load_from_proto(report: replica_pb2.WatchLoadResponse) -> ReportedLoad:
    return ReportedLoad(
        outstanding=report.queued_work + report.running_work,
        work_per_second=report.work_per_second,
        wait_s=report.predicted_wait_seconds,
        service_s=report.service_seconds,
        drains=report.draining,
    )
