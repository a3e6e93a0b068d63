"""The Replica service: what a process runs and how loaded it is. Implemented once, here."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mimo.rpc.interceptors import DrainGate
from mimo.rpc.tensors import dtype_to_proto
from mimo.v1 import replica_pb2, replica_pb2_grpc

LOAD_INTERVAL_S = 0.1
MAX_QUIET_INTERVALS = 10  # then the load is told again, so that silence means trouble


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Which attention backend serves a kind of layer, and why."""

    layer_kind: str
    backend: str
    reason: str
    demoted: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """Constant facts of one process, as ``Replica.Describe`` tells them."""

    component: str
    version: str
    model: str
    fingerprint: str
    dtype: str
    device: str
    hidden_size: int
    embedding_dtype: str
    numeric_profile: Mapping[str, str] = field(default_factory=dict)
    attention: Sequence[AttentionChoice] = ()
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """Work in the component's unit (patches, seconds of audio, sequences); waits in seconds."""

    queued_work: float = 0.0
    running_work: float = 0.0
    work_per_second: float = 0.0
    predicted_wait_seconds: float = 0.0
    service_seconds: float = 0.0


class ReplicaServicer(replica_pb2_grpc.ReplicaServicer):
    """Answers Describe and WatchLoad for one process."""

    def __init__(self, description: Description, load: Callable[[], Load], gate: DrainGate) -> None:
        self._description = description
        self._load = load
        self._gate = gate

    async def Describe(
        self, request: replica_pb2.DescribeRequest, context: object
    ) -> replica_pb2.DescribeResponse:
        return _description_to_proto(self._description)

    async def WatchLoad(
        self, request: replica_pb2.WatchLoadRequest, context: object
    ) -> AsyncIterator[replica_pb2.WatchLoadResponse]:
        previous: tuple[Load, bool] | None = None
        quiet = 0
        while True:
            current = (self._load(), self._gate.draining)
            quiet += 1
            if current != previous or quiet >= MAX_QUIET_INTERVALS:
                yield _load_to_proto(*current)
                previous = current
                quiet = 0
            await asyncio.sleep(LOAD_INTERVAL_S)


def _description_to_proto(description: Description) -> replica_pb2.DescribeResponse:
    return replica_pb2.DescribeResponse(
        component=description.component,
        version=description.version,
        model=description.model,
        fingerprint=description.fingerprint,
        numeric_profile=dict(description.numeric_profile),
        dtype=dtype_to_proto(description.dtype),
        device=description.device,
        attention=[
            replica_pb2.AttentionChoice(
                layer_kind=choice.layer_kind,
                backend=choice.backend,
                reason=choice.reason,
                demoted=choice.demoted,
            )
            for choice in description.attention
        ],
        limits=dict(description.limits),
        hidden_size=description.hidden_size,
        embedding_dtype=dtype_to_proto(description.embedding_dtype),
    )


def _load_to_proto(load: Load, draining: bool) -> replica_pb2.WatchLoadResponse:
    return replica_pb2.WatchLoadResponse(
        queued_work=load.queued_work,
        running_work=load.running_work,
        work_per_second=load.work_per_second,
        predicted_wait_seconds=load.predicted_wait_seconds,
        service_seconds=load.service_seconds,
        draining=draining,
    )
