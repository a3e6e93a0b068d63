"""One run: warm up, send the load, collect the samples."""

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mimo.cli.client import Attachment, ChatClient
from mimo.cli.load.loops import closed_loop, open_loop, poisson
from mimo.cli.load.progress import LoadProgress
from mimo.cli.load.sample import Sample, take
from mimo.cli.load.workload import Workload
from mimo.errors import ConfigError

DEFAULT_REQUESTS = 64
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When to send: ``concurrency`` askers, or ``rate`` requests a second whatever becomes of them;
    until so many ``requests`` were sent or ``duration_s`` is over, whichever comes first.

    Raises ConfigError when both ``concurrency`` and ``rate`` are given, or zero.
    """

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency and self.rate:
            raise ConfigError("--concurrency and --rate exclude each other")
        if 0 in (self.rate, self.duration_s):
            raise ConfigError("--rate and --duration are above 0")

    @property
    def workers(self) -> int:
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def num_requests(self) -> int | None:
        """None: as many as the duration has room for."""
        return self.requests or (DEFAULT_REQUESTS if self.duration_s is None else None)

    def arrivals(self) -> Iterable[float]:
        """Of an open loop: seconds after its beginning."""
        assert self.rate is not None
        moments = itertools.islice(poisson(self.rate, self.seed), self.num_requests)
        if (end := self.duration_s) is None:
            return moments
        return itertools.takewhile(lambda moment: moment < end, moments)

    def numbers(self) -> Iterable[int]:
        """Of a closed loop that begins now."""
        numbers = itertools.islice(itertools.count(), self.num_requests)
        if self.duration_s is None:
            return numbers
        end = time.monotonic() + self.duration_s
        return itertools.takewhile(lambda _: time.monotonic() < end, numbers)


def num_distinct_media(workload: Workload, schedule: Schedule) -> int:
    """How many media of each kind there must be; 0 asks for one of its own for each request."""
    if workload.distinct_media or not workload.has_media:
        return workload.distinct_media
    if schedule.num_requests is None:
        raise ConfigError(
            "media are made before the clock starts: give --requests, or --distinct-media"
        )
    return -(-schedule.num_requests // len(workload.kinds))


async def warm_up(
    client: ChatClient, workload: Workload, media: Mapping[tuple[str, int], Attachment], count: int
) -> None:
    """Ask without leaving anything in a cache for the run. Raises the first error."""
    apart = replace(workload, salt=f"{workload.salt} warm-up")
    for number in range(count):
        sample = await take(client, apart.call(number, media))
        if sample.error is not None:
            raise sample.error


async def send(
    client: ChatClient,
    workload: Workload,
    media: Mapping[tuple[str, int], Attachment],
    schedule: Schedule,
    progress: LoadProgress,
) -> list[Sample]:
    """The samples of the whole load."""

    async def ask(number: int, due: float | None = None) -> Sample:
        call = workload.call(number, media)
        sample = await take(client, call, due=due, on_tokens=progress.add_tokens)
        progress.add(sample)
        return sample

    if schedule.rate is not None:
        return await open_loop(ask, schedule.arrivals())
    return await closed_loop(ask, schedule.numbers(), workers=schedule.workers)
