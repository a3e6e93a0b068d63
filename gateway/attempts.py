"""One piece of work on its way through the replicas that may do it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.backends.replica import Replica, ReplicaFacts
from gateway.routing import ReplicaPool
from mimo.errors import EmbeddingMismatch, MimoError, Reason, Retry, Unavailable

MAX_ATTEMPTS = 4
PAUSE_S = 0.25
MAX_PAUSES = 60  # long enough for a process to be started again

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Attempts:
    """Where to try next. Replicas that are full, lost or not accepted are passed over.

    When the last replica was lost while it worked, the work waits for one to come back: a restart
    is not the client's problem. Work that nobody has taken yet does not wait. Trying again is paid
    from the pool's retry budget: lost work waits for it, work that was refused does not.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        key: bytes,
        *,
        cost: float = 0.0,
        accepts: Callable[[ReplicaFacts], bool] = lambda _: True,
        prefer: str | None = None,
    ) -> None:
        """``key`` names the work: equal work goes to the same replica. ``cost`` is its load;
        ``prefer`` the address of a replica that has done the like before."""
        self.number = 0  # attempts that failed
        self._pool = pool
        self._key = key
        self._cost = cost
        self._accepts = accepts
        self._prefer = prefer
        self._owes = False
        self._tried: set[Replica] = set()
        self._last: MimoError | None = None
        self._was_lost = False
        self._pauses_left = MAX_PAUSES

    async def next(self) -> tuple[Replica, ReplicaFacts]:
        """A replica that answers. Raises Unavailable, or Overloaded, when there is none."""
        if self._owes:
            self._owes = False
            await self._pool.retries.take()
        elif self.number == 0:
            self._pool.retries.deposit()
        while True:
            try:
                replica = await self._pool.pick(
                    self._key, cost=self._cost, exclude=self._tried, prefer=self._prefer
                )
            except Unavailable as nobody:
                await self._pause(nobody)
                continue
            try:
                facts = await self._pool.facts(replica)
            except MimoError:
                self._tried.add(replica)
                continue
            if self._accepts(facts):
                return replica, facts
            self._tried.add(replica)

    def failed(self, replica: Replica, error: MimoError) -> None:
        """Note that a replica could not do the work. Raises the error when none could."""
        reason = _redispatch_reason(error)
        is_refusal = error.retry is Retry.LATER
        if reason is None or (is_refusal and not self._pool.retries.try_take()):
            raise error
        # A replica that drains has refused at no cost, and will be gone from the list soon.
        self._owes = not is_refusal and reason != "draining"
        self.number += 1
        self._tried.add(replica)
        self._last = error
        self._was_lost = error.retry is Retry.ELSEWHERE
        self._pool.failed(replica, error)
        self._pool.count_redispatch(reason)
        logger.warning(
            "replica could not do the work",
            extra={
                "upstream": self._pool.component,
                "address": replica.address,
                "reason": error.reason.value,
                "error": error.message,
            },
        )

    async def _pause(self, nobody: Unavailable) -> None:
        """Every replica has been tried: begin again after a while, or give up."""
        if not self._was_lost or self.number >= MAX_ATTEMPTS or self._pauses_left == 0:
            raise self._verdict(nobody) from self._last
        self._pauses_left -= 1
        await asyncio.sleep(PAUSE_S)
        self._tried.clear()

    def _verdict(self, nobody: Unavailable) -> MimoError:
        """What to tell the client. gRPC's own words for a lost peer hold its address."""
        if self._last is None or isinstance(self._last, Unavailable):
            return nobody
        return self._last


async def run_somewhere(
    attempts: Attempts,
    work: Callable[[Replica, ReplicaFacts, int], Awaitable[ResultT]],
    cost: float = 0.0,
) -> ResultT:
    """Do work that is done by one call. ``work`` receives the replica, what it says of itself and
    the attempt's number; ``cost`` is counted on the replica meanwhile."""
    while True:
        replica, facts = await attempts.next()
        try:
            with replica.carrying(cost):
                result = await work(replica, facts, attempts.number)
        except MimoError as error:
            attempts.failed(replica, error)
        else:
            replica.succeeded()
            return result


def _redispatch_reason(error: MimoError) -> str | None:
    """Why another replica may do better; None when it would not."""
    if isinstance(error, EmbeddingMismatch):
        return "fingerprint"
    if error.retry is Retry.ELSEWHERE:
        return "draining" if error.reason is Reason.DRAINING else "unavailable"
    return "unavailable" if error.retry is Retry.LATER else None
