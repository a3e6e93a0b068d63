"""One process of a component, as the gateway sees it."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import grpc

from gateway.backends.faults import upstream_error
from mimo.errors import MimoError, Unavailable
from mimo.rpc.channel import call_metadata
from mimo.rpc.tensors import dtype_from_proto
from mimo.v1 import replica_pb2, replica_pb2_grpc

DESCRIBE_TIMEOUT_S = 5.0
MAX_FAILURES = 3  # in a row, then the replica rests
REST_S = 5.0  # at first; twice as long each time it fails again
MAX_REST_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica says of itself. ``embedding_dtype`` and ``hidden_size`` are those of the
    embeddings it makes or takes."""

    component: str
    model: str
    fingerprint: str
    hidden_size: int
    embedding_dtype: str
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """What a replica last said of its load, everybody's work counted, in its own unit of work."""

    outstanding: float
    work_per_second: float  # 0 while unknown
    wait_s: float  # of a new piece of work
    service_s: float = 0.0  # that it then takes, typically
    drains: bool = False


class ReplicaState(StrEnum):
    READY = "ready"
    CONNECTING = "connecting"
    FAILING = "failing"
    DRAINING = "draining"


class Replica:
    """A channel, what its process told about itself, our load on it and its recent failures.

    ``load`` is our own work in flight, in the component's unit of work.
    """

    def __init__(self, address: str, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        self.address = address
        self.channel = channel
        self.load = 0.0
        self._clock = clock
        self._num_failures = 0  # in a row
        self._num_rests = 0  # in a row
        self._rests_until = -math.inf
        self._drains = False
        self._report: ReportedLoad | None = None
        self._load_at_report = 0.0
        self._silent_ticks = 0
        self._is_silent = False
        self._calls: dict[object, Callable[[MimoError], None]] = {}
        self._facts: ReplicaFacts | None = None

    @property
    def service_s(self) -> float:
        """How long a typical piece of work takes here once begun; 0 while unknown."""
        return self._report.service_s if self._report is not None else 0.0

    @property
    def rests(self) -> bool:
        """Whether others should be tried first."""
        announced = self._report is not None and self._report.drains
        return self._is_silent or announced or self._clock() < self._rests_until

    @property
    def outstanding(self) -> float:
        """Everybody's work here: what was reported, and what we have sent since."""
        if self._report is None:
            return self.load
        return max(self.load, self._report.outstanding + self.load - self._load_at_report)

    @property
    def work_per_second(self) -> float:
        """As measured by the replica; 0 while unknown."""
        return self._report.work_per_second if self._report is not None else 0.0

    @property
    def wait_s(self) -> float:
        """How long new work would wait here; 0 while unknown. Where work waits, what was sent since
        the report waits as well; where none did, what is more than runs at once does."""
        if self._report is None:
            return 0.0
        rate = self._report.work_per_second
        if self._report.wait_s:
            behind = max(0.0, self.load - self._load_at_report)
        else:
            behind = max(0.0, 1.0 - self.room)
        return self._report.wait_s + (behind / rate if rate else 0.0)

    @property
    def room(self) -> float:
        """Pieces of work that it could begin at once; infinite while unknown."""
        most = self._facts.limits.get("max_running_requests") if self._facts else None
        return math.inf if most is None else most - self.outstanding

    @property
    def is_known(self) -> bool:
        """Whether it answered lately and has not failed since."""
        return self._facts is not None

    @property
    def state(self) -> ReplicaState:
        if self._is_silent:
            return ReplicaState.FAILING
        if self._report is not None and self._report.drains:
            return ReplicaState.DRAINING
        if self._num_failures:
            return ReplicaState.DRAINING if self._drains else ReplicaState.FAILING
        return ReplicaState.READY if self.is_known else ReplicaState.CONNECTING

    async def facts(self) -> ReplicaFacts:
        """Ask once; ask again after a failure, since another process may have taken the address.

        Raises the error of the call (Unavailable when nothing answers).
        """
        if self._facts is None:
            stub = replica_pb2_grpc.ReplicaStub(self.channel)
            try:
                response = await stub.Describe(
                    replica_pb2.DescribeRequest(),
                    timeout=DESCRIBE_TIMEOUT_S,
                    metadata=call_metadata(),
                )
            except grpc.RpcError as error:
                raise upstream_error(error) from None
            self._facts = ReplicaFacts(
                component=response.component,
                model=response.model,
                fingerprint=response.fingerprint,
                hidden_size=response.hidden_size,
                embedding_dtype=dtype_from_proto(response.embedding_dtype),
                limits=dict(response.limits),
            )
        return self._facts

    @contextmanager
    def carrying(self, cost: float) -> Iterator[None]:
        """Count ``cost`` as in flight while the block runs."""
        self.load += cost
        try:
            yield
        finally:
            self.load -= cost

    @contextmanager
    def call(self, break_off: Callable[[MimoError], None]) -> Iterator[None]:
        """While the block runs, ``break_off`` is called should the replica fall silent."""
        token = object()
        self._calls[token] = break_off
        try:
            yield
        finally:
            del self._calls[token]

    def heard(self, report: ReportedLoad) -> None:
        """The replica reported its load."""
        self._report = report
        self._load_at_report = self.load
        self._silent_ticks = 0
        self._is_silent = False

    def introduced(self) -> None:
        """A new connection was answered: perhaps by another process, innocent of what was."""
        self.succeeded()
        self.forget()

    def unwatched(self) -> None:
        """Reports have ended; whoever asks next will learn what became of the process."""
        self._report = None
        self._facts = None
        self._silent_ticks = 0

    def tick(self, most: int) -> None:
        """Time passes. After ``most`` ticks without a report, its calls are broken off."""
        if self._report is None:
            return
        self._silent_ticks += 1
        if self._silent_ticks >= most and not self._is_silent:
            self._is_silent = True
            self._facts = None
            for break_off in list(self._calls.values()):
                break_off(Unavailable("the replica fell silent"))

    def succeeded(self) -> None:
        self._num_failures = 0
        self._num_rests = 0
        self._rests_until = -math.inf
        self._drains = False

    def failed(self, *, drains: bool = False) -> None:
        """Count a failure. A replica that drains rests at once.

        Calls that fail together are one reason to rest, not many.
        """
        self._facts = None
        self._num_failures += 1
        self._drains = drains
        now = self._clock()
        if (drains or self._num_failures >= MAX_FAILURES) and now >= self._rests_until:
            self._rests_until = now + min(REST_S * 2**self._num_rests, MAX_REST_S)
            self._num_rests += 1

    def forget(self) -> None:
        """Ask for the facts again before the next use."""
        self._facts = None
