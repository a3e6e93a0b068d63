"""Stand-ins for the model services, behind real gRPC on free ports.

They keep the wire contract and count what they are asked; there is no model in them. An embedding
holds zeros, and a decoder says what its script says.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from mimo.errors import EmbeddingMissing, MimoError
from mimo.rpc.interceptors import DrainGate
from mimo.rpc.replica import Description, Load
from mimo.rpc.server import Service, ServiceServer
from mimo.rpc.tensors import chunk_from_proto, chunks_to_proto, header_to_proto
from mimo.store import EmbeddingStore, Manifest, Outcome, parse_key
from mimo.store.wire import OUTCOME_TO_PROTO
from mimo.tensor import Assembler, RawTensor
from mimo.v1 import (
    audio_pb2,
    audio_pb2_grpc,
    encoding_pb2,
    llm_pb2,
    llm_pb2_grpc,
    tensor_pb2,
    vision_pb2,
    vision_pb2_grpc,
)

HIDDEN = 8


class FakeEncoder:
    """A vision or audio encoder. ``hold`` cleared makes it wait before it encodes; ``errors`` are
    raised one per call; ``inline`` makes it answer as if the store were down."""

    def __init__(self, store: EmbeddingStore, fingerprint: str = "encoder") -> None:
        self.store = store
        self.fingerprint = fingerprint
        self.targets: list[encoding_pb2.EncodeTarget] = []
        self.uploads: list[RawTensor] = []
        self.errors: list[MimoError] = []
        self.inline = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.entered = asyncio.Event()
        self.num_cancelled = 0

    async def answer(
        self,
        target: encoding_pb2.EncodeTarget,
        header: tensor_pb2.TensorHeader,
        num_tokens: int,
        requests: AsyncIterator[Any],
    ) -> tuple[encoding_pb2.Encoded, RawTensor | None]:
        self.targets.append(target)
        self.entered.set()
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.errors:
            raise self.errors.pop(0)
        key = parse_key(target.key)
        found = await self.store.find(key)
        if found.manifest is not None and not target.bypass:
            return self._encoded(found.manifest, Outcome.HIT), None
        dtype = {tensor_pb2.DTYPE_UINT8: "uint8", tensor_pb2.DTYPE_FLOAT32: "float32"}
        assembler = Assembler(dtype[header.dtype], tuple(header.shape))
        async for request in requests:
            assembler.add(chunk_from_proto(request.chunk))
        self.uploads.append(assembler.finish())
        embedding = RawTensor("float32", (num_tokens, HIDDEN), bytes(4 * HIDDEN * num_tokens))
        manifest = Manifest.describe(
            key, embedding, encoder_fingerprint=self.fingerprint, encode_ms=5.0
        )
        outcome = Outcome.MISS
        if target.bypass:
            outcome = Outcome.REPAIRED if target.attempt else Outcome.BYPASS
        if self.inline:
            encoded = self._encoded(manifest, outcome)
            encoded.inline = True
            encoded.manifest_digest = b""
            return encoded, embedding
        await self.store.put(manifest, embedding, replace=target.bypass)
        return self._encoded(manifest, outcome), None

    def _encoded(self, manifest: Manifest, outcome: Outcome) -> encoding_pb2.Encoded:
        return encoding_pb2.Encoded(
            manifest_digest=manifest.digest,
            embedding=header_to_proto(manifest.dtype, manifest.shape),
            outcome=OUTCOME_TO_PROTO[outcome],
            encode_ms=manifest.encode_ms if outcome is not Outcome.HIT else 0.0,
        )


class FakeVision(FakeEncoder, vision_pb2_grpc.VisionEncoderServicer):
    async def EncodeFrames(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        start = (await anext(requests)).start
        plan = start.plan
        num_tokens = math.prod((plan.grid_t, plan.grid_h, plan.grid_w)) // 4
        encoded, tensor = await self.answer(start.target, start.frames, num_tokens, requests)
        yield vision_pb2.EncodeFramesResponse(encoded=encoded)
        for chunk in chunks_to_proto(tensor) if tensor else ():
            yield vision_pb2.EncodeFramesResponse(chunk=chunk)


class FakeAudio(FakeEncoder, audio_pb2_grpc.AudioEncoderServicer):
    async def EncodeWaveform(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        start = (await anext(requests)).start
        (num_samples,) = start.waveform.shape
        num_tokens = math.ceil((1 + num_samples // 240) / 16)
        encoded, tensor = await self.answer(start.target, start.waveform, num_tokens, requests)
        yield audio_pb2.EncodeWaveformResponse(encoded=encoded)
        for chunk in chunks_to_proto(tensor) if tensor else ():
            yield audio_pb2.EncodeWaveformResponse(chunk=chunk)


class FakeDecoder(llm_pb2_grpc.LanguageModelServicer):
    """Says ``script`` (deliveries of ids) from the first position that is not prior output.

    ``errors`` are raised one per call before anything is said; ``lost`` are item indices reported
    missing, one per call; ``deaths`` break a call off after so many deliveries, one per call.
    """

    def __init__(self, store: EmbeddingStore, script: Sequence[Sequence[int]]) -> None:
        self.store = store
        self.script = [list(delivery) for delivery in script]
        self.starts: list[llm_pb2.GenerateTokensStart] = []
        self.items: list[dict[int, str | bytes]] = []  # how each call's items became ready
        self.errors: list[MimoError] = []
        self.lost: list[int] = []
        self.deaths: list[tuple[int, MimoError]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.entered = asyncio.Event()
        self.holding = asyncio.Event()  # has said its first delivery and waits for ``hold``
        self.cancelled = asyncio.Event()

    async def GenerateTokens(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        start = (await anext(requests)).start
        self.starts.append(start)
        self.items.append({})
        self.entered.set()
        try:
            if self.errors:
                raise self.errors.pop(0)
            await self._await_items(start, requests, self.items[-1])
            if self.lost:
                index = self.lost.pop(0)
                raise EmbeddingMissing(f"item {index} is gone", item_index=index)
            yield _response(
                started=llm_pb2.GenerationStarted(queue_ms=1, cached_tokens=3, fingerprint="llm")
            )
            async for response in self._speak(start):
                yield response
        except GeneratorExit:  # the client left while an event was being sent
            self.cancelled.set()
            raise
        except (asyncio.CancelledError, StopAsyncIteration) as error:
            # What a handler sees first of a client that has left depends on where it waits.
            self.cancelled.set()
            raise asyncio.CancelledError from error

    async def _speak(self, start: llm_pb2.GenerateTokensStart) -> AsyncIterator[Any]:
        position = 0
        said = len(start.prior_output_ids)
        death = self.deaths.pop() if self.deaths else None
        last = 0
        for number, delivery in enumerate(self.script):
            if death is not None and number == death[0]:
                raise death[1]
            fresh = delivery[max(0, said - position) :]
            position += len(delivery)
            if fresh:
                last = fresh[-1]
                yield _response(tokens=_tokens(start, position - len(fresh), fresh))
            if not self.hold.is_set():
                self.holding.set()
            await self.hold.wait()
        stopped = last in start.sampling.stop_token_ids
        finished = llm_pb2.GenerationFinished(
            reason=llm_pb2.FINISH_REASON_STOP if stopped else llm_pb2.FINISH_REASON_LENGTH,
            drafted=[3, 2],
            accepted=[2, 1],
            prefill_ms=4,
        )
        if stopped:
            finished.stop_token_id = last
        yield _response(finished=finished)

    async def _await_items(
        self, start: llm_pb2.GenerateTokensStart, requests: Any, ready: dict[int, str | bytes]
    ) -> None:
        missing = set()
        for index, item in enumerate(start.items):
            if item.state == llm_pb2.ITEM_STATE_STORED:
                await self._check_stored(index, item, item.manifest_digest)
                ready[index] = "stored"
            else:
                missing.add(index)
        inline: dict[int, bytearray] = {}
        while missing:
            message = await anext(requests)
            if message.WhichOneof("message") == "item_ready":
                index = message.item_ready.item_index
                digest = message.item_ready.manifest_digest
                await self._check_stored(index, start.items[index], digest)
                ready[index] = "pending"
                missing.remove(index)
                continue
            index, chunk = message.item_chunk.item_index, message.item_chunk.chunk
            inline.setdefault(index, bytearray()).extend(chunk.data)
            if chunk.last:
                ready[index] = bytes(inline[index])
                missing.remove(index)

    async def _check_stored(self, index: int, item: llm_pb2.MediaItem, digest: bytes) -> None:
        found = await self.store.find(parse_key(item.key))
        if found.manifest is None or found.manifest.digest != digest:
            raise EmbeddingMissing(f"item {index} is not in the store", item_index=index)
        assert tuple(item.embedding.shape) == found.manifest.shape


def _response(**event: Any) -> llm_pb2.GenerateTokensResponse:
    return llm_pb2.GenerateTokensResponse(**event)


def _tokens(
    start: llm_pb2.GenerateTokensStart, first: int, ids: list[int]
) -> llm_pb2.GeneratedTokens:
    tokens = llm_pb2.GeneratedTokens(ids=ids, first_index=first)
    if start.sampling.HasField("num_logprobs"):
        count = start.sampling.num_logprobs
        for id in ids:
            rivals = list(range(id, id + count))
            tokens.logprobs.add(logprob=-0.5, top_ids=rivals, top_logprobs=[-0.5] * count)
    return tokens


def serve_vision(leaf: FakeVision) -> AbstractAsyncContextManager[str]:
    return _serve(leaf, "vision", vision_pb2_grpc.add_VisionEncoderServicer_to_server)


def serve_audio(leaf: FakeAudio) -> AbstractAsyncContextManager[str]:
    return _serve(leaf, "audio", audio_pb2_grpc.add_AudioEncoderServicer_to_server)


def serve_decoder(
    leaf: FakeDecoder, limits: dict[str, int] | None = None
) -> AbstractAsyncContextManager[str]:
    return _serve(leaf, "llm", llm_pb2_grpc.add_LanguageModelServicer_to_server, limits)


@asynccontextmanager
async def _serve(
    leaf: Any, component: str, add: Callable[[Any, Any], None], limits: dict[str, int] | None = None
) -> AsyncIterator[str]:
    """Serve until the block ends; gives the address."""
    description = Description(
        component=component,
        version="0",
        model="fake",
        fingerprint=getattr(leaf, "fingerprint", component),
        dtype="float32",
        device="cpu",
        hidden_size=HIDDEN,
        embedding_dtype="float32",
        limits=limits or {},
    )
    service = Service(lambda server: add(leaf, server), (), description, Load)
    server = ServiceServer(service, DrainGate())
    address = await server.start("127.0.0.1:0")
    try:
        yield address
    finally:
        await server.stop()
