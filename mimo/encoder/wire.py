"""Encode calls as messages: what every encoder's servicer reads first and answers."""

import math
import time
from collections.abc import AsyncIterator
from typing import Literal, Protocol, TypeVar

from mimo.batching import Load
from mimo.encoder.request import Encoded, EncodeRequest, PlanT
from mimo.errors import InvalidRequest, Reason
from mimo.rpc import replica
from mimo.rpc.tensors import header_from_proto, header_to_proto
from mimo.store import Modality, Outcome, parse_key
from mimo.v1 import encoding_pb2, tensor_pb2

OUTCOMES = {
    Outcome.HIT: encoding_pb2.CACHE_OUTCOME_HIT,
    Outcome.MISS: encoding_pb2.CACHE_OUTCOME_MISS,
    Outcome.JOINED: encoding_pb2.CACHE_OUTCOME_JOINED,
    Outcome.REPAIRED: encoding_pb2.CACHE_OUTCOME_REPAIRED,
    Outcome.BYPASS: encoding_pb2.CACHE_OUTCOME_BYPASS,
}


class StartMessage(Protocol):
    """A request message that is a ``start`` or a ``chunk``."""

    def WhichOneof(self, oneof_group: Literal["message"]) -> str | None: ...


MessageT = TypeVar("MessageT", bound=StartMessage)


async def read_start(messages: AsyncIterator[MessageT]) -> MessageT:
    """The first message of an upload. Raises InvalidRequest unless it is a ``start``."""
    message = await anext(aiter(messages), None)
    if message is None or message.WhichOneof("message") != "start":
        raise InvalidRequest(
            "the first message must be a start", reason=Reason.MISSING_FIELD, field="start"
        )
    return message


def request_from_proto(
    target: encoding_pb2.EncodeTarget,
    payload: tensor_pb2.TensorHeader,
    *,
    modality: Modality,
    plan: PlanT,
    cost: float,
    remaining_s: float | None,
) -> EncodeRequest[PlanT]:
    """What to encode. ``remaining_s`` is the call's time left. Raises InvalidRequest."""
    dtype, shape = header_from_proto(payload)
    return EncodeRequest(
        key=parse_key(target.key),
        encoder_fingerprint=target.encoder_fingerprint,
        modality=modality,
        plan=plan,
        cost=cost,
        payload_dtype=dtype,
        payload_shape=shape,
        attempt=target.attempt,
        bypass=target.bypass,
        inline=target.inline,
        deadline=deadline_after(remaining_s),
    )


def deadline_after(remaining_s: float | None) -> float:
    """When a call that has ``remaining_s`` left ends, on the clock of ``time.monotonic``."""
    return math.inf if remaining_s is None else time.monotonic() + remaining_s


def encoded_to_proto(encoded: Encoded) -> encoding_pb2.Encoded:
    """The answer; the chunks of ``encoded.tensor``, if it has one, follow in the same stream."""
    is_inline = encoded.tensor is not None
    return encoding_pb2.Encoded(
        manifest_digest=b"" if is_inline else encoded.manifest_digest,
        embedding=header_to_proto(encoded.manifest.dtype, encoded.manifest.shape),
        outcome=OUTCOMES[encoded.outcome],
        encode_ms=encoded.encode_ms,
        inline=is_inline,
    )


def replica_load(load: Load) -> replica.Load:
    """The batcher's load as ``Replica.WatchLoad`` tells it."""
    return replica.Load(
        queued_work=load.queued_work,
        running_work=load.running_work,
        work_per_second=load.work_per_second or 0.0,
        predicted_wait_seconds=load.predicted_wait_s,
    )
