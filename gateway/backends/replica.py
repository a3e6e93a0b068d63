"""One process of a component, as the gateway sees it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import grpc

from mimo.rpc.channel import call_metadata
from mimo.rpc.status import from_rpc_error
from mimo.rpc.tensors import dtype_from_proto
from mimo.v1 import replica_pb2, replica_pb2_grpc

DESCRIBE_TIMEOUT_S = 5.0
MAX_FAILURES = 3  # in a row, then the replica rests
REST_S = 5.0


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


class ReplicaState(StrEnum):
    READY = "ready"
    CONNECTING = "connecting"
    FAILING = "failing"
    DRAINING = "draining"


class Replica:
    """A channel, what its process told about itself, our load on it and its recent failures."""

    def __init__(self, address: str, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        self.address = address
        self.channel = channel
        self.load = 0.0  # our work in flight
        self._clock = clock
        self._num_failures = 0  # in a row
        self._rests_until = float("-inf")
        self._drains = False
        self._facts: ReplicaFacts | None = None

    @property
    def rests(self) -> bool:
        """Whether others should be tried first."""
        return self._clock() < self._rests_until

    @property
    def is_known(self) -> bool:
        """Whether it answered lately and has not failed since."""
        return self._facts is not None

    @property
    def state(self) -> ReplicaState:
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
                raise from_rpc_error(error) from None
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

    def succeeded(self) -> None:
        self._num_failures = 0
        self._rests_until = float("-inf")
        self._drains = False

    def failed(self, *, drains: bool = False) -> None:
        """Count a failure. A replica that drains rests at once."""
        self._facts = None
        self._num_failures += 1
        self._drains = drains
        if drains or self._num_failures >= MAX_FAILURES:
            self._rests_until = self._clock() + REST_S

    def forget(self) -> None:
        """Ask for the facts again before the next use."""
        self._facts = None
