"""AudioEncoder on the wire: check the header, encode or tokenise, answer."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from mimo.encoder import EncodeService
from mimo.encoder.wire import encoded_to_proto, request_from_proto
from mimo.rpc.deadline import deadline_of
from mimo.rpc.tensors import chunks_to_proto, header_from_proto, header_to_proto
from mimo.rpc.upload import read_chunks, read_start
from mimo.store import Modality
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
        start = (await read_start(request_iterator)).start
        plan = self._plan(start, Product.EMBEDDINGS)
        request = request_from_proto(
            start.target,
            start.waveform,
            modality=Modality.AUDIO,
            plan=plan,
            cost=plan.seconds,
            deadline=deadline_of(context),
        )
        encoded = await self._encodes.encode(request, read_chunks(request_iterator))
        yield audio_pb2.EncodeWaveformResponse(encoded=encoded_to_proto(encoded))
        if encoded.tensor is not None:
            for chunk in chunks_to_proto(encoded.tensor):
                yield audio_pb2.EncodeWaveformResponse(chunk=chunk)

    async def TokenizeWaveform(
        self,
        request_iterator: AsyncIterator[audio_pb2.TokenizeWaveformRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[audio_pb2.TokenizeWaveformResponse]:
        plan = self._plan((await read_start(request_iterator)).start, Product.CODES)
        codes = await self._encodes.compute(
            plan,
            plan.seconds,
            ("float32", (plan.num_samples,)),
            read_chunks(request_iterator),
            deadline=deadline_of(context),
        )
        yield audio_pb2.TokenizeWaveformResponse(codes=header_to_proto(codes.dtype, codes.shape))
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
