"""What a request costs the gateway: processor time by face and by outcome.

    python -m tests.bench.gateway_cost [--requests 400] [--rounds 3] [--json]

The gateway and a stand-in for the decoder are processes of their own. The decoder says 16 tokens,
one a message, a step every 10 ms; when it is told to be full, it reports a queue that nobody can
wait for. What is counted is the processor time of the gateway process, all of its threads, per
request; cases take turns, and the best round of each counts.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx

from mimo.rpc.interceptors import DrainGate
from mimo.rpc.replica import Description, Load
from mimo.rpc.server import Service, ServiceServer
from mimo.v1 import gateway_pb2, gateway_pb2_grpc, llm_pb2, llm_pb2_grpc
from tests.support import byte_model
from tests.support.live import ROOT

NUM_TOKENS = 16
STEP_S = 0.01
ASKERS = 16
FULL = Load(queued_work=1000.0, work_per_second=10.0, predicted_wait_seconds=100.0)
SAID = "tell me a story"

Ask = Callable[[], Awaitable[bool]]


class Decoder(llm_pb2_grpc.LanguageModelServicer):
    """Sixteen letters, each in a message of its own."""

    async def GenerateTokens(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        await anext(requests)
        yield llm_pb2.GenerateTokensResponse(started=llm_pb2.GenerationStarted(fingerprint="llm"))
        for position in range(NUM_TOKENS):
            await asyncio.sleep(STEP_S)
            tokens = llm_pb2.GeneratedTokens(ids=[ord("a")], first_index=position)
            yield llm_pb2.GenerateTokensResponse(tokens=tokens)
        finished = llm_pb2.GenerationFinished(reason=llm_pb2.FINISH_REASON_LENGTH)
        yield llm_pb2.GenerateTokensResponse(finished=finished)


async def serve_decoder() -> None:
    """Print the address; a line on standard input changes between free and full."""
    is_full = False
    description = Description("llm", "0", "fake", "llm", "float32", "cpu", 8, "float32")
    service = Service(
        lambda server: llm_pb2_grpc.add_LanguageModelServicer_to_server(Decoder(), server),
        (),
        description,
        lambda: FULL if is_full else Load(),
    )
    server = ServiceServer(service, DrainGate())
    print(await server.start("127.0.0.1:0"), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        is_full = not is_full
    await server.stop()


class Gateway:
    """A gateway process before a decoder process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._decoder = self._start("tests.bench.gateway_cost", "--decoder")
        assert self._decoder.stdout is not None
        address = self._decoder.stdout.readline().strip()
        model = byte_model.write(directory / "model")
        self._log = (directory / "gateway.log").open("w")
        self._gateway = self._start(
            "gateway",
            *("--model", str(model), "--llm", address, "--store", "memory://"),
            *("--rest-address", "127.0.0.1:0", "--address", "127.0.0.1:0"),
            *("--media-workers", "1"),
            stderr=self._log,
        )

    async def doors(self) -> tuple[str, str]:
        """Addresses of REST and gRPC, as the log tells them."""
        while True:
            for line in (self._directory / "gateway.log").read_text().splitlines():
                entry = json.loads(line)
                if entry["message"] == "REST ready":
                    return entry["address"], entry["grpc"]
            if self._gateway.poll() is not None:
                raise RuntimeError((self._directory / "gateway.log").read_text())
            await asyncio.sleep(0.1)

    def toggle(self) -> None:
        """Full becomes free, and the reverse."""
        assert self._decoder.stdin is not None
        self._decoder.stdin.write("\n")
        self._decoder.stdin.flush()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._gateway.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        for process in (self._gateway, self._decoder):
            process.terminate()
        for process in (self._gateway, self._decoder):
            process.wait(30)
        self._log.close()

    def _start(self, module: str, *arguments: str, stderr: Any = None) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )


def rest(http: httpx.AsyncClient, *, stream: bool) -> Ask:
    body = {
        "messages": [{"role": "user", "content": SAID}],
        "max_tokens": NUM_TOKENS,
        "stream": stream,
    }

    async def ask() -> bool:
        response = await http.post(
            "/v1/chat/completions", json=body, headers={"x-request-timeout-ms": "10000"}
        )
        return response.status_code == 200

    return ask


def grpc_call(stub: Any) -> Ask:
    part = gateway_pb2.ContentPart(text=SAID)
    message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[part])
    request = gateway_pb2.GenerateRequest(messages=[message])
    request.sampling.max_tokens = NUM_TOKENS

    async def ask() -> bool:
        try:
            async for _ in stub.Generate(request, timeout=10):
                pass
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            return False
        return True

    return ask


async def cost_ms(gateway: Gateway, ask: Ask, num_requests: int, *, expected: bool) -> float:
    """Processor milliseconds a request. Every one must be answered, or every one refused."""
    numbers = iter(range(num_requests))

    async def work() -> None:
        for _ in numbers:
            assert await ask() is expected

    began = gateway.cpu_s()
    await asyncio.gather(*(work() for _ in range(ASKERS)))
    return 1000 * (gateway.cpu_s() - began) / num_requests


async def until(ask: Ask, expected: bool) -> None:
    while await ask() is not expected:
        await asyncio.sleep(0.05)


async def measure(num_requests: int, rounds: int) -> dict[str, float]:
    """Best round of each case, in processor milliseconds a request."""
    best: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        gateway = Gateway(Path(directory))
        stack.callback(gateway.stop)
        rest_address, grpc_address = await gateway.doors()
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{rest_address}", timeout=60)
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(grpc_address))
        asks = {
            "rest stream": rest(http, stream=True),
            "rest whole": rest(http, stream=False),
            "grpc": grpc_call(gateway_pb2_grpc.GatewayStub(channel)),
        }
        for _ in range(rounds):
            for outcome in ("answered", "refused"):
                for name, ask in asks.items():
                    await until(ask, outcome == "answered")
                    cost = await cost_ms(gateway, ask, num_requests, expected=outcome == "answered")
                    case = f"{name} {outcome}"
                    best[case] = min(cost, best.get(case, cost))
                gateway.toggle()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--decoder", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decoder:
        asyncio.run(serve_decoder())
        return
    best = asyncio.run(measure(options.requests, options.rounds))
    for case, cost in best.items():
        print(f"{case:24} {cost:7.2f} ms")
    if options.json:
        print(json.dumps({"cpu_ms_per_request": best}))


if __name__ == "__main__":
    main()
