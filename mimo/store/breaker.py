"""Stops asking a store that keeps failing, so that its time-outs are not paid again and again."""

from collections import deque
from collections.abc import Callable


class Breaker:
    """Opens after ``failures`` within ``window_s``; then lets one call through per ``probe_s``."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        failures: int = 5,
        window_s: float = 5.0,
        probe_s: float = 1.0,
    ) -> None:
        self._clock = clock
        self._window_s = window_s
        self._probe_s = probe_s
        self._recent: deque[float] = deque(maxlen=failures)  # times of the latest failures
        self._next_probe: float | None = None  # None while closed

    @property
    def is_open(self) -> bool:
        return self._next_probe is not None

    def admit(self) -> bool:
        """Whether to make a call now; True uses up the probe of an open breaker."""
        if self._next_probe is None:
            return True
        now = self._clock()
        if now < self._next_probe:
            return False
        self._next_probe = now + self._probe_s
        return True

    def succeeded(self) -> None:
        if self.is_open:
            self._next_probe = None
            self._recent.clear()

    def failed(self) -> None:
        now = self._clock()
        self._recent.append(now)
        many = len(self._recent) == self._recent.maxlen
        if many and not self.is_open and now - self._recent[0] <= self._window_s:
            self._next_probe = now + self._probe_s
