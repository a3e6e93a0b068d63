"""mimo.v1.Gateway: translate, ask the pipeline, translate back."""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from gateway.catalog import Catalog
from gateway.generation import GenerationRequest
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
        self, pipeline: Pipeline, catalog: Catalog, uploads: Uploads, meter: CallMeter
    ) -> None:
        self._pipeline = pipeline
        self._catalog = catalog
        self._uploads = uploads
        self._meter = meter

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        with self._call("generate", request):
            self._pipeline.check_room(_timeout_s(context))
            call = generation_request(request, request_id(), _timeout_s(context))
            name, with_reasoning = self._catalog.card.name, not request.reasoning.exclude
            seq = 0
            async with aclosing(self._meter.events(self._pipeline.generate(call))) as events:
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
        with self._meter.call("upload"):
            announced, data = await _received(requests)
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
        with self._meter.call(method):
            try:
                _check_size(request)
                self._catalog.check(request.model)
                yield
            except MimoError as error:
                if error.field is not None:
                    error.field = error.field.replace(".content[", ".parts[")
                raise


def _check_size(request: Any) -> None:
    num_bytes = request.ByteSize()
    if num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the request has {num_bytes / (1 << 20):.1f} MiB, and a message may have "
            f"{MAX_MESSAGE_BYTES >> 20}: send large media by UploadMedia and refer to them",
            reason=Reason.REQUEST_TOO_LARGE,
            field="messages",
            limit=MAX_MESSAGE_BYTES,
        )


async def _received(
    requests: AsyncIterator[gateway_pb2.UploadMediaRequest],
) -> tuple[gateway_pb2.UploadMediaRequest, bytes]:
    """The first message, which announces the upload, and the bytes of all."""
    first: gateway_pb2.UploadMediaRequest | None = None
    data = bytearray()
    async for request in requests:
        first = first or request
        data += request.data
        if len(data) > MAX_UPLOAD_BYTES:
            raise InvalidRequest(
                f"uploads have at most {MAX_UPLOAD_BYTES >> 20} MiB",
                reason=Reason.REQUEST_TOO_LARGE,
                field="data",
                limit=MAX_UPLOAD_BYTES,
            )
    return first or gateway_pb2.UploadMediaRequest(), bytes(data)


def _timeout_s(context: Any) -> float:
    """What is left of the call's deadline; the pipeline has a bound of its own."""
    remaining = context.time_remaining()
    return math.inf if remaining is None else float(remaining)
