"""Which replica of a component a piece of work belongs to.

Rendezvous hashing keeps equal work on one replica, where it is joined or cached; bounded load sends
the overflow of a hot replica to the next in its order. A replica that failed three times in a row
rests, unless no other is left: a rest is a preference, never an outage of its own.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection

import grpc

from gateway.backends.replica import Replica, ReplicaFacts, ReplicaState
from gateway.targets import Targets
from mimo.errors import EmbeddingMismatch, MimoError, Reason, Retry, Unavailable
from mimo.metrics import Metrics
from mimo.rpc.channel import open_channel

LOAD_BOUND = 1.25  # times the average load


class ReplicaPool:
    """The replicas of one component. Channels open on first use, inside the running loop."""

    def __init__(
        self,
        component: str,
        targets: Targets,
        metrics: Metrics,
        *,
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.component = component
        self._targets = targets
        self._metrics = metrics
        self._open_channel = open_channel
        self._clock = clock
        self._replicas: dict[str, Replica] = {}

    async def replicas(self) -> list[Replica]:
        """The replicas of the current target list."""
        addresses = await self._targets.addresses()
        for address in self._replicas.keys() - set(addresses):
            # Running calls keep the channel alive and finish; it closes with the last of them.
            del self._replicas[address]
        for address in addresses:
            if address not in self._replicas:
                channel = self._open_channel(address)
                self._replicas[address] = Replica(address, channel, self._clock)
        return list(self._replicas.values())

    async def pick(
        self, key: bytes, *, cost: float = 1.0, exclude: Collection[Replica] = ()
    ) -> Replica:
        """The replica for work named ``key``. Raises Unavailable when every one is excluded."""
        candidates = [replica for replica in await self.replicas() if replica not in exclude]
        if not candidates:
            raise Unavailable(
                f"no {self.component} replica can take the request",
                retry_after_s=2.0,
                component=self.component,
            )
        awake = [replica for replica in candidates if not replica.rests]
        ranked = sorted(awake or candidates, key=lambda replica: _score(key, replica.address))
        bound = LOAD_BOUND * (sum(replica.load for replica in ranked) + cost) / len(ranked)
        for replica in ranked:
            if replica.load == 0 or replica.load + cost <= bound:
                return replica
        return min(ranked, key=lambda replica: replica.load)

    async def facts(self, replica: Replica) -> ReplicaFacts:
        """What a replica says of itself. A failure to answer is held against it and raised."""
        try:
            return await replica.facts()
        except MimoError as error:
            self.failed(replica, error)
            raise
        finally:
            self._publish()

    async def known_facts(self) -> list[ReplicaFacts]:
        """What every replica that answers says of itself."""
        facts = await asyncio.gather(
            *(self.facts(replica) for replica in await self.replicas()), return_exceptions=True
        )
        return [each for each in facts if isinstance(each, ReplicaFacts)]

    async def is_live(self) -> bool:
        """Whether any replica answers. None is asked while one is known to."""
        if any(replica.is_known for replica in await self.replicas()):
            return True
        return bool(await self.known_facts())

    def failed(self, replica: Replica, error: MimoError) -> None:
        """Hold an error against a replica, if it is to blame for it."""
        if isinstance(error, EmbeddingMismatch):
            replica.forget()  # another model took the address
        elif error.retry is Retry.ELSEWHERE:
            replica.failed(drains=error.reason is Reason.DRAINING)
        self._publish()

    def count_redispatch(self, reason: str) -> None:
        """Count work that was sent on from one replica to another."""
        self._metrics.inc(
            "mimo_gateway_redispatched_total", component=self.component, reason=reason
        )

    async def close(self) -> None:
        for replica in self._replicas.values():
            await replica.channel.close()
        self._replicas.clear()

    def _publish(self) -> None:
        counts = Counter(replica.state for replica in self._replicas.values())
        for state in ReplicaState:
            self._metrics.set(
                "mimo_gateway_upstream_endpoints",
                counts[state],
                component=self.component,
                state=state,
            )


def _score(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=key[:64], digest_size=8).digest()
