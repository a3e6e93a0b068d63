"""How long something took lately."""

import time
from collections.abc import Callable

WEIGHT = 0.2  # of the newest in the mean
HALF_LIFE_S = 2.0


class RecentMean:
    """A moving mean of durations that fades while nothing is added.

    It decides who is refused; were it not to fade, one bad moment would refuse everybody for good.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_s = 0.0
        self._updated = clock()

    @property
    def seconds(self) -> float:
        age_s = self._clock() - self._updated
        return float(self._mean_s * 0.5 ** (age_s / HALF_LIFE_S))

    def add(self, seconds: float) -> None:
        mean_s = self.seconds
        self._mean_s = mean_s + WEIGHT * (seconds - mean_s)
        self._updated = self._clock()
