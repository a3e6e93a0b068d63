"""The receiving process of the embedding bench: one path, one size, on orders from the bench."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import httpx

from mimo.metrics import Metrics
from mimo.rpc.tensors import chunk_from_proto
from mimo.store import EmbeddingKey
from mimo.store.redis_store import RedisStore
from mimo.tensor import Assembler, Buffer
from mimo.v1 import tensor_pb2
from tests.bench.embedding_sender import (
    GRPC_OPTIONS,
    METHOD,
    MIB,
    PATIENT,
    WARM_UP,
    WIDTH,
    Ports,
)

SMALL_CALLS_PER_S = 200


class Receiver:
    """Fetches an embedding over each path. Every method returns its bytes, checksum compared."""

    def __init__(self, ports: Ports, store_url: str) -> None:
        self._ports = ports
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{ports.rpc}", options=GRPC_OPTIONS)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False)
        self._store = RedisStore.from_url(store_url, Metrics("llm"), limits=PATIENT)
        self._zmq: Any = None

    async def store(self, size: str) -> Buffer:
        call = self._channel.unary_unary(f"{METHOD}store")
        lookup = await self._store.get(EmbeddingKey((await call(size.encode())).decode()))
        assert lookup.tensor is not None, lookup.status
        return lookup.tensor.data

    async def stream(self, size: str) -> Buffer:
        call = self._channel.unary_stream(
            f"{METHOD}stream", response_deserializer=tensor_pb2.TensorChunk.FromString
        )
        rows = int(float(size) * MIB) // (4 * WIDTH)  # a header tells it in production
        assembler = Assembler("float32", (rows, WIDTH))
        async for chunk in call(size.encode()):
            assembler.add(chunk_from_proto(chunk))
        return assembler.finish().data

    async def unary(self, size: str) -> Buffer:
        call = self._channel.unary_unary(
            f"{METHOD}unary", response_deserializer=tensor_pb2.TensorChunk.FromString
        )
        message = await call(size.encode())
        return _checked(message.data, message.crc32c)

    async def http(self, size: str) -> Buffer:
        response = await self._http.get(f"http://127.0.0.1:{self._ports.http}/{size}")
        body = response.json()
        return _checked(base64.b64decode(body["data"]), body["crc32c"])

    async def zmq(self, size: str) -> Buffer:
        import zmq
        import zmq.asyncio

        if self._zmq is None:
            self._zmq = zmq.asyncio.Context.instance().socket(zmq.REQ)
            self._zmq.connect(f"tcp://127.0.0.1:{self._ports.zmq}")
        await self._zmq.send(size.encode())
        checksum, frame = await self._zmq.recv_multipart(copy=False)
        return _checked(frame.buffer, int(frame_bytes(checksum)))

    async def small(self) -> None:
        await self._channel.unary_unary(f"{METHOD}small")(b"ping")


def run_receiver(pipe: Any, ports: Ports, store_url: str, path: str, size: str) -> None:
    """Orders are ``fetch``, ``beside``, ``idle`` and ``stop``; see the answers below."""
    asyncio.run(_receive(pipe, ports, store_url, path, size))


async def _receive(pipe: Any, ports: Ports, store_url: str, path: str, size: str) -> None:
    receiver = Receiver(ports, store_url)
    fetch: Callable[[str], Awaitable[Buffer]] = getattr(receiver, path)
    await receiver.small()
    await fetch(WARM_UP)
    pipe.send("ready")
    loop = asyncio.get_running_loop()
    while (order := await loop.run_in_executor(None, pipe.recv)) != "stop":
        if order == "fetch":
            began = time.perf_counter()
            data = await fetch(size)
            pipe.send((time.perf_counter() - began, _checksum(data)))
            del data
        else:
            transfer = fetch(size) if order == "beside" else asyncio.sleep(0.1)
            pipe.send(await _small_calls_beside(receiver, transfer))


async def _small_calls_beside(receiver: Receiver, transfer: Awaitable[Any]) -> list[float]:
    """Seconds of small calls on the same channel while a transfer goes on."""
    seconds: list[float] = []
    moving = asyncio.ensure_future(transfer)
    while not moving.done():
        began = time.perf_counter()
        await receiver.small()
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(1 / SMALL_CALLS_PER_S)
    await moving
    return seconds


def _checked(data: Buffer, checksum: int) -> Buffer:
    assert _checksum(data) == checksum
    return data


def _checksum(data: Buffer) -> int:
    """CRC-32C, piece by piece: the library copies what it reads, and that is nobody's peak."""
    value, view = 0, memoryview(data)
    for start in range(0, len(view), MIB):
        value = google_crc32c.extend(value, bytes(view[start : start + MIB]))
    return int(value)


def frame_bytes(frame: Any) -> bytes:
    """The content of a small ZeroMQ frame."""
    return bytes(frame.buffer)


def cpu_s(pid: int) -> float:
    """Time on a processor of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def forget_peak(pid: int) -> float:
    """Start to measure a process's peak of memory anew. Returns what it holds now, in MiB."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_mib(pid, "VmRSS")


def peak_mib(pid: int) -> float:
    return _status_mib(pid, "VmHWM")


def _status_mib(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(name)
