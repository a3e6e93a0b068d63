"""The import contracts hold, and would catch a violation."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

VIOLATIONS = {
    "deployables": ("services/audio/config.py", "import services.vision.config"),
    "library": ("mimo/errors.py", "import mimo.rpc.server"),
    "no-torch": ("services/llm/engine/scheduler.py", "import torch"),
    "no-wire": ("services/vision/model.py", "import mimo.v1.tensor_pb2"),
    "gateway-parts": ("gateway/items.py", "import mimo.encoder"),
    "service-parts": ("services/vision/preprocess.py", "import mimo.media.resize"),
    "decoder-parts": ("services/llm/embeddings.py", "import mimo.batching"),
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources in which to plant violations."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("mimo", "services", "gateway"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", root)
    return root


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_planted_violation_is_caught(copy: Path, contract: str) -> None:
    name, line = VIOLATIONS[contract]
    path = copy / name
    original = path.read_text()
    try:
        path.write_text(f"{original}\n{line}\n")
        result = lint_imports(copy)
    finally:
        path.write_text(original)
    assert result.returncode != 0
    assert "BROKEN" in result.stdout


def test_the_contracts_hold(copy: Path) -> None:
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout
