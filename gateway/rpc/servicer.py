"""mimo.v1.Gateway: translate, ask the pipeline, translate back."""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from gateway.catalog import Catalog
from gateway.generation import GenerationRequest
from gateway.held import HeldBytes, Hold
from gateway.intake import collect
from gateway.metering import CallMeter
from gateway.pipeline import Pipeline
from gateway.rpc.events import (
    event_to_proto,
    item_to_proto,
    model_to_proto,
    prompt_to_proto,
)
from gateway.rpc.request import conversation, generation_request, optional
from gateway.salt import tenant_salt
from gateway.uploads import EXPIRES_S, MAX_UPLOAD_BYTES, Uploads
from mimo.errors import InvalidRequest, MimoError, Reason
from mimo.logs import request_id
from mimo.rpc.channel import MAX_MESSAGE_BYTES
from mimo.store.wire import MODALITY_TO_PROTO
from mimo.v1 import gateway_pb2, gateway_pb2_grpc

# gRPC refuses messages beyond its limit as if the server were overloaded, and without saying what
# else to do. It is told to take more than we do, so that those who come near get a proper answer.
MAX_RECEIVE_BYTES = 64 << 20


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """The public gRPC face of one pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        catalog: Catalog,
        uploads: Uploads,
        meter: CallMeter,
        memory: HeldBytes,
    ) -> None:
        self._pipeline = pipeline
        self._catalog = catalog
        self._uploads = uploads
        self._meter = meter
        self._memory = memory

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        timeout_s = _timeout_s(context)
        with self._call("generate", request), self._pipeline.place(timeout_s) as place:
            call = generation_request(request, request_id(), timeout_s)
            events = self._meter.events(self._pipeline.generate(call, place))
            name, with_reasoning = self._catalog.card.name, not request.reasoning.exclude
            seq = 0
            async with aclosing(events):
                async for event in events:
                    response = event_to_proto(event, seq, name, with_reasoning=with_reasoning)
                    if response is not None:
                        yield response
                        seq += 1

    async def CountTokens(
        self, request: gateway_pb2.CountTokensRequest, context: Any
    ) -> gateway_pb2.CountTokensResponse:
        with self._call("count_tokens", request):
            thinking = optional(request.reasoning, "enabled")
            asked = conversation(request.messages, request.media, thinking)
            started = await self._pipeline.count(
                GenerationRequest(
                    request_id(),
                    asked,
                    tenant_salt=tenant_salt(request.cache_salt),
                    timeout_s=_timeout_s(context),
                )
            )
            return gateway_pb2.CountTokensResponse(
                prompt=prompt_to_proto(started.prompt),
                max_context_tokens=self._catalog.card.max_context_tokens,
                items=map(item_to_proto, started.items),
            )

    async def UploadMedia(
        self, requests: AsyncIterator[gateway_pb2.UploadMediaRequest], context: Any
    ) -> gateway_pb2.UploadMediaResponse:
        with self._meter.call("upload"), self._memory.holding() as hold:
            announced, data = await _received(requests, hold)
            salt = tenant_salt(announced.cache_salt)
            upload = await self._uploads.add(data, salt, announced.sha256)
            return gateway_pb2.UploadMediaResponse(
                media_ref=upload.reference,
                modality=MODALITY_TO_PROTO[upload.modality],
                bytes=upload.num_bytes,
                expires_in_seconds=EXPIRES_S,
            )

    async def GetModel(
        self, request: gateway_pb2.GetModelRequest, context: Any
    ) -> gateway_pb2.GetModelResponse:
        with self._call("models", request):
            return gateway_pb2.GetModelResponse(model=await self._model())

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Any
    ) -> gateway_pb2.ListModelsResponse:
        with self._meter.call("models"):
            return gateway_pb2.ListModelsResponse(models=[await self._model()])

    async def _model(self) -> gateway_pb2.Model:
        return model_to_proto(self._catalog.card, await self._pipeline.fingerprints())

    @contextmanager
    def _call(self, method: str, request: Any) -> Iterator[None]:
        """Count a call for a model; errors name fields as this face's messages do."""
        with self._meter.call(method), self._memory.holding() as hold:
            try:
                hold(_checked_size(request))
                self._catalog.check(request.model)
                yield
            except MimoError as error:
                if error.field is not None:
                    error.field = error.field.replace(".content[", ".parts[")
                raise


def _checked_size(request: Any) -> int:
    num_bytes: int = request.ByteSize()
    if num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the request has {num_bytes / (1 << 20):.1f} MiB, and a message may have "
            f"{MAX_MESSAGE_BYTES >> 20}: send large media by UploadMedia and refer to them",
            reason=Reason.REQUEST_TOO_LARGE,
            field="messages",
            limit=MAX_MESSAGE_BYTES,
        )
    return num_bytes


async def _received(
    requests: AsyncIterator[gateway_pb2.UploadMediaRequest], hold: Hold
) -> tuple[gateway_pb2.UploadMediaRequest, bytes]:
    """The first message, which announces the upload, and the bytes of all."""
    announced: gateway_pb2.UploadMediaRequest | None = None

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal announced
        async for request in requests:
            announced = announced or request
            hold(len(request.data))
            yield request.data

    data = await collect(
        pieces(),
        MAX_UPLOAD_BYTES,
        InvalidRequest(
            f"uploads have at most {MAX_UPLOAD_BYTES >> 20} MiB",
            reason=Reason.REQUEST_TOO_LARGE,
            field="data",
            limit=MAX_UPLOAD_BYTES,
        ),
    )
    return announced or gateway_pb2.UploadMediaRequest(), data


def _timeout_s(context: Any) -> float:
    """What is left of the call's deadline; the pipeline has a bound of its own."""
    remaining = context.time_remaining()
    return math.inf if remaining is None else float(remaining)
