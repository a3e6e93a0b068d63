"""Noticing that a stream has stopped to flow."""

import asyncio
import math
from collections.abc import Callable

from mimo.errors import MimoError, Unavailable


class StallWatch:
    """Breaks a call off when its peer is waited for too long: one timer for all of its messages."""

    def __init__(self, break_off: Callable[[MimoError], None], patience_s: float) -> None:
        self._break_off = break_off
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def resume(self) -> None:
        """From now on the peer is waited for."""
        self._due = self._loop.time() + self._patience_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)

    def pause(self) -> None:
        """It is not its turn."""
        self._due = math.inf

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() >= self._due:
            self._break_off(Unavailable(f"the decoder made no progress for {self._patience_s:g} s"))
        elif self._due < math.inf:
            self._timer = self._loop.call_at(self._due, self._look)
