"""What every model service does on its way up."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.config import option, parse
from mimo.errors import CheckpointError, ConfigError
from mimo.leaf.settings import LeafSettings
from mimo.leaf.startup import MULTITHREADED_WIDTH, Startup
from mimo.metrics import VISION, Metrics
from mimo.nn.attention import AttentionNeeds, Sink

NEEDS = AttentionNeeds(
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    v_head_dim=4,
    scale=0.5,
    causal=False,
    left=None,
    right=None,
    sink=Sink.NONE,
    paged=False,
    dtype=torch.float32,
    device="cpu",
)


@dataclass(frozen=True, kw_only=True)
class Settings(LeafSettings):
    """A leaf."""

    switches = ("sinks", "window")

    sinks: str = option("", help="sinks")
    window: int = option(0, help="window")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "toy"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({}))
    return directory


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def start(model: Path, **options: Any) -> tuple[Startup, Metrics]:
    metrics = Metrics(VISION)
    return Startup(Settings(model=str(model), device="cpu", **options), metrics), metrics


@pytest.mark.parametrize(
    ("wanted", "width", "expected"),
    [(0, MULTITHREADED_WIDTH - 1, 1), (0, MULTITHREADED_WIDTH, 3), (2, 8, 2), (2, 4096, 2)],
)
def test_narrow_models_get_one_thread_unless_told_otherwise(
    model: Path, threads: int, wanted: int, width: int, expected: int
) -> None:
    startup, _ = start(model, threads=wanted)
    startup.use_threads(width)
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(("processes", "expected"), [(1, 3), (2, 1), (8, 1)])
def test_processes_of_one_model_share_the_cores(
    model: Path, threads: int, processes: int, expected: int
) -> None:
    startup, _ = start(model)
    startup.use_threads(MULTITHREADED_WIDTH, processes)
    assert torch.get_num_threads() == expected


def test_a_phase_is_measured_and_a_failed_one_is_not(model: Path) -> None:
    startup, metrics = start(model)
    with startup.phase("weights"):
        pass
    with pytest.raises(ZeroDivisionError), startup.phase("calibrate"):
        raise ZeroDivisionError
    assert metrics.value("mimo_startup_seconds", phase="weights") > 0
    assert metrics.value("mimo_startup_seconds", phase="calibrate") == 0


def test_one_demoted_layer_demotes_its_kind(model: Path) -> None:
    startup, metrics = start(model)
    startup.selector.select(NEEDS, "full").demoted = True
    startup.selector.select(replace(NEEDS, num_heads=4), "full")
    startup.selector.select(replace(NEEDS, left=1, right=1), "band")
    startup.probe()
    assert metrics.value("mimo_attention_demoted", layer_kind="full") == 1
    assert metrics.value("mimo_attention_demoted", layer_kind="band") == 0


def test_a_description_says_what_runs(model: Path) -> None:
    startup, _ = start(model, attention="vision=reference")
    startup.selector.select(NEEDS, "full")
    facts: dict[str, Any] = {
        "weights": "ab" * 32,
        "config": {"depth": 2},
        "numeric_profile": {"sinks": "key0"},
        "hidden_size": 8,
        "limits": {"max_item_patches": 4},
    }
    description = startup.describe(**facts)
    assert (description.component, description.model) == (VISION, "toy")
    assert (description.device, description.dtype) == ("cpu", "float32")
    (choice,) = description.attention
    assert (choice.layer_kind, choice.backend, choice.demoted) == ("full", "reference", False)
    wide, _ = start(model, dtype="bfloat16", served_model_name="other")
    other = wide.describe(**facts)
    assert (other.model, other.embedding_dtype) == ("other", "bfloat16")
    assert other.fingerprint != description.fingerprint


def test_only_switches_that_were_given_override_the_checkpoint() -> None:
    settings = parse(Settings, ["--window", "7"], {})
    assert settings.numeric_overrides == {"window": 7}
    assert parse(Settings, [], {}).numeric_overrides == {}


@pytest.mark.parametrize("argv", [["--threads", "-1"], ["--dtype", "float16"]])
def test_a_value_out_of_range_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=argv[0]):
        parse(Settings, argv, {})


def test_a_start_needs_a_model_and_a_known_backend(model: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        start(model / "nowhere")
    with pytest.raises(ConfigError, match="fa9"):
        start(model, attention="fa9")
