"""A first piece of work at start: it warms the device up and shows how fast it is."""

import time
from collections.abc import Callable

RUNS = 3


def fastest_s(work: Callable[[], object]) -> float:
    """Seconds of the best of a few runs; the first ones pay for what is made on first use."""
    durations = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return min(durations)
