"""What the gateway finds out about itself and its upstreams while nobody asks."""

import asyncio
import time
from collections.abc import Callable, Collection

from gateway.backends.replica import Replica
from gateway.routing import ReplicaPool
from mimo.errors import MimoError
from mimo.metrics import Metrics

SETTLED_INTERVAL_S = 1.0
UNSETTLED_INTERVAL_S = 0.2  # while a replica is missing, somebody may be waiting for it
LAG_INTERVAL_S = 0.1
LAG_WEIGHT = 0.3  # of the newest in the mean


async def keep_acquainted(pools: Collection[ReplicaPool]) -> None:
    """Ask replicas who they are before anybody needs to know, until cancelled.

    So the state of every replica that the pools show is true in quiet times, too.
    """
    while True:
        is_settled = await get_acquainted(pools)
        await asyncio.sleep(SETTLED_INTERVAL_S if is_settled else UNSETTLED_INTERVAL_S)


async def get_acquainted(pools: Collection[ReplicaPool]) -> bool:
    """Ask every replica once; those that are known answer from memory. Whether all answered."""
    asked = [_ask(pool, replica) for pool in pools for replica in await pool.replicas()]
    return all(await asyncio.gather(*asked))


class LoopLag:
    """How late the event loop wakes those who wait: everything that a request waits for here takes
    that much longer. 0 until it runs."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._mean_s = 0.0
        self._due = float("inf")

    @property
    def seconds(self) -> float:
        """Of late, and now: a wake-up that is overdue counts before it comes."""
        overdue_s = self._clock() - self._due
        return self._mean_s + LAG_WEIGHT * max(0.0, overdue_s - self._mean_s)

    async def run(self) -> None:
        """Measure and record, until cancelled."""
        while True:
            self._due = self._clock() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            lag_s = max(0.0, self._clock() - self._due)
            self._mean_s += LAG_WEIGHT * (lag_s - self._mean_s)
            self._metrics.observe("mimo_gateway_event_loop_lag_seconds", lag_s)


async def _ask(pool: ReplicaPool, replica: Replica) -> bool:
    try:
        await pool.facts(replica)
    except MimoError:
        return False
    return True
