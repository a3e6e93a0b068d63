"""An engine hangs while the rest of its process lives: the replica gives itself up, and whoever
waited there for a first token is answered by the other."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mimo.rpc.channel import open_channel
from mimo.rpc.server import NOT_SERVING, REASON_KEY, SERVING
from tests.support.live import PATIENCE_S, eventually, start
from tests.support.load import FACES, Clients, Question

FREE = "127.0.0.1:0"
START_S = 120.0  # on a busy machine
QUESTIONS = tuple(Question(f"tell me about {n}", (f"tell me about {n}",)) for n in range(8))
REASON = "a step of the engine did not end in 4 s"


@dataclass
class Service:
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

        eventually(f"the log says {message!r}", look, START_S)
        return found[0]


@dataclass
class System:
    """Two decoders, one of which can be made to hang, and a gateway before them."""

    services: list[Service] = field(default_factory=list)

    def start(self, module: str, *flags: str) -> Service:
        output: list[str] = []
        process = start([module, "--store", "memory://", "--address", FREE, *flags], output)
        self.services.append(Service(process, output))
        return self.services[-1]


@pytest.fixture
def system() -> Iterator[System]:
    running = System()
    yield running
    for service in running.services:
        service.process.kill()
        service.process.wait()


@pytest.mark.check
@pytest.mark.timeout(300)
async def test_a_hang_before_the_first_token_is_answered_elsewhere(system: System) -> None:
    hanging = system.start("tests.support.hanging_decoder", "--max-step-seconds", "4")
    decoders = (hanging, system.start("services.llm"))
    addresses = ",".join(decoder.logged("ready")["address"] for decoder in decoders)
    gateway = system.start("gateway", "--rest-address", FREE, "--llm", addresses)
    doors = gateway.logged("REST ready")
    async with (
        open_channel(hanging.logged("ready")["ops"]) as ops,
        Clients.opened(f"http://{doors['address']}", doors["grpc"]) as clients,
    ):
        check = health_pb2_grpc.HealthStub(ops).Watch
        readiness = check(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await readiness.read()).status == SERVING
        calm = [await clients.ask(question, "grpc") for question in QUESTIONS]
        os.kill(hanging.process.pid, signal.SIGUSR1)
        asked = [
            asyncio.create_task(clients.ask(question, FACES[number % 2], timeout_s=PATIENCE_S))
            for number, question in enumerate(QUESTIONS)
        ]
        assert (await readiness.read()).status == NOT_SERVING
        call = health_pb2_grpc.HealthStub(ops).Check(
            health_pb2.HealthCheckRequest(service="readiness")
        )
        assert (await call).status == NOT_SERVING
        assert (REASON_KEY, REASON) in tuple(await call.trailing_metadata())
        answers = await asyncio.gather(*asked)
        readiness.cancel()
    assert [answer.error for answer in (*calm, *answers)] == [""] * 2 * len(QUESTIONS)
    assert [answer.said for answer in answers] == [answer.said for answer in calm]
    assert await asyncio.to_thread(hanging.process.wait, PATIENCE_S) == 1
    eventually("it has said why", lambda: hanging.output[-1:] == [f"mimo-llm: {REASON}\n"])
