"""How processes begin and end: drains, restarts, refusals to start, nothing left behind."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file, save_file

from mimo.errors import Reason, Unavailable
from mimo.rpc.channel import open_channel
from mimo.rpc.status import from_exception
from mimo.v1 import llm_pb2, llm_pb2_grpc
from tests.support import samples, tiny
from tests.support.live import (
    PATIENCE_S,
    ROOT,
    Rest,
    Stack,
    eventually,
    image,
    rest_body,
    start,
    start_stack,
)

NUM_TOKENS = 200
FREE = "127.0.0.1:0"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Service:
    """One process by itself, on ports of its own choice."""

    process: "subprocess.Popen[str]"
    output: list[str]

    def logged(self, message: str) -> dict[str, Any]:
        """The first log line with this message, once there is one."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            assert self.process.poll() is None, "".join(self.output)
            lines = [json.loads(line) for line in self.output if line.startswith("{")]
            found.extend(line for line in lines if line["message"] == message)
            return bool(found)

        eventually(f"the log says {message!r}", look)
        return found[0]


@dataclass
class Services:
    """Starts services; all of them are gone at the end."""

    started: list[Service] = field(default_factory=list)

    def start(self, module: str, *flags: str) -> Service:
        output: list[str] = []
        addresses = ("--address", FREE, "--ops-address", FREE, "--metrics-address", FREE)
        process = start([module, *addresses, *flags], output)
        self.started.append(Service(process, output))
        return self.started[-1]


@pytest.fixture
def services() -> Iterator[Services]:
    running = Services()
    yield running
    for service in running.started:
        service.process.kill()
        service.process.wait()


# ── draining ──


async def test_a_decoder_told_to_stop_finishes_its_stream(services: Services) -> None:
    service = services.start("services.llm", "--store", "memory://")
    ready = service.logged("ready")
    sampling = llm_pb2.Sampling(
        max_tokens=NUM_TOKENS, ignore_stop=True, top_p=1.0, repetition_penalty=1.0
    )
    begin = llm_pb2.GenerateTokensRequest(
        start=llm_pb2.GenerateTokensStart(prompt_ids=[72, 101, 121], sampling=sampling)
    )
    async with open_channel(ready["ops"]) as ops, open_channel(ready["address"]) as channel:
        readiness = health_pb2_grpc.HealthStub(ops).Watch(
            health_pb2.HealthCheckRequest(service="readiness")
        )
        assert (await readiness.read()).status == SERVING
        stub = llm_pb2_grpc.LanguageModelStub(channel)
        call = stub.GenerateTokens(iter([begin]))
        ids: list[int] = []
        while not ids:
            ids += (await call.read()).tokens.ids
        service.process.terminate()
        assert (await readiness.read()).status == NOT_SERVING
        assert len(ids) < NUM_TOKENS  # it was told in the middle of the stream
        with pytest.raises(Unavailable) as refused:
            await refusal(stub.GenerateTokens(iter([begin])))
        assert refused.value.reason is Reason.DRAINING
        while (response := await call.read()) is not grpc.aio.EOF:
            ids += response.tokens.ids
        assert len(ids) == NUM_TOKENS
        readiness.cancel()
    assert service.process.wait(PATIENCE_S) == 0


async def refusal(call: Any) -> None:
    """Raises the error that a call ends with."""
    try:
        await call.read()
    except Exception as error:
        raise from_exception(error) from None


async def test_a_gateway_told_to_stop_finishes_its_stream(services: Services, stack: Stack) -> None:
    upstreams = [
        word
        for role in ("vision", "audio", "llm")
        for word in (f"--{role}", stack.processes(role)[0]["address"])
    ]
    service = services.start(
        "gateway", "--store", stack.state["store"], "--rest-address", FREE, *upstreams
    )
    url = f"http://{service.logged('REST ready')['address']}"
    async with (
        open_channel(service.logged("ready")["ops"]) as ops,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http,
    ):
        readiness = health_pb2_grpc.HealthStub(ops).Watch(
            health_pb2.HealthCheckRequest(service="readiness")
        )
        assert (await readiness.read()).status == SERVING
        body = rest_body("hello", max_tokens=NUM_TOKENS, ignore_eos=True, stream=True)
        body |= {"stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            received: list[str] = []
            while not any('"content":"' in line for line in received[2:]):
                received.append(await anext(lines))
            service.process.terminate()
            assert (await readiness.read()).status == NOT_SERVING
            received += [line async for line in lines]
        readiness.cancel()
    events = [line.removeprefix("data: ") for line in received if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == NUM_TOKENS
    assert service.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("module", ["services.vision", "services.audio"])
def test_an_idle_encoder_told_to_stop_exits_with_success(services: Services, module: str) -> None:
    service = services.start(module, "--store", "memory://")
    service.logged("ready")
    service.process.terminate()
    assert service.process.wait(PATIENCE_S) == 0


# ── refusing to start ──


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_omni(tmp_path_factory.mktemp("model") / "omni")


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def without_audio_tokenizer(model: Path) -> None:
    shutil.rmtree(model / "audio_tokenizer")


def change_tensors(model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    (model / "model.safetensors.index.json").unlink()


def without_a_norm(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.pop("visual.blocks.1.norm1.weight"))


def with_a_long_norm(model: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    change_tensors(model, lambda tensors: tensors.update({name: torch.ones(17)}))


def unchanged(model: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("module", "break_model", "flags", "words"),
    [
        ("services.llm", with_a_long_norm, (), ("model.layers.1.input_layernorm", "17", "16")),
        ("services.vision", without_a_norm, (), ("visual.blocks.1.norm1.weight",)),
        ("services.audio", without_audio_tokenizer, (), ("audio_tokenizer",)),
        ("services.llm", unchanged, ("--dtypo", "float32"), ("--dtypo",)),
        ("services.vision", unchanged, ("--dtype", "float8"), ("--dtype", "float8")),
        ("services.vision", unchanged, ("--attention", "fast"), ("fast",)),
        ("gateway", without_config, (), ("config.json",)),
        ("gateway", unchanged, ("--media-workers", "0"), ("--media-workers",)),
    ],
)
def test_a_process_that_cannot_start_says_why_in_one_line(
    checkpoint: Path,
    tmp_path: Path,
    module: str,
    break_model: Callable[[Path], None],
    flags: Sequence[str],
    words: Sequence[str],
) -> None:
    model = tmp_path / "broken"
    shutil.copytree(checkpoint, model)
    break_model(model)
    where = ("--model", str(model), "--store", "memory://", "--address", FREE)
    assert_one_line(run(module, *where, *flags), *words)


def test_a_port_in_use_is_named() -> None:
    """In the last line: gRPC has its own say before."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("gateway", "--store", "memory://", "--address", address)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"mimo-gateway: --address: {address} ")
    assert "Traceback" not in result.stderr


def test_an_unknown_variable_is_named() -> None:
    assert_one_line(run("gateway", MIMO_ADRESS="127.0.0.1:1"), "MIMO_ADRESS")


def run(module: str, *flags: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", module, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )


def assert_one_line(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """Log lines aside, one line."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert result.returncode == 1, result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("mimo-")
    assert all(word in lines[0] for word in words), lines[0]
    assert result.stdout == ""


# ── the supervisor ──


def test_a_killed_leaf_comes_back_at_its_address(stack: Stack, rest: Rest) -> None:
    before = stack.processes("vision")[0]
    os.kill(before["pid"], signal.SIGKILL)
    eventually(
        "the ready file is rewritten",
        lambda: stack.processes("vision")[0]["pid"] != before["pid"],
    )
    after = stack.processes("vision")[0]
    assert (after["address"], after["ops"]) == (before["address"], before["ops"])
    parts = (image(samples.png(41)), "what is it?")
    eventually(
        "pictures are answered again",
        lambda: rest.post(*parts, max_tokens=1).status_code == 200,
    )
    assert any("vision-0 ended with status" in line for line in stack.output)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where a stack of the test's own keeps temporary files."""
    directory = tmp_path / "t"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_stack_leaves_nothing_behind(
    tmp_path: Path, home: Path, number: signal.Signals
) -> None:
    running = start_stack(tmp_path, TMPDIR=str(home))
    with ended(running.process):
        state = running.state
        family = descendants(running.process.pid)
        assert family > {entry["pid"] for entry in state["processes"]}  # and media workers
        assert list(home.iterdir())
        assert running.stop(number) == 0
    assert family.isdisjoint(living())
    assert list(home.iterdir()) == []
    assert not running.ready_file.exists()
    for address in (state["grpc"], state["rest"].removeprefix("http://")):
        host, port = address.split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))


@pytest.mark.parametrize(
    ("command", "status"), [(("up", "--rest-port", "0", "--grpc-port", "0"), 0), (("demo",), 130)]
)
def test_stopping_while_starting_leaves_nothing_behind(
    home: Path, command: Sequence[str], status: int
) -> None:
    output: list[str] = []
    process = start(["mimo.cli", *command], output, TMPDIR=str(home))
    with ended(process):
        eventually("the store runs", lambda: any(line.startswith("redis-0") for line in output))
        family = descendants(process.pid)
        assert family
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == status
    assert family.isdisjoint(living())
    assert list(home.iterdir()) == []


@contextlib.contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Whatever the block asserts, the process is gone after it, and its children with it."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def living() -> dict[int, int]:
    """Parents of the processes that run."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc")
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    return parents


def descendants(ancestor: int) -> set[int]:
    parents = living()
    family = {ancestor}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return family - {ancestor}
