"""The sending process of the embedding bench: it answers every path with the same rows."""

import asyncio
import base64
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from mimo.metrics import Metrics
from mimo.rpc.tensors import chunks_to_proto
from mimo.store import EmbeddingKey, Manifest
from mimo.store.redis_store import RedisLimits, RedisStore
from mimo.tensor import RawTensor, crc32c
from mimo.v1 import tensor_pb2

MIB = 1 << 20
WIDTH = 1024  # values in a row
METHOD = "/bench.Embedding/"
WARM_UP = "0.0625"  # MiB: loads the code of a path without growing the process
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
PATIENT = RedisLimits(timeout_s=30.0)


@dataclass(frozen=True, slots=True)
class Ports:
    rpc: int
    http: int
    zmq: int  # 0 when pyzmq is not installed


def embedding(size_mib: str) -> RawTensor:
    rows = int(float(size_mib) * MIB) // (4 * WIDTH)
    values = np.random.default_rng(7).standard_normal((rows, WIDTH), dtype=np.float32)
    return RawTensor("float32", (rows, WIDTH), values.tobytes())


class Sender(grpc.GenericRpcHandler):
    """Answers gRPC calls whose request is a size in MiB as text."""

    def __init__(self, store: RedisStore, tensors: Mapping[str, RawTensor]) -> None:
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
        """As an encoder does after the tower: describe, store, and tell the key."""
        tensor = self._tensors[size.decode()]
        key = EmbeddingKey(secrets.token_hex(32))
        manifest = Manifest.describe(key, tensor, encoder_fingerprint="bench", encode_ms=1e6)
        if await self._store.put(manifest, tensor) is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store did not take it")
        return key.encode()

    async def _small(self, request: bytes, context: Any) -> bytes:
        return b"pong"


def run_sender(pipe: Any, store_url: str, size: str, with_zmq: bool) -> None:
    """Serve until the pipe says stop."""
    asyncio.run(_serve(pipe, store_url, size, with_zmq))


async def _serve(pipe: Any, store_url: str, size: str, with_zmq: bool) -> None:
    tensors = {each: embedding(each) for each in (WARM_UP, size)}
    store = RedisStore.from_url(store_url, Metrics("vision"), limits=PATIENT)
    server = grpc.aio.server(options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((Sender(store, tensors),))
    rpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        http_port = await stack.enter_async_context(_http(tensors))
        zmq_port = await stack.enter_async_context(_zmq(tensors)) if with_zmq else 0
        pipe.send((Ports(rpc_port, http_port, zmq_port), crc32c(tensors[size].data)))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    await server.stop(None)
    await store.aclose()


@contextlib.asynccontextmanager
async def _http(tensors: Mapping[str, RawTensor]) -> AsyncIterator[int]:
    """JSON with base64, as many systems pass embeddings. Yields the port."""
    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        tensor = tensors[scope["path"].removeprefix("/")]
        body = {
            "shape": tensor.shape,
            "crc32c": crc32c(tensor.data),
            "data": base64.b64encode(tensor.data).decode(),
        }
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    yield http.servers[0].sockets[0].getsockname()[1]
    http.should_exit = True
    await serving


@contextlib.asynccontextmanager
async def _zmq(tensors: Mapping[str, RawTensor]) -> AsyncIterator[int]:
    """A small frame with the checksum, then one raw frame that is not copied. Yields the port."""
    import zmq
    import zmq.asyncio

    async def answer() -> None:
        while True:
            tensor = tensors[(await socket.recv()).decode()]
            checksum = b"%d" % crc32c(tensor.data)
            await socket.send_multipart([checksum, tensor.data], copy=False)

    with zmq.asyncio.Context() as context, context.socket(zmq.REP) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        answering = asyncio.create_task(answer())
        yield port
        answering.cancel()
        await asyncio.wait({answering})
