"""VisionEncoder on the wire: check the plan, encode, answer."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from mimo.encoder import EncodeService
from mimo.encoder.wire import encoded_to_proto, request_from_proto
from mimo.errors import InvalidRequest
from mimo.rpc.deadline import deadline_of
from mimo.rpc.tensors import chunks_to_proto
from mimo.rpc.upload import read_chunks, read_start
from mimo.store.wire import MODALITY_FROM_PROTO
from mimo.v1 import encoding_pb2, vision_pb2, vision_pb2_grpc
from services.vision.config import VisionTowerConfig
from services.vision.plan import VisionPlan


class VisionEncoderServicer(vision_pb2_grpc.VisionEncoderServicer):
    def __init__(
        self,
        encodes: EncodeService[VisionPlan],
        config: VisionTowerConfig,
        *,
        max_item_patches: int,
    ) -> None:
        self._encodes = encodes
        self._config = config
        self._max_item_patches = max_item_patches

    async def EncodeFrames(
        self,
        request_iterator: AsyncIterator[vision_pb2.EncodeFramesRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[vision_pb2.EncodeFramesResponse]:
        start = (await read_start(request_iterator)).start
        plan = plan_from_proto(start.plan)
        plan.check(self._config, max_patches=self._max_item_patches)
        request = request_from_proto(
            start.target,
            start.frames,
            modality=MODALITY_FROM_PROTO[start.plan.modality],
            plan=plan,
            cost=plan.num_patches,
            deadline=deadline_of(context),
        )
        plan.check_frames(request.payload_dtype, request.payload_shape)
        encoded = await self._encodes.encode(request, read_chunks(request_iterator))
        yield vision_pb2.EncodeFramesResponse(encoded=encoded_to_proto(encoded))
        if encoded.tensor is not None:
            for chunk in chunks_to_proto(encoded.tensor):
                yield vision_pb2.EncodeFramesResponse(chunk=chunk)


def plan_from_proto(plan: vision_pb2.FramePlan) -> VisionPlan:
    """Raises InvalidRequest for a modality that has no frames, and for an image of several."""
    if plan.modality not in (encoding_pb2.MODALITY_IMAGE, encoding_pb2.MODALITY_VIDEO):
        raise InvalidRequest("only images and videos have frames", field="plan.modality")
    if plan.modality == encoding_pb2.MODALITY_IMAGE and plan.num_frames != 1:
        raise InvalidRequest("an image has one frame", field="plan.num_frames")
    return VisionPlan(
        num_frames=plan.num_frames,
        source_height=plan.source_height,
        source_width=plan.source_width,
        target_height=plan.target_height,
        target_width=plan.target_width,
        grid_thw=(plan.grid_t, plan.grid_h, plan.grid_w),
        resized=plan.resized,
    )
