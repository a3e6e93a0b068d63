"""How long a request spent in each of its stages."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class Stage(StrEnum):
    FETCH = "fetch"
    DECODE_MEDIA = "decode_media"
    ENCODE = "encode"
    STORE = "store"


class Stopwatch:
    """Wall time per stage: several items in one stage at once count once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._running = dict.fromkeys(Stage, 0)
        self._since = dict.fromkeys(Stage, 0.0)
        self._spent = dict.fromkeys(Stage, 0.0)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        if self._running[stage] == 0:
            self._since[stage] = self._clock()
        self._running[stage] += 1
        try:
            yield
        finally:
            self._running[stage] -= 1
            if self._running[stage] == 0:
                self._spent[stage] += self._clock() - self._since[stage]

    def ms(self, stage: Stage) -> float:
        return self._spent[stage] * 1000

    def ms_until(self, time: float) -> float:
        """From the beginning to a time on the clock."""
        return (time - self._began) * 1000

    @property
    def total_ms(self) -> float:
        return self.ms_until(self._clock())
