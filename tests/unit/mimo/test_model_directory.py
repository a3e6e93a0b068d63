"""Which model a process uses when it is told, and when it is not."""

from pathlib import Path

import pytest

from mimo.checkpoint import directory
from mimo.checkpoint.directory import model_directory
from mimo.errors import CheckpointError


def test_given_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_directory(str(tmp_path)) == tmp_path


def test_bundled_model_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "BUNDLED", tmp_path)
    with pytest.raises(CheckpointError, match="MIMO_MODEL"):
        model_directory("")
    (tmp_path / "config.json").write_text("{}")
    assert model_directory("") == tmp_path


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--model"):
        model_directory(str(tmp_path))
