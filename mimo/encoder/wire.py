"""Encode calls as messages: what every encoder's servicer reads first, and what it answers."""

from mimo.batching import Load
from mimo.encoder.request import Encoded, EncodeRequest, PlanT
from mimo.rpc import replica
from mimo.rpc.tensors import header_from_proto, header_to_proto
from mimo.store import Modality, parse_key
from mimo.store.wire import OUTCOME_TO_PROTO
from mimo.v1 import encoding_pb2, tensor_pb2


def request_from_proto(
    target: encoding_pb2.EncodeTarget,
    payload: tensor_pb2.TensorHeader,
    *,
    modality: Modality,
    plan: PlanT,
    cost: float,
    deadline: float,
) -> EncodeRequest[PlanT]:
    """What to encode. Raises InvalidRequest for a malformed key or an unknown dtype."""
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
        deadline=deadline,
    )


def encoded_to_proto(encoded: Encoded) -> encoding_pb2.Encoded:
    """The answer; the chunks of ``encoded.tensor``, if it has one, follow in the same stream."""
    is_inline = encoded.tensor is not None
    return encoding_pb2.Encoded(
        manifest_digest=b"" if is_inline else encoded.manifest_digest,
        embedding=header_to_proto(encoded.manifest.dtype, encoded.manifest.shape),
        outcome=OUTCOME_TO_PROTO[encoded.outcome],
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
