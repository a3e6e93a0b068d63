"""Which replica of a component a piece of work belongs to.

Rendezvous hashing keeps equal work on one replica, where it is joined or cached; bounded load sends
the overflow of a hot replica to the next in its order. Load is time: everybody's outstanding work
over the rate at which the replica does it. A replica that failed three times in a row rests, and so
does one that is silent or drains, unless no other is left: a rest is a preference, never an outage
of its own.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import grpc

from gateway.backends.replica import Replica, ReplicaFacts, ReplicaState
from gateway.backends.watch import LoadWatch
from gateway.budget import RetryBudget
from gateway.targets import Targets
from mimo.errors import EmbeddingMismatch, MimoError, Overloaded, Reason, Retry, Unavailable
from mimo.metrics import Metrics
from mimo.rpc.channel import open_channel

LOAD_BOUND = 1.25  # times the average load
# A preferred replica has something that is dear to make again: it may be this much busier.
PREFERENCE_BOUND = 1.5
PREFERENCE_SLACK = 2.0  # pieces of work
MAX_WAIT_S = 30.0  # for work to begin; whoever would wait longer is told so at once


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
        self._expected = 0.0
        self._published: Counter[ReplicaState] | None = None
        self.retries = RetryBudget(clock)

    async def watch(self) -> None:
        """Follow the load of every replica, until cancelled."""
        await LoadWatch(self.replicas, self._publish, self._clock).run()

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
        self,
        key: bytes,
        *,
        cost: float = 1.0,
        exclude: Collection[Replica] = (),
        prefer: str | None = None,
    ) -> Replica:
        """The replica for work named ``key``: that at address ``prefer`` unless it is far busier
        than the others. Raises Unavailable when every one is excluded."""
        candidates = [replica for replica in await self.replicas() if replica not in exclude]
        if not candidates:
            raise Unavailable(
                f"no {self.component} replica can take the request",
                retry_after_s=2.0,
                component=self.component,
            )
        awake = [replica for replica in candidates if not replica.rests]
        ranked = sorted(awake or candidates, key=lambda replica: _score(key, replica.address))
        rates = _rates(ranked)
        average = (sum(replica.outstanding for replica in ranked) + cost) / sum(rates.values())

        def seconds(replica: Replica) -> float:
            return (replica.outstanding + cost) / rates[replica]

        for replica in ranked:
            slack = PREFERENCE_SLACK * cost / rates[replica]
            if replica.address == prefer and seconds(replica) <= PREFERENCE_BOUND * average + slack:
                return replica
        for replica in ranked:
            if replica.outstanding == 0 or seconds(replica) <= LOAD_BOUND * average:
                return replica
        return min(ranked, key=seconds)

    def check_room(self, left_s: float) -> None:
        """Raises Overloaded when no replica could finish new work in the time that is left, or
        begin it in reasonable time.

        Knows only what replicas have reported: the last word is theirs.
        """
        awake = [replica for replica in self._replicas.values() if not replica.rests]
        if not awake:
            return
        replica = min(awake, key=lambda replica: replica.wait_s)
        wait_s = replica.wait_s
        rate = sum(replica.work_per_second for replica in awake)
        if rate > 0.0:
            room = sum(max(0.0, replica.room) for replica in awake) if wait_s == 0.0 else 0.0
            wait_s += max(0.0, self._expected - room) / rate
        if wait_s > MAX_WAIT_S or wait_s + replica.service_s > left_s:
            raise Overloaded(
                f"every {self.component} replica has a longer queue than this request may wait",
                retry_after_s=min(max(wait_s, 1.0), MAX_WAIT_S),
            )

    @contextmanager
    def expecting(self, cost: float) -> Iterator[None]:
        """Count work that will be sent once it is prepared, which the block does."""
        self._expected += cost
        try:
            yield
        finally:
            self._expected -= cost

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
        if counts == self._published:
            return
        self._published = counts
        for state in ReplicaState:
            self._metrics.set(
                "mimo_gateway_upstream_endpoints",
                counts[state],
                component=self.component,
                state=state,
            )


def _rates(replicas: Collection[Replica]) -> dict[Replica, float]:
    """Work per second of each; a replica that has not measured is taken for an average one."""
    known = [replica.work_per_second for replica in replicas if replica.work_per_second]
    average = sum(known) / len(known) if known else 1.0
    return {replica: replica.work_per_second or average for replica in replicas}


def _score(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=key[:64], digest_size=8).digest()
