"""What the gateway finds out about itself and its upstreams while nobody asks."""

import asyncio
from collections.abc import Collection

from gateway.backends.replica import Replica
from gateway.routing import ReplicaPool
from mimo.errors import MimoError
from mimo.metrics import Metrics

SETTLED_INTERVAL_S = 1.0
UNSETTLED_INTERVAL_S = 0.2  # while a replica is missing, somebody may be waiting for it
LAG_INTERVAL_S = 0.5


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


async def watch_loop_lag(metrics: Metrics) -> None:
    """Record how late the event loop wakes, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        metrics.observe("mimo_gateway_event_loop_lag_seconds", max(0.0, loop.time() - due))


async def _ask(pool: ReplicaPool, replica: Replica) -> bool:
    try:
        await pool.facts(replica)
    except MimoError:
        return False
    return True
