"""The encoder clients over real gRPC: uploads, early answers and broken ends."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway.backends.encoders import EncodeTarget, MediaStream, encode_frames, encode_waveform
from gateway.backends.replica import Replica
from gateway.items import AudioPlan, ImagePlan
from mimo.errors import DeadlineExceeded, Internal, InvalidRequest, Overloaded, Unavailable
from mimo.rpc.channel import open_channel
from mimo.store import EmbeddingKey, Outcome
from mimo.store.memory_store import MemoryStore
from mimo.tensor import Buffer
from mimo.v1 import encoding_pb2, vision_pb2, vision_pb2_grpc
from tests.support.fake_leaves import HIDDEN, FakeAudio, FakeVision, serve_audio, serve_vision

MIB = 1 << 20
TARGET = EncodeTarget(EmbeddingKey("ab" * 32), "encoder")
PLAN = ImagePlan(1024, 1024, 64, 64, 1, (1, 4, 4), 4)
SHAPE = (1, 1024, 1024, 3)  # 3 MiB
TIMEOUT_S = 30.0


class Source:
    """Bytes in pieces. Knows how many were asked for and whether it was closed."""

    def __init__(self, *pieces: Buffer | Exception) -> None:
        self._pieces = pieces
        self.num_given = 0
        self.is_closed = False

    async def open(self) -> AsyncGenerator[Buffer, None]:
        try:
            for piece in self._pieces:
                if isinstance(piece, Exception):
                    raise piece
                self.num_given += 1
                yield piece
        finally:
            self.is_closed = True


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Replica]:
    channel = open_channel(address)
    try:
        yield Replica(address, channel, time.monotonic)
    finally:
        await channel.close()


async def test_media_arrive_whole_whatever_pieces_they_come_in() -> None:
    leaf = FakeVision(MemoryStore())
    data = bytes(range(256)) * (3 * MIB // 256)
    source = Source(data[:5], memoryview(data)[5 : 2 * MIB + 7], bytearray(data[2 * MIB + 7 :]))
    async with serve_vision(leaf) as address, connected(address) as replica:
        encoded = await encode_frames(
            replica, TARGET, PLAN, MediaStream("uint8", SHAPE, source.open), TIMEOUT_S
        )
    assert (encoded.outcome, encoded.shape, encoded.tensor) == (Outcome.MISS, (4, HIDDEN), None)
    (upload,) = leaf.uploads
    assert bytes(upload.data) == data
    assert source.is_closed


async def test_an_early_answer_stops_the_upload() -> None:
    leaf = FakeVision(MemoryStore())
    whole = Source(bytes(3 * MIB))
    many = Source(*[bytes(MIB)] * 1024)
    async with serve_vision(leaf) as address, connected(address) as replica:
        await encode_frames(
            replica, TARGET, PLAN, MediaStream("uint8", SHAPE, whole.open), TIMEOUT_S
        )
        # The key is there now: the encoder answers without reading the gigabyte.
        large = MediaStream("uint8", (1024, 1024, 1024, 1), many.open)
        encoded = await encode_frames(replica, TARGET, PLAN, large, TIMEOUT_S)
    assert encoded.outcome is Outcome.HIT
    assert many.num_given < 64
    assert many.is_closed


async def test_an_early_answer_may_be_followed_by_the_embedding() -> None:
    class Hasty(FakeVision):
        async def EncodeFrames(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            await anext(requests)
            responses = FakeVision.EncodeFrames(self, _started(), context)
            async for response in responses:
                yield response

    async def _started() -> AsyncIterator[Any]:
        request = vision_pb2.EncodeFramesRequest()
        request.start.target.key = TARGET.key
        request.start.frames.dtype = 1
        request.start.frames.shape.extend([1, 1, 1, 0])
        request.start.plan.grid_t = request.start.plan.grid_h = 64
        request.start.plan.grid_w = 64
        yield request
        empty = vision_pb2.EncodeFramesRequest()
        empty.chunk.last = True
        yield empty

    leaf = Hasty(MemoryStore())
    leaf.inline = True
    source = Source(*[bytes(MIB)] * 1024)
    async with serve_vision(leaf) as address, connected(address) as replica:
        stream = MediaStream("uint8", (1024, 1024, 1024, 1), source.open)
        encoded = await encode_frames(replica, TARGET, PLAN, stream, TIMEOUT_S)
    assert encoded.tensor is not None
    assert encoded.tensor.shape == (65536, HIDDEN)  # 2 MiB: more than one chunk
    assert source.num_given < 1024


@pytest.mark.parametrize("delay", range(5))
async def test_an_early_refusal_arrives_although_a_write_is_waiting(delay: int) -> None:
    """From a peer that hangs up at once, without our server's courtesy of hearing callers out."""

    class Refusing(FakeVision):
        async def EncodeFrames(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            await anext(requests)
            for _ in range(10 * delay):  # until the sender is stuck
                await asyncio.sleep(0)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            yield

    source = Source(*[bytes(MIB)] * 1024)
    server = grpc.aio.server()
    vision_pb2_grpc.add_VisionEncoderServicer_to_server(Refusing(MemoryStore()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connected(f"127.0.0.1:{port}") as replica:
        with pytest.raises(Overloaded, match="full"):
            stream = MediaStream("uint8", (1024, 1024, 1024, 1), source.open)
            await encode_frames(replica, TARGET, PLAN, stream, TIMEOUT_S)
    await server.stop(None)
    assert source.is_closed
    assert source.num_given < 1024


async def test_a_source_that_fails_ends_the_call_with_its_error() -> None:
    leaf = FakeVision(MemoryStore())
    source = Source(bytes(MIB), InvalidRequest("corrupt frame"))
    async with serve_vision(leaf) as address, connected(address) as replica:
        with pytest.raises(InvalidRequest, match="corrupt frame"):
            await encode_frames(
                replica, TARGET, PLAN, MediaStream("uint8", SHAPE, source.open), TIMEOUT_S
            )
    assert leaf.uploads == []


@pytest.mark.parametrize(("size", "word"), [(3 * MIB + 1, "longer"), (3 * MIB - 1, "shorter")])
async def test_a_source_of_another_length_than_planned_is_our_error(size: int, word: str) -> None:
    leaf = FakeVision(MemoryStore())
    source = Source(bytes(size))
    async with serve_vision(leaf) as address, connected(address) as replica:
        with pytest.raises(Internal, match=word):
            await encode_frames(
                replica, TARGET, PLAN, MediaStream("uint8", SHAPE, source.open), TIMEOUT_S
            )
    assert leaf.uploads == []


async def test_an_encoders_error_arrives_as_its_type() -> None:
    leaf = FakeAudio(MemoryStore())
    leaf.errors = [Overloaded("full", retry_after_s=7.0)]
    plan = AudioPlan(0, 24000, 1, 24000, 24000, 101, 7)
    source = Source(bytes(96000))
    async with serve_audio(leaf) as address, connected(address) as replica:
        with pytest.raises(Overloaded) as caught:
            await encode_waveform(
                replica, TARGET, plan, MediaStream("float32", (24000,), source.open), TIMEOUT_S
            )
        assert caught.value.retry_after_s == 7.0
        again = MediaStream("float32", (24000,), Source(bytes(96000)).open)
        encoded = await encode_waveform(replica, TARGET, plan, again, TIMEOUT_S)
    assert encoded.shape == (7, HIDDEN)


async def test_nobody_there_is_unavailable() -> None:
    async with connected("127.0.0.1:1") as replica:
        with pytest.raises(Unavailable):
            stream = MediaStream("uint8", SHAPE, Source(bytes(3 * MIB)).open)
            await encode_frames(replica, TARGET, PLAN, stream, TIMEOUT_S)
        with pytest.raises(Unavailable):
            await replica.facts()


async def test_an_encoder_that_ends_without_an_answer_is_unavailable() -> None:
    class Silent(FakeVision):
        async def EncodeFrames(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            await anext(requests)
            for nothing in ():
                yield nothing

    async with serve_vision(Silent(MemoryStore())) as address, connected(address) as replica:
        with pytest.raises(Unavailable, match="without an answer"):
            stream = MediaStream("uint8", SHAPE, Source(bytes(3 * MIB)).open)
            await encode_frames(replica, TARGET, PLAN, stream, TIMEOUT_S)


async def test_a_damaged_inline_embedding_is_the_encoders_failure() -> None:
    class Damaging(FakeVision):
        async def EncodeFrames(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async for response in FakeVision.EncodeFrames(self, requests, context):
                if response.WhichOneof("event") == "chunk":
                    response.chunk.crc32c ^= 1
                yield response

    leaf = Damaging(MemoryStore())
    leaf.inline = True
    async with serve_vision(leaf) as address, connected(address) as replica:
        with pytest.raises(Unavailable, match="damaged"):
            stream = MediaStream("uint8", SHAPE, Source(bytes(3 * MIB)).open)
            await encode_frames(replica, TARGET, PLAN, stream, TIMEOUT_S)


async def test_a_deadline_ends_a_call_that_waits() -> None:
    leaf = FakeVision(MemoryStore())
    leaf.hold.clear()
    source = Source(bytes(3 * MIB))
    async with serve_vision(leaf) as address, connected(address) as replica:
        with pytest.raises(DeadlineExceeded):
            await encode_frames(
                replica, TARGET, PLAN, MediaStream("uint8", SHAPE, source.open), 0.3
            )
    assert source.is_closed


async def test_leaving_cancels_the_call() -> None:
    leaf = FakeVision(MemoryStore())
    leaf.hold.clear()
    source = Source(*[bytes(MIB)] * 3)
    async with serve_vision(leaf) as address, connected(address) as replica:
        stream = MediaStream("uint8", SHAPE, source.open)
        call = asyncio.create_task(encode_frames(replica, TARGET, PLAN, stream, TIMEOUT_S))
        await leaf.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert leaf.num_cancelled == 1


async def test_the_plan_and_the_target_travel_in_the_header() -> None:
    seen: list[vision_pb2.EncodeFramesStart] = []

    class Watching(FakeVision):
        async def EncodeFrames(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            request = await anext(requests)
            seen.append(request.start)
            raise InvalidRequest("seen")
            yield

    target = EncodeTarget(TARGET.key, "fp", attempt=2, bypass=True, inline=True)
    async with serve_vision(Watching(MemoryStore())) as address, connected(address) as replica:
        with pytest.raises(InvalidRequest, match="seen"):
            stream = MediaStream("uint8", SHAPE, Source(bytes(3 * MIB)).open)
            await encode_frames(replica, target, PLAN, stream, TIMEOUT_S)
    (start,) = seen
    assert start.target == encoding_pb2.EncodeTarget(
        key=TARGET.key, encoder_fingerprint="fp", attempt=2, bypass=True, inline=True
    )
    assert start.plan == vision_pb2.FramePlan(
        modality=encoding_pb2.MODALITY_IMAGE,
        source_height=1024,
        source_width=1024,
        num_frames=1,
        target_height=64,
        target_width=64,
        grid_t=1,
        grid_h=4,
        grid_w=4,
    )
    assert list(start.frames.shape) == list(SHAPE)
