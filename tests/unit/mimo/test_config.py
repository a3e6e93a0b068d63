"""Configuration is strict: flags beat variables, unknown names and bad values are errors."""

from dataclasses import dataclass

import pytest

from mimo.config import option, parse
from mimo.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    """A sample."""

    model: str = option(help="where the model is")
    max_batch: int = option(4, help="items at most", at_least=1)
    warm: bool = option(False, help="warm up")
    rate: float | None = option(None, help="rate", at_least=0)
    form: str = option("json", help="form", choices=("json", "text"))

    def __post_init__(self) -> None:
        if self.warm and not self.rate:
            raise ValueError("--warm needs a --rate")


def test_a_flag_beats_its_variable_and_a_variable_beats_the_default() -> None:
    env = {"MIMO_MODEL": "m", "MIMO_MAX_BATCH": "7", "HOME": "/"}
    assert parse(Sample, [], env) == Sample("m", 7)
    assert parse(Sample, ["--max-batch", "8"], env).max_batch == 8


def test_a_bool_needs_no_value_and_an_optional_is_parsed() -> None:
    assert parse(Sample, ["--model=m", "--warm", "--rate", "0.5"], {}) == Sample("m", 4, True, 0.5)


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        ([], {}, "--model .* is required"),
        (["--model", "m", "--max-bach", "3"], {}, "--max-bach"),
        (["--model", "m", "--max-b", "3"], {}, "--max-b"),
        (["--model", "m"], {"MIMO_MAX_BACH": "3"}, "MIMO_MAX_BACH.*mean MIMO_MAX_BATCH"),
        (["--model", "m"], {"MIMO_XYZ": "3"}, "MIMO_XYZ$"),
        (["--model", "m"], {"MIMO_LLM_SERVICE_HOST": "10.0.0.1"}, "enableServiceLinks"),
        (["--model", "m"], {"MIMO_LLM_PORT": "tcp://10.0.0.1:50053"}, "enableServiceLinks"),
        (["--model", "m", "--max-batch", "many"], {}, "--max-batch.*whole number"),
        (["--model", "m"], {"MIMO_MAX_BATCH": "many"}, "MIMO_MAX_BATCH.*whole number"),
        (["--model", "m", "--form", "xml"], {}, "json, text"),
        (["--model", "m", "--warm", "maybe"], {}, "true or false"),
        (["--model", "m", "--max-batch", "0"], {}, "--max-batch.*at least 1"),
        (["--model", "m", "--rate", "nan"], {}, "--rate.*at least 0"),
        (["--model", "m", "--warm"], {}, "--warm needs a --rate"),
    ],
)
def test_every_mistake_is_named(argv: list[str], env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(Sample, argv, env)


def test_help_teaches_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Sample, ["--help"], {}, program="mimo-sample")
    text = capsys.readouterr().out
    assert "--max-batch" in text and "MIMO_MAX_BATCH" in text and "default: 4" in text
