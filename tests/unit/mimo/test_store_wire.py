"""Every word of the store has a number of its own on the wire."""

from mimo.store import Modality, Outcome
from mimo.store.wire import (
    MODALITY_FROM_PROTO,
    MODALITY_TO_PROTO,
    OUTCOME_FROM_PROTO,
    OUTCOME_TO_PROTO,
)
from mimo.v1 import encoding_pb2


def test_each_word_has_the_number_of_its_name() -> None:
    for modality in Modality:
        assert MODALITY_TO_PROTO[modality] == encoding_pb2.Modality.Value(
            f"MODALITY_{modality.name}"
        )
    for outcome in Outcome:
        assert OUTCOME_TO_PROTO[outcome] == encoding_pb2.CacheOutcome.Value(
            f"CACHE_OUTCOME_{outcome.name}"
        )


def test_unspecified_is_no_word() -> None:
    assert set(MODALITY_FROM_PROTO) | {0} == set(encoding_pb2.Modality.values())
    assert set(OUTCOME_FROM_PROTO) | {0} == set(encoding_pb2.CacheOutcome.values())
