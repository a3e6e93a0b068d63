"""AudioEncoder on the wire: check the header, encode or tokenise, answer."""

import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from mimo.encoder import EncodeService
from mimo.encoder.wire import encoded_to_proto, request_from_proto
from mimo.rpc.tensors import chunks_to_proto, header_from_proto, header_to_proto
from mimo.rpc.upload import Upload
from mimo.store import Modality
from mimo.tensor import Assembler, Chunk, RawTensor
from mimo.v1 import audio_pb2, audio_pb2_grpc
from services.audio.plan import AudioPlan, Product


class AudioEncoderServicer(audio_pb2_grpc.AudioEncoderServicer):
    def __init__(
        self, encodes: EncodeService[AudioPlan], *, sample_rate: int, max_item_seconds: float
    ) -> None:
        self._encodes = encodes
        self._sample_rate = sample_rate
        self._max_item_seconds = max_item_seconds

    async def EncodeWaveform(
        self,
        request_iterator: AsyncIterator[audio_pb2.EncodeWaveformRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[audio_pb2.EncodeWaveformResponse]:
        async with Upload(request_iterator) as upload:
            start = (await upload.start()).start
            plan = self._plan(start, Product.EMBEDDINGS)
            request = request_from_proto(
                start.target,
                start.waveform,
                modality=Modality.AUDIO,
                plan=plan,
                cost=plan.seconds,
                remaining_s=context.time_remaining(),
            )
            encoded = await self._encodes.encode(request, upload.chunks())
            yield audio_pb2.EncodeWaveformResponse(encoded=encoded_to_proto(encoded))
            if encoded.tensor is not None:
                for chunk in chunks_to_proto(encoded.tensor):
                    yield audio_pb2.EncodeWaveformResponse(chunk=chunk)

    async def TokenizeWaveform(
        self,
        request_iterator: AsyncIterator[audio_pb2.TokenizeWaveformRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[audio_pb2.TokenizeWaveformResponse]:
        async with Upload(request_iterator) as upload:
            plan = self._plan((await upload.start()).start, Product.CODES)
            codes = await self._encodes.compute(
                plan,
                plan.seconds,
                lambda: _waveform(plan, upload.chunks()),
                deadline=_deadline(context),
            )
            header = header_to_proto(codes.dtype, codes.shape)
            yield audio_pb2.TokenizeWaveformResponse(codes=header)
            for chunk in chunks_to_proto(codes):
                yield audio_pb2.TokenizeWaveformResponse(chunk=chunk)

    def _plan(
        self,
        start: audio_pb2.EncodeWaveformStart | audio_pb2.TokenizeWaveformStart,
        product: Product,
    ) -> AudioPlan:
        dtype, shape = header_from_proto(start.waveform)
        return AudioPlan.of(
            dtype,
            shape,
            start.sample_rate,
            expected_rate=self._sample_rate,
            max_seconds=self._max_item_seconds,
            product=product,
        )


async def _waveform(plan: AudioPlan, chunks: AsyncIterator[Chunk]) -> RawTensor:
    assembler = Assembler("float32", (plan.num_samples,))
    async for chunk in chunks:
        assembler.add(chunk)
        if assembler.is_complete:
            break
    return assembler.finish()


def _deadline(context: "grpc.aio.ServicerContext[Any, Any]") -> float:
    remaining_s = context.time_remaining()
    return math.inf if remaining_s is None else time.monotonic() + remaining_s
