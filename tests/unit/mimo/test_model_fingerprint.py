"""Everything that can change a bit of the output changes a model's fingerprint."""

from typing import Any

import pytest

from mimo.leaf.fingerprint import model_fingerprint

FACTS: dict[str, Any] = {
    "weights": "ab" * 32,
    "config": {"depth": 6, "types": [0, 1]},
    "numeric_profile": {"vision_sinks": "key0"},
    "dtype": "float32",
    "device_type": "cpu",
}


def test_equal_models_agree_whatever_the_order_of_their_fields() -> None:
    turned = FACTS | {"config": {"types": [0, 1], "depth": 6}}
    assert model_fingerprint(**FACTS) == model_fingerprint(**turned)
    assert len(model_fingerprint(**FACTS)) == 64


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
def test_other_model_has_another_fingerprint(change: dict[str, Any]) -> None:
    assert model_fingerprint(**FACTS | change) != model_fingerprint(**FACTS)
