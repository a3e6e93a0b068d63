"""A local stack, before anything of it has started, and the watch over a process of it."""

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from mimo.cli.child import Child, ChildSpec
from mimo.cli.ports import can_listen
from mimo.cli.stack import Stack, StackConfig
from mimo.errors import ConfigError


async def refused(tmp_path: Path, **options: Any) -> str:
    """The words of a refusal that comes before the model is even looked at."""
    config = StackConfig(model=tmp_path / "none", replicas={}, **options)
    with pytest.raises(ConfigError) as caught:
        async with Stack.running(config, lambda line: pytest.fail(line)):
            pytest.fail("it runs")
    return str(caught.value)


@pytest.mark.parametrize("name", ["rest_port", "grpc_port"])
async def test_a_port_that_is_taken_is_told_at_once(tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = await refused(tmp_path, **{name: port})
    assert f"--{name.replace('_', '-')}: port {port} is in use" in words


def test_a_port_that_a_server_has_just_left_can_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not can_listen(port)
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # the server's side waits, as TCP will have it
    assert can_listen(port)


async def test_a_ready_file_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    assert "--ready-file" in await refused(tmp_path, ready_file=tmp_path / "no" / "ready.json")


async def test_a_process_that_cannot_be_started_again_is_tried_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mimo.cli.child.RESTART_DELAYS_S", (0.0,))
    program, target = tmp_path / "program", shutil.which("true")
    assert target is not None
    program.symlink_to(target)
    failed, back = asyncio.Event(), asyncio.Event()

    def report(line: str) -> None:
        if "No such file" in line:
            failed.set()
            program.symlink_to(target)
        elif not failed.is_set():
            program.unlink()
        elif child.pid != first:
            back.set()

    child = Child(ChildSpec("llm", 0, [str(program)], "a:1"), tmp_path / "log")
    await child.start()
    first = child.pid
    stack = Stack(StackConfig(model=tmp_path, replicas={}), tmp_path, report)
    watching = asyncio.create_task(stack._watch(child))
    returning = asyncio.create_task(back.wait())
    await asyncio.wait({watching, returning}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    returning.cancel()
    await asyncio.gather(watching, returning, return_exceptions=True)
    assert back.is_set()
