"""Clients of the encoders: media up, the news that an embedding exists down."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from gateway.backends.faults import garbage, upstream_error
from gateway.backends.replica import Replica
from gateway.backends.sending import is_cancelled, send
from gateway.items import AudioPlan, ImagePlan, VideoPlan
from mimo.errors import Internal, InvalidRequest, Unavailable
from mimo.rpc.channel import call_metadata
from mimo.rpc.tensors import chunk_from_proto, chunk_to_proto, header_from_proto, header_to_proto
from mimo.store.base import Outcome
from mimo.store.keys import EmbeddingKey
from mimo.store.wire import OUTCOME_FROM_PROTO
from mimo.tensor import MAX_CHUNK_BYTES, Assembler, Buffer, Chunk, RawTensor, crc32c, num_bytes
from mimo.v1 import (
    audio_pb2,
    audio_pb2_grpc,
    encoding_pb2,
    tensor_pb2,
    vision_pb2,
    vision_pb2_grpc,
)


@dataclass(frozen=True, slots=True)
class EncodeTarget:
    """What shall exist: the embedding named ``key``, made by the encoder of that fingerprint.

    ``bypass`` replaces an entry that is there; ``inline`` asks for the embedding itself.
    """

    key: EmbeddingKey
    encoder_fingerprint: str
    attempt: int = 0
    bypass: bool = False
    inline: bool = False


@dataclass(frozen=True, slots=True)
class MediaStream:
    """A tensor that is produced while it is sent: dtype, shape and its bytes in order."""

    dtype: str
    shape: tuple[int, ...]
    open: Callable[[], AsyncGenerator[Buffer, None]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An embedding [num_tokens, D] exists: in the store, or in ``tensor``."""

    manifest_digest: bytes
    dtype: str
    shape: tuple[int, ...]
    outcome: Outcome
    encode_ms: float
    tensor: RawTensor | None


async def encode_frames(
    replica: Replica,
    target: EncodeTarget,
    plan: ImagePlan | VideoPlan,
    frames: MediaStream,
    timeout_s: float,
) -> Encoded:
    """Have a picture or the frames of a video encoded. frames: [num_frames, height, width, 3]."""
    start = vision_pb2.EncodeFramesStart(
        target=_target_to_proto(target),
        plan=_plan_to_proto(plan),
        frames=header_to_proto(frames.dtype, frames.shape),
    )
    call = vision_pb2_grpc.VisionEncoderStub(replica.channel).EncodeFrames(
        timeout=timeout_s, metadata=call_metadata()
    )
    return await _encode(
        replica,
        call,
        vision_pb2.EncodeFramesRequest(start=start),
        lambda chunk: vision_pb2.EncodeFramesRequest(chunk=chunk),
        frames,
    )


async def encode_waveform(
    replica: Replica,
    target: EncodeTarget,
    plan: AudioPlan,
    samples: MediaStream,
    timeout_s: float,
) -> Encoded:
    """Have a clip or a sound track encoded. samples: [num_samples] float32 mono."""
    start = audio_pb2.EncodeWaveformStart(
        target=_target_to_proto(target),
        sample_rate=plan.sample_rate,
        waveform=header_to_proto(samples.dtype, samples.shape),
    )
    call = audio_pb2_grpc.AudioEncoderStub(replica.channel).EncodeWaveform(
        timeout=timeout_s, metadata=call_metadata()
    )
    return await _encode(
        replica,
        call,
        audio_pb2.EncodeWaveformRequest(start=start),
        lambda chunk: audio_pb2.EncodeWaveformRequest(chunk=chunk),
        samples,
    )


async def _encode(
    replica: Replica,
    call: Any,
    start: Any,
    wrap: Callable[[tensor_pb2.TensorChunk], Any],
    media: MediaStream,
) -> Encoded:
    """Upload and read at the same time: the answer may come before the upload is over."""
    upload = _Upload(call)
    sending = asyncio.create_task(upload.send(start, wrap, media))
    is_answered = False
    try:
        with replica.call(upload.fail):
            encoded = await _read_encoded(call, upload)
            is_answered = True
            return encoded
    except grpc.RpcError as error:
        # A peer that breaks off while we upload and a medium that fails to decode look alike here.
        raise upload.error or upstream_error(error) from None
    except asyncio.CancelledError:
        if upload.error is None or is_cancelled():
            raise
        raise upload.error from None
    finally:
        upload.stop()
        call.cancel()  # without effect on a call that is over
        if not is_answered:
            sending.cancel()  # the medium may be in a line to be decoded
        await asyncio.gather(sending, return_exceptions=True)


class _Upload:
    """The sending half of a call. Stops when the answer is there, cancels when the source fails."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._stopped = False
        self.error: BaseException | None = None

    def stop(self) -> None:
        self._stopped = True

    def fail(self, error: Exception) -> None:
        """End the call with an error of this side."""
        self.error = error
        self._call.cancel()

    async def send(
        self, start: Any, wrap: Callable[[tensor_pb2.TensorChunk], Any], media: MediaStream
    ) -> None:
        try:
            if not await send(self._call, start):
                return
            async with aclosing(_chunks(media)) as chunks:
                async for chunk in chunks:
                    if self._stopped:
                        break
                    if not await send(self._call, wrap(chunk_to_proto(chunk))):
                        return
            await self._call.done_writing()  # the peer hears us out before it hangs up
        except Exception as error:
            self.fail(error)


async def _chunks(media: MediaStream) -> AsyncGenerator[Chunk, None]:
    """The wire chunks of a stream. Raises Internal when it is not as long as its shape says."""
    total = num_bytes(media.dtype, media.shape)
    offset = index = 0
    async with aclosing(media.open()) as buffers:
        async for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if offset + view.nbytes > total:
                raise Internal("decoded media are longer than their plan")
            for begin in range(0, view.nbytes, MAX_CHUNK_BYTES):
                data = view[begin : begin + MAX_CHUNK_BYTES]
                last = offset + data.nbytes == total
                yield Chunk(index, offset, data, crc32c(data), last)
                offset += data.nbytes
                index += 1
    if offset != total:
        raise Internal("decoded media are shorter than their plan")


async def _read_encoded(call: Any, upload: "_Upload") -> Encoded:
    response = await call.read()
    upload.stop()
    if response is grpc.aio.EOF:
        raise Unavailable("the encoder ended the call without an answer")
    # None is what gRPC makes of a message that it cannot parse.
    if response is None or response.WhichOneof("event") != "encoded":
        raise garbage("the encoder", "no answer where one was due")
    encoded = response.encoded
    if encoded.outcome not in OUTCOME_FROM_PROTO:
        raise garbage("the encoder", f"unknown outcome {encoded.outcome}")
    try:
        dtype, shape = header_from_proto(encoded.embedding)
    except InvalidRequest as error:
        raise garbage("the encoder", error.message) from error
    tensor = await _read_tensor(call, dtype, shape) if encoded.inline else None
    await call.read()  # the end: an answer that is followed by an error is none
    return Encoded(
        manifest_digest=encoded.manifest_digest,
        dtype=dtype,
        shape=shape,
        outcome=OUTCOME_FROM_PROTO[encoded.outcome],
        encode_ms=encoded.encode_ms,
        tensor=tensor,
    )


async def _read_tensor(call: Any, dtype: str, shape: tuple[int, ...]) -> RawTensor:
    """The inline embedding. Damage on the way is the encoder's failure, not the client's."""
    try:
        assembler = Assembler(dtype, shape)
        while not assembler.is_complete:
            response = await call.read()
            if response is grpc.aio.EOF:
                raise Unavailable("the encoder broke off inside an embedding")
            if response is None:
                raise garbage("the encoder", "an unreadable chunk")
            assembler.add(chunk_from_proto(response.chunk))
        return assembler.finish()
    except InvalidRequest as error:
        raise Unavailable(f"damaged embedding: {error.message}") from error


def _target_to_proto(target: EncodeTarget) -> encoding_pb2.EncodeTarget:
    return encoding_pb2.EncodeTarget(
        key=target.key,
        encoder_fingerprint=target.encoder_fingerprint,
        attempt=target.attempt,
        bypass=target.bypass,
        inline=target.inline,
    )


def _plan_to_proto(plan: ImagePlan | VideoPlan) -> vision_pb2.FramePlan:
    is_video = isinstance(plan, VideoPlan)
    grid_t, grid_h, grid_w = plan.grid_thw
    return vision_pb2.FramePlan(
        modality=encoding_pb2.MODALITY_VIDEO if is_video else encoding_pb2.MODALITY_IMAGE,
        source_height=plan.source_height,
        source_width=plan.source_width,
        num_frames=len(plan.frame_indices) if isinstance(plan, VideoPlan) else 1,
        target_height=plan.target_height,
        target_width=plan.target_width,
        grid_t=grid_t,
        grid_h=grid_h,
        grid_w=grid_w,
        resized=isinstance(plan, VideoPlan) and plan.frame_dtype == "float32",
    )
