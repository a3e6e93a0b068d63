"""The --attention option: one backend for all components or one for each."""

import pytest

from mimo.errors import ConfigError
from mimo.nn.attention.override import override_for


@pytest.mark.parametrize(
    ("option", "vision", "llm"),
    [
        ("", None, None),
        ("sdpa", "sdpa", "sdpa"),
        ("vision=reference", "reference", None),
        ("vision=reference, llm=sdpa", "reference", "sdpa"),
        ("sdpa,vision=reference", "reference", "sdpa"),
    ],
)
def test_backend_of_a_component(option: str, vision: str | None, llm: str | None) -> None:
    assert override_for("vision", option) == vision
    assert override_for("llm", option) == llm


@pytest.mark.parametrize("option", ["eyes=sdpa", "=sdpa", "vision=sdpa,vision=sdpa", "sdpa,sdpa"])
def test_mistake_is_never_ignored(option: str) -> None:
    with pytest.raises(ConfigError, match="--attention"):
        override_for("vision", option)
