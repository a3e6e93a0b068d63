"""What the gateway reads of a model directory, and what it refuses to start with."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.model import Model, SamplingDefaults
from mimo.errors import CheckpointError
from tests.support import byte_model as ids


def edit(directory: Path, name: str, **changes: Any) -> None:
    path = directory / name
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return ids.write(tmp_path / "tiny")


def test_a_directory_gives_names_ids_and_limits(directory: Path) -> None:
    model = Model.open(directory)
    assert (model.name, model.max_context_tokens) == ("tiny", 4096)
    assert model.stop_token_ids == (ids.END_OF_TEXT, ids.IM_END)
    assert model.media_token_ids is not None
    assert model.media_token_ids.video_start == ids.VIDEO_START
    banned = {ids.IM_START, ids.TOOL_RESPONSE, ids.END_TOOL_RESPONSE, ids.IMAGE_PAD, ids.AUDIO_END}
    assert banned <= set(model.banned_token_ids)
    assert not {ids.THINK, ids.TOOL_CALL, ids.IM_END} & set(model.banned_token_ids)
    assert Model.open(directory, "other").name == "other"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": False, "temperature": 0.8}, (0.0, 1.0, 0, 32768)),
        ({}, (0.0, 1.0, 0, 32768)),
        ({"do_sample": True}, (1.0, 1.0, 0, 32768)),
        ({"temperature": 0.8, "top_p": 0.95, "top_k": 40}, (0.8, 0.95, 40, 32768)),
        ({"temperature": 0.0}, (0.0, 1.0, 0, 32768)),
        ({"max_new_tokens": 256, "top_k": -1}, (0.0, 1.0, 0, 256)),
    ],
)
def test_defaults_come_from_the_generation_configuration(
    config: dict[str, Any], expected: tuple[float, float, int, int]
) -> None:
    defaults = SamplingDefaults.from_generation_config(config)
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.max_tokens) == expected


def test_a_model_without_encoders_takes_text_only(directory: Path) -> None:
    edit(directory, "config.json", vision_config={}, audio_config={})
    model = Model.open(directory)
    assert model.processor is None
    assert set(model.banned_token_ids) == {
        ids.IM_START,
        ids.TOOL_RESPONSE,
        ids.END_TOOL_RESPONSE,
    }


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"max_position_embeddings": None}, "max_position_embeddings"),
        ("tokenizer_config.json", {"mimo_template": {"form": "flash"}}, "unknown chat format"),
        ("tokenizer.json", {"added_tokens": []}, "no token"),
    ],
)
def test_an_incomplete_directory_is_refused(
    directory: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    edit(directory, file, **changes)
    with pytest.raises(CheckpointError, match=message):
        Model.open(directory)


def test_a_model_that_never_ends_is_refused(directory: Path) -> None:
    edit(directory, "config.json", eos_token_id=None)
    edit(directory, "generation_config.json", eos_token_id=None)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Model.open(directory)


def test_contradicting_media_ids_are_refused(directory: Path) -> None:
    processor = ids.config()["processor_config"] | {"image_token_id": ids.VIDEO_PAD}
    edit(directory, "config.json", processor_config=processor)
    with pytest.raises(CheckpointError, match="image_pad is 306 .* is 305"):
        Model.open(directory)


def test_media_ids_that_are_text_are_refused(directory: Path) -> None:
    tokenizer = ids.tokenizer_definition()
    tokenizer["added_tokens"] = [
        token for token in tokenizer["added_tokens"] if token["id"] != ids.AUDIO_PAD
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="audio_pad 307"):
        Model.open(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_and_broken_files_name_themselves(directory: Path, name: str) -> None:
    (directory / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        Model.open(directory)
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} does not exist"):
        Model.open(directory)
