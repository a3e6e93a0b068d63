"""The committed stubs are what the protos generate, and every file says what it is."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def test_the_committed_stubs_are_fresh(tmp_path: Path) -> None:
    bin_dir = Path(sys.executable).parent
    outputs = ("--python_out", "--grpc_python_out")
    quiet = ("--mypy_out", "--mypy_grpc_out")
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "protos")),
            *(f"{flag}={tmp_path}" for flag in outputs),
            *(f"{flag}=quiet:{tmp_path}" for flag in quiet),
            *map(str, PROTOS),
        ],
        check=True,
        env={"PATH": f"{bin_dir}:/usr/bin:/bin"},
    )
    generated = {path.name: path.read_text() for path in (tmp_path / "mimo" / "v1").iterdir()}
    committed = {
        path.name: path.read_text()
        for path in (ROOT / "mimo" / "v1").iterdir()
        if "_pb2" in path.name
    }
    assert generated == committed, "run `make protos`"


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_rpc_and_service_is_documented(path: Path) -> None:
    previous = ""
    for line in path.read_text().splitlines():
        text = line.strip()
        if text.startswith(("rpc ", "service ")):
            assert previous.startswith("//"), f"{path.name}: {text}"
        previous = text
