"""An environment with only the gateway's extra holds no torch, and serves."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from mimo.cli.ports import HOST, free_ports

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.check, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with `.[gateway]` and nothing else."""
    directory = tmp_path_factory.mktemp("gateway-only") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--editable", f"{ROOT}[gateway]"], check=True, cwd=ROOT)
    return directory


@pytest.fixture(scope="module")
def rest_url(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway run from that environment, without any model service."""
    port, grpc_port = islice(free_ports(), 2)
    log = tmp_path_factory.mktemp("log") / "gateway.log"
    command = [
        str(environment / "bin" / "mimo-gateway"),
        *("--model", str(ROOT / "models" / "mimo-tiny")),
        *("--rest-address", f"{HOST}:{port}", "--address", f"{HOST}:{grpc_port}"),
        *("--store", "memory://"),
    ]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    url = f"http://{HOST}:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=5)
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    yield url
    process.terminate()
    assert process.wait(30) == 0


def test_there_is_no_torch(environment: Path) -> None:
    code = (
        "import importlib.util as u; print([n for n in ('torch', 'safetensors') if u.find_spec(n)])"
    )
    python = str(environment / "bin" / "python")
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_it_lists_its_model(rest_url: str) -> None:
    with urllib.request.urlopen(f"{rest_url}/v1/models") as response:
        assert json.load(response)["data"][0]["id"] == "mimo-tiny"


def test_it_plans_a_prompt_and_says_who_is_missing(rest_url: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"content-type": "application/json"}
    count = urllib.request.Request(f"{rest_url}/v1/tokenize", body, headers)
    with urllib.request.urlopen(count) as response:
        assert json.load(response)["count"] > 0
    ask = urllib.request.Request(f"{rest_url}/v1/chat/completions", body, headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(ask)
    assert caught.value.code == 503
    assert "language model" in json.load(caught.value)["error"]["message"]
    caught.value.close()
