"""The store's words as numbers of the protos, and back."""

from mimo.store.base import Outcome
from mimo.store.keys import Modality
from mimo.v1 import encoding_pb2

MODALITY_TO_PROTO = {
    Modality.IMAGE: encoding_pb2.MODALITY_IMAGE,
    Modality.AUDIO: encoding_pb2.MODALITY_AUDIO,
    Modality.VIDEO: encoding_pb2.MODALITY_VIDEO,
}
MODALITY_FROM_PROTO = {number: modality for modality, number in MODALITY_TO_PROTO.items()}

OUTCOME_TO_PROTO = {
    Outcome.HIT: encoding_pb2.CACHE_OUTCOME_HIT,
    Outcome.MISS: encoding_pb2.CACHE_OUTCOME_MISS,
    Outcome.JOINED: encoding_pb2.CACHE_OUTCOME_JOINED,
    Outcome.REPAIRED: encoding_pb2.CACHE_OUTCOME_REPAIRED,
    Outcome.BYPASS: encoding_pb2.CACHE_OUTCOME_BYPASS,
}
OUTCOME_FROM_PROTO = {number: outcome for outcome, number in OUTCOME_TO_PROTO.items()}
