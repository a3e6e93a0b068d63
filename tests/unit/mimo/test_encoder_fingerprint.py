"""Everything that can change a bit of an embedding changes the encoder's fingerprint."""

from typing import Any

import pytest

from mimo.encoder.fingerprint import encoder_fingerprint

FACTS: dict[str, Any] = {
    "weights": "ab" * 32,
    "config": {"depth": 6, "types": [0, 1]},
    "numeric_profile": {"vision_sinks": "key0"},
    "dtype": "float32",
    "device_type": "cpu",
}


def test_equal_encoders_agree_whatever_the_order_of_their_fields() -> None:
    turned = FACTS | {"config": {"types": [0, 1], "depth": 6}}
    assert encoder_fingerprint(**FACTS) == encoder_fingerprint(**turned)
    assert len(encoder_fingerprint(**FACTS)) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "cd" * 32},
        {"config": {"depth": 6, "types": [1, 0]}},
        {"numeric_profile": {"vision_sinks": "column"}},
        {"dtype": "bfloat16"},
        {"device_type": "cuda"},
    ],
)
def test_other_encoder_has_another_fingerprint(change: dict[str, Any]) -> None:
    assert encoder_fingerprint(**FACTS | change) != encoder_fingerprint(**FACTS)
