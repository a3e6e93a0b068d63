"""How much may be tried again.

When replicas fail, every request that is tried again is load that the rest did not have before. A
budget keeps that small beside the first attempts: a fleet in trouble is not asked twice as much.
"""

import asyncio
import time
from collections.abc import Callable

RATIO = 0.1  # second attempts for each first one
RESERVE = 32.0  # that one dying replica may cost at once
RESERVE_PER_S = 10.0  # so that a quiet gateway can fail over too

_ROUNDING = 1e-6  # ten tenths are a whole


class RetryBudget:
    """A bucket of second attempts. First attempts fill it, and so does time, slowly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._balance = RESERVE
        self._counted = clock()

    def deposit(self) -> None:
        """Note a first attempt."""
        self._fill(RATIO)

    def try_take(self) -> bool:
        """Whether something may be tried again now."""
        self._fill()
        if self._balance < 1.0 - _ROUNDING:
            return False
        self._balance -= 1.0
        return True

    async def take(self) -> None:
        """Wait until something may be tried again: work that was lost is never given up for it."""
        while not self.try_take():
            await asyncio.sleep(max(1.0 - self._balance, _ROUNDING) / RESERVE_PER_S)

    def _fill(self, more: float = 0.0) -> None:
        now = self._clock()
        earned = (now - self._counted) * RESERVE_PER_S + more
        self._balance = min(self._balance + earned, RESERVE)
        self._counted = now
