"""Options of the vision process."""

import pytest

from mimo.config import parse
from mimo.errors import ConfigError
from services.vision.settings import VisionSettings


def test_only_switches_that_were_given_override_the_checkpoint() -> None:
    settings = parse(VisionSettings, ["--vision-sinks", "column"], {})
    assert settings.numeric_overrides == {"vision_sinks": "column"}
    assert parse(VisionSettings, [], {}).numeric_overrides == {}


@pytest.mark.parametrize(
    "argv",
    [["--vision-sinks", "row"], ["--max-batch-patches", "0"], ["--threads", "-1"]],
)
def test_value_out_of_range_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=argv[0]):
        parse(VisionSettings, argv, {})
