"""Ways to get an embedding from one process to another, side by side.

    python -m tests.bench.embedding_path [--rounds 5] [--sizes 0.25,1,8,64] [--json FILE]

The sender and the receiver are processes of their own. Every path moves the same float32 rows and
the receiver ends with one contiguous buffer whose checksum it has compared. Paths take turns, so
that a slow moment of the machine hits all of them; what counts are the ratios.

    store     our Redis store: chunks and a manifest written by one side, read by the other
    stream    our gRPC chunks with a CRC-32C each, as embeddings travel when the store is down
    unary     one gRPC message that holds everything
    http      HTTP with the bytes as base64 in JSON
    zmq       one raw ZeroMQ frame (left out when pyzmq is not installed)
"""

import argparse
import asyncio
import base64
import contextlib
import importlib.util
import json
import multiprocessing
import os
import resource
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np

from mimo.cli.child import CHILD_ENVIRONMENT
from mimo.metrics import Metrics
from mimo.rpc.tensors import chunk_from_proto, chunks_to_proto
from mimo.store import EmbeddingKey, Manifest
from mimo.store.redis_store import RedisLimits, RedisStore
from mimo.tensor import Assembler, RawTensor, crc32c
from mimo.v1 import tensor_pb2
from tests.support.load import percentile
from tests.support.redis import ValkeyProcess

MIB = 1 << 20
WIDTH = 1024  # values in a row
SIZES_MIB = (0.25, 1.0, 8.0, 64.0)
METHOD = "/bench.Embedding/"
SMALL_CALLS_PER_S = 200
GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
PATHS = ("store", "stream", "unary", "http", "zmq")


def embedding(size_mib: float) -> RawTensor:
    rows = int(size_mib * MIB) // (4 * WIDTH)
    values = np.random.default_rng(7).standard_normal((rows, WIDTH), dtype=np.float32)
    return RawTensor("float32", (rows, WIDTH), values.tobytes())


# ── the sender: a process that answers every path ──


class Sender(grpc.GenericRpcHandler):
    """Answers gRPC calls whose request is the size in MiB as text."""

    def __init__(self, store: RedisStore, tensors: dict[str, RawTensor]) -> None:
        self._store = store
        self._tensors = tensors

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = str(details.method).removeprefix(METHOD)
        if method == "stream":
            return grpc.unary_stream_rpc_method_handler(
                self._stream, response_serializer=tensor_pb2.TensorChunk.SerializeToString
            )
        answer = {"unary": self._unary, "store": self._put, "small": self._small}[method]
        return grpc.unary_unary_rpc_method_handler(answer)

    async def _stream(self, size: bytes, context: Any) -> AsyncIterator[tensor_pb2.TensorChunk]:
        for chunk in chunks_to_proto(self._tensors[size.decode()]):
            yield chunk

    async def _unary(self, size: bytes, context: Any) -> bytes:
        data = self._tensors[size.decode()].data
        message = tensor_pb2.TensorChunk(data=bytes(data), crc32c=crc32c(data), last=True)
        return message.SerializeToString()

    async def _put(self, size: bytes, context: Any) -> bytes:
        tensor = self._tensors[size.decode()]
        key = EmbeddingKey(secrets.token_hex(32))
        manifest = Manifest.describe(key, tensor, encoder_fingerprint="bench", encode_ms=1e6)
        if await self._store.put(manifest, tensor) is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store did not take it")
        return key.encode()

    async def _small(self, request: bytes, context: Any) -> bytes:
        return b"pong"


async def _http_app(scope: Any, receive: Any, send: Any, tensors: dict[str, RawTensor]) -> None:
    if scope["type"] != "http":
        return
    tensor = tensors[scope["path"].removeprefix("/")]
    body = {"shape": tensor.shape, "data": base64.b64encode(tensor.data).decode()}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _send(pipe: Any, store_url: str, sizes: list[float], with_zmq: bool) -> None:
    import uvicorn

    tensors = {str(size): embedding(size) for size in sizes}
    store = RedisStore.from_url(store_url, Metrics("vision"), limits=RedisLimits(timeout_s=30.0))
    server = grpc.aio.server(options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((Sender(store, tensors),))
    rpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _http_app(scope, receive, send, tensors)

    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off")
    http = uvicorn.Server(config)
    serving = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    http_port = http.servers[0].sockets[0].getsockname()[1]
    zmq_port = 0
    if with_zmq:
        import zmq
        import zmq.asyncio

        socket = zmq.asyncio.Context.instance().socket(zmq.REP)
        zmq_port = socket.bind_to_random_port("tcp://127.0.0.1")

        async def answer() -> None:
            while True:
                size = (await socket.recv()).decode()
                await socket.send(tensors[size].data, copy=False)

        asyncio.create_task(answer())
    pipe.send((rpc_port, http_port, zmq_port))
    loop = asyncio.get_running_loop()
    while (order := await loop.run_in_executor(None, pipe.recv)) != "stop":
        assert order == "usage"
        pipe.send(_usage())
    http.should_exit = True
    await serving
    await server.stop(None)


def _run_sender(*arguments: Any) -> None:
    asyncio.run(_send(*arguments))


# ── the receiver ──


class Receiver:
    """Fetches an embedding over each path; every method returns its bytes, checked."""

    def __init__(self, ports: tuple[int, int, int], store_url: str) -> None:
        rpc_port, self._http_port, self._zmq_port = ports
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{rpc_port}", options=GRPC_OPTIONS)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False)
        self._store = RedisStore.from_url(
            store_url, Metrics("llm"), limits=RedisLimits(timeout_s=30.0)
        )

    async def store(self, size: float, tensor: RawTensor) -> Any:
        call = self.channel.unary_unary(f"{METHOD}store")
        lookup = await self._store.get(EmbeddingKey((await call(str(size).encode())).decode()))
        assert lookup.tensor is not None, lookup.status
        return lookup.tensor.data

    async def read_stored(self, key: EmbeddingKey) -> None:
        assert (await self._store.get(key)).tensor is not None

    async def stream(self, size: float, tensor: RawTensor) -> Any:
        call = self.channel.unary_stream(
            f"{METHOD}stream", response_deserializer=tensor_pb2.TensorChunk.FromString
        )
        assembler = Assembler(tensor.dtype, tensor.shape)
        async for chunk in call(str(size).encode()):
            assembler.add(chunk_from_proto(chunk))
        return assembler.finish().data

    async def unary(self, size: float, tensor: RawTensor) -> Any:
        call = self.channel.unary_unary(
            f"{METHOD}unary", response_deserializer=tensor_pb2.TensorChunk.FromString
        )
        message = await call(str(size).encode())
        assert crc32c(message.data) == message.crc32c
        return message.data

    async def http(self, size: float, tensor: RawTensor) -> Any:
        response = await self._http.get(f"http://127.0.0.1:{self._http_port}/{size}")
        return base64.b64decode(response.json()["data"])

    async def zmq(self, size: float, tensor: RawTensor) -> Any:
        import zmq
        import zmq.asyncio

        with contextlib.closing(zmq.asyncio.Context.instance().socket(zmq.REQ)) as socket:
            socket.connect(f"tcp://127.0.0.1:{self._zmq_port}")
            await socket.send(str(size).encode())
            frame = await socket.recv(copy=False)
            return frame.buffer

    async def small(self) -> None:
        await self.channel.unary_unary(f"{METHOD}small")(b"ping")


def _usage() -> tuple[float, float]:
    """CPU seconds of this process, and its peak resident memory in MiB."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


async def _receive(pipe: Any, ports: Any, store_url: str, path: str, size: float) -> None:
    """One receiver process measures one path at one size, on orders from the bench."""
    tensor = embedding(size)
    expected = crc32c(tensor.data)
    receiver = Receiver(ports, store_url)
    fetch: Callable[[float, RawTensor], Awaitable[Any]] = getattr(receiver, path)
    await fetch(size, tensor)
    loop = asyncio.get_running_loop()
    base_mib = _resident_mib()
    while (order := await loop.run_in_executor(None, pipe.recv)) != "stop":
        if order == "beside":
            pipe.send(await _small_calls_beside(receiver, lambda: fetch(size, tensor)))
            continue
        cpu, _ = _usage()
        began = time.perf_counter()
        data = await fetch(size, tensor)
        wall = time.perf_counter() - began
        after, _ = _usage()
        assert crc32c(data) == expected
        del data
        pipe.send((wall, after - cpu, _peak_mib() - base_mib))


async def _small_calls_beside(
    receiver: Receiver, transfer: Callable[[], Awaitable[Any]]
) -> list[float]:
    """Durations of small calls on the same channel while a large embedding is fetched."""
    seconds: list[float] = []
    moving = asyncio.ensure_future(transfer())
    while not moving.done():
        began = time.perf_counter()
        await receiver.small()
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(1 / SMALL_CALLS_PER_S)
    await moving
    return seconds


def _resident_mib() -> float:
    return _status("VmRSS")


def _peak_mib() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _run_receiver(*arguments: Any) -> None:
    asyncio.run(_receive(*arguments))


# ── the bench ──


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES_MIB)), help="MiB, by commas")
    parser.add_argument("--json", type=Path, help="write every number here as well")
    options = parser.parse_args()
    os.environ.update(CHILD_ENVIRONMENT)  # the same allocator on every side, as in production
    sizes = [float(size) for size in options.sizes.split(",")]
    with_zmq = importlib.util.find_spec("zmq") is not None
    paths = [path for path in PATHS if path != "zmq" or with_zmq]
    server = ValkeyProcess(options=("--maxmemory", "1gb"))
    server.start()
    try:
        results = _measure(server.url, sizes, paths, options.rounds, with_zmq)
    finally:
        server.close()
    _print(results, sizes, paths)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


def _measure(
    store_url: str, sizes: list[float], paths: list[str], rounds: int, with_zmq: bool
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=_run_sender, args=(theirs, store_url, sizes, with_zmq))
    sender.start()
    ports = ours.recv()
    results: dict[str, Any] = {"load_average": os.getloadavg()[0], "rounds": rounds}
    for size in sizes:
        with _receivers(context, ports, store_url, size, paths) as pipes:
            samples: dict[str, list[tuple[float, ...]]] = {path: [] for path in paths}
            for _ in range(rounds):
                for path in paths:
                    before = _sender_cpu(ours)
                    pipes[path].send("fetch")
                    wall, cpu, peak = pipes[path].recv()
                    samples[path].append((wall, cpu + _sender_cpu(ours) - before, peak))
            beside: dict[str, list[float]] = {path: [] for path in paths}
            for _ in range(max(1, rounds // 2) if size == max(sizes) else 0):
                for path in paths:
                    pipes[path].send("beside")
                    beside[path] += pipes[path].recv()
        results[str(size)] = {
            path: {
                "wall_p50_ms": 1e3 * statistics.median(s[0] for s in samples[path]),
                "wall_p99_ms": 1e3 * percentile([s[0] for s in samples[path]], 0.99),
                "cpu_ms": 1e3 * statistics.median(s[1] for s in samples[path]),
                "peak_mib": max(s[2] for s in samples[path]),
                "small_p99_ms": 1e3 * percentile(beside[path], 0.99) if beside[path] else None,
            }
            for path in paths
        }
    ours.send("stop")
    sender.join()
    return results


def _sender_cpu(pipe: Any) -> float:
    pipe.send("usage")
    return float(pipe.recv()[0])


@contextlib.contextmanager
def _receivers(
    context: Any, ports: Any, store_url: str, size: float, paths: list[str]
) -> Iterator[dict[str, Any]]:
    """One process for each path, so that their peaks of memory are their own."""
    pipes, processes = {}, []
    for path in paths:
        pipes[path], theirs = context.Pipe()
        process = context.Process(target=_run_receiver, args=(theirs, ports, store_url, path, size))
        process.start()
        processes.append(process)
    try:
        yield pipes
    finally:
        for pipe in pipes.values():
            pipe.send("stop")
        for process in processes:
            process.join()


def _print(results: dict[str, Any], sizes: list[float], paths: list[str]) -> None:
    print(f"{results['rounds']} rounds, load average {results['load_average']:.1f}")
    head = ("size", "path", "p50 ms", "p99 ms", "CPU ms", "peak MiB", "x unary", "small p99")
    print("{:>9} {:>7} {:>9} {:>9} {:>9} {:>9} {:>8} {:>10}".format(*head))
    for size in sizes:
        unary = results[str(size)]["unary"]["wall_p50_ms"]
        for path in paths:
            row = results[str(size)][path]
            small = row["small_p99_ms"]
            print(
                f"{size:>5} MiB {path:>7} {row['wall_p50_ms']:>9.2f} {row['wall_p99_ms']:>9.2f} "
                f"{row['cpu_ms']:>9.2f} {row['peak_mib']:>9.1f} "
                f"{row['wall_p50_ms'] / unary:>8.2f} {'' if small is None else f'{small:.2f}':>10}"
            )


if __name__ == "__main__":
    sys.exit(main())
