"""The vision service over real gRPC, with a tiny tower and a store in memory."""

import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.errors import (
    EmbeddingMismatch,
    InvalidRequest,
    MimoError,
    Reason,
    StartupError,
    Unavailable,
)
from mimo.metrics import VISION, Metrics
from mimo.nn.attention import AttentionSelector
from mimo.nn.interop import from_torch, to_torch
from mimo.rpc.channel import open_channel
from mimo.rpc.status import from_rpc_error
from mimo.rpc.tensors import chunk_from_proto, chunks_to_proto, header_from_proto, header_to_proto
from mimo.tensor import Assembler, RawTensor
from mimo.v1 import encoding_pb2, replica_pb2, replica_pb2_grpc, vision_pb2, vision_pb2_grpc
from services.vision.__main__ import vision_service
from services.vision.config import VisionTowerConfig
from services.vision.encoder import VisionEncoder
from services.vision.model import VisionTower
from services.vision.plan import VisionPlan
from services.vision.preprocess import Preprocessor
from services.vision.settings import VisionSettings
from tests.support import golden_vision
from tests.support.serving import serving

IMAGE = VisionPlan(1, 20, 30, 16, 24, (1, 4, 6))
CLIP = VisionPlan(5, 40, 20, 32, 16, (3, 8, 4))
RESIZED = replace(CLIP, resized=True)


def write_checkpoint(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(golden_vision.config()))
    weights = golden_vision.weights()
    save_file(
        {f"visual.{name}": value.float() for name, value in weights.items()},
        directory / "model.safetensors",
    )


@dataclass
class Running:
    """A served encoder and its client."""

    stub: "vision_pb2_grpc.VisionEncoderAsyncStub"
    description: replica_pb2.DescribeResponse
    metrics: Metrics

    def start(
        self, plan: VisionPlan, key: str = "image", *, bypass: bool = False, inline: bool = False
    ) -> vision_pb2.EncodeFramesStart:
        is_image = plan.num_frames == 1
        grid_t, grid_h, grid_w = plan.grid_thw
        return vision_pb2.EncodeFramesStart(
            target=encoding_pb2.EncodeTarget(
                key=hashlib.sha256(key.encode()).hexdigest(),
                encoder_fingerprint=self.description.fingerprint,
                bypass=bypass,
                inline=inline,
            ),
            plan=vision_pb2.FramePlan(
                modality=(encoding_pb2.MODALITY_IMAGE if is_image else encoding_pb2.MODALITY_VIDEO),
                source_height=plan.source_height,
                source_width=plan.source_width,
                num_frames=plan.num_frames,
                target_height=plan.target_height,
                target_width=plan.target_width,
                grid_t=grid_t,
                grid_h=grid_h,
                grid_w=grid_w,
                resized=plan.resized,
            ),
            frames=header_to_proto(plan.frames_dtype, plan.frames_shape),
        )

    async def encode(
        self, start: vision_pb2.EncodeFramesStart, tensor: RawTensor
    ) -> tuple[encoding_pb2.Encoded, RawTensor | None]:
        """Upload everything; the answer and, if inline, the embedding. Raises MimoError."""
        return await self.answer(upload(start, tensor))

    async def answer(
        self, messages: Iterator[vision_pb2.EncodeFramesRequest]
    ) -> tuple[encoding_pb2.Encoded, RawTensor | None]:
        try:
            events = [event async for event in self.stub.EncodeFrames(messages)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        encoded = events[0].encoded
        if not encoded.inline:
            assert len(events) == 1
            return encoded, None
        assembler = Assembler(*header_from_proto(encoded.embedding))
        for event in events[1:]:
            assembler.add(chunk_from_proto(event.chunk))
        return encoded, assembler.finish()


def upload(
    start: vision_pb2.EncodeFramesStart, tensor: RawTensor
) -> Iterator[vision_pb2.EncodeFramesRequest]:
    yield vision_pb2.EncodeFramesRequest(start=start)
    for chunk in chunks_to_proto(tensor):
        yield vision_pb2.EncodeFramesRequest(chunk=chunk)


@contextlib.asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Running]:
    write_checkpoint(directory)
    settings = VisionSettings(
        model=str(directory), store="memory://", threads=1, max_item_patches=128
    )
    metrics = Metrics(VISION)
    async with (
        serving(settings, metrics, vision_service) as address,
        open_channel(address) as channel,
    ):
        description = await replica_pb2_grpc.ReplicaStub(channel).Describe(
            replica_pb2.DescribeRequest()
        )
        yield Running(vision_pb2_grpc.VisionEncoderStub(channel), description, metrics)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path) as running_service:
        yield running_service


def frames(plan: VisionPlan) -> RawTensor:
    generator = torch.Generator().manual_seed(plan.num_frames)
    values = torch.randint(0, 256, plan.frames_shape, generator=generator, dtype=torch.uint8)
    return from_torch(values.float() if plan.resized else values)


def expected(plan: VisionPlan) -> RawTensor:
    """The embedding that the tower gives without any service around it."""
    config = VisionTowerConfig.from_checkpoint(golden_vision.config())
    tower = VisionTower(config, AttentionSelector(VISION))
    tower.load_state_dict({n: w.float() for n, w in golden_vision.weights().items()})
    encoder = VisionEncoder(tower, Preprocessor(config, "cpu"), max_patches=1 << 14)
    return encoder.encode([(plan, frames(plan))])[0]


async def refused(service: Running, start: vision_pb2.EncodeFramesStart) -> MimoError:
    with pytest.raises(InvalidRequest) as error:
        await service.encode(start, frames(IMAGE))
    return error.value


async def test_process_says_what_it_runs(service: Running) -> None:
    description = service.description
    assert description.component == "vision"
    assert len(description.fingerprint) == 64
    assert dict(description.numeric_profile) == {
        "vision_sinks": "key0",
        "vision_merger_norm": "layer",
        "vision_pixel_stats": "clip",
        "vision_resize": "bilinear",
    }
    assert {choice.layer_kind for choice in description.attention} == {"full", "band"}
    assert not any(choice.demoted for choice in description.attention)
    assert description.hidden_size == 24
    assert description.limits["max_item_patches"] == 128


@pytest.mark.parametrize("plan", [IMAGE, CLIP, RESIZED], ids=["image", "clip", "resized"])
async def test_inline_embedding_is_bit_equal_to_the_bare_tower(
    service: Running, plan: VisionPlan
) -> None:
    encoded, tensor = await service.encode(service.start(plan, inline=True), frames(plan))
    assert encoded.outcome == encoding_pb2.CACHE_OUTCOME_MISS
    bare = expected(plan)
    assert tensor is not None
    assert (tensor.dtype, tensor.shape) == (bare.dtype, bare.shape)
    assert bytes(tensor.data) == bytes(bare.data)


async def test_second_call_is_a_hit_that_needs_no_upload(service: Running) -> None:
    first, tensor = await service.encode(service.start(IMAGE), frames(IMAGE))
    assert first.outcome == encoding_pb2.CACHE_OUTCOME_MISS
    assert tensor is None
    assert len(first.manifest_digest) == 32
    assert list(first.embedding.shape) == [6, 24]
    assert first.encode_ms > 0

    only_start = vision_pb2.EncodeFramesRequest(start=service.start(IMAGE))
    second, _ = await service.answer(iter([only_start]))
    assert second.outcome == encoding_pb2.CACHE_OUTCOME_HIT
    assert second.manifest_digest == first.manifest_digest
    assert second.encode_ms == 0

    _, stored = await service.encode(service.start(IMAGE, inline=True), frames(IMAGE))
    assert stored is not None
    assert bytes(stored.data) == bytes(expected(IMAGE).data)


async def test_bypass_encodes_again(service: Running) -> None:
    await service.encode(service.start(IMAGE), frames(IMAGE))
    again, _ = await service.encode(service.start(IMAGE, bypass=True), frames(IMAGE))
    assert again.outcome == encoding_pb2.CACHE_OUTCOME_BYPASS
    assert again.encode_ms > 0


async def test_calls_at_once_agree_with_calls_alone(service: Running) -> None:
    plans = [IMAGE, CLIP, RESIZED] * 2
    calls = [
        service.encode(service.start(plan, key=f"{i}", inline=True), frames(plan))
        for i, plan in enumerate(plans)
    ]
    for plan, (_, tensor) in zip(plans, await asyncio.gather(*calls), strict=True):
        assert tensor is not None
        torch.testing.assert_close(to_torch(tensor), to_torch(expected(plan)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (replace(IMAGE, grid_thw=(1, 6, 4)), "plan.grid_t"),
        (replace(IMAGE, target_height=18), "plan.target_height"),
        (replace(IMAGE, source_width=0), "plan"),
        (replace(CLIP, num_frames=5, grid_thw=(2, 8, 4)), "plan.grid_t"),
    ],
)
async def test_contradicting_plan_is_refused(
    service: Running, plan: VisionPlan, field: str
) -> None:
    error = await refused(service, service.start(plan))
    assert error.reason is Reason.INVALID_VALUE
    assert error.field == field
    assert service.metrics.value("mimo_encoder_admitted_work_total") == 0


async def test_item_beyond_the_limit_is_refused(service: Running) -> None:
    error = await refused(service, service.start(VisionPlan(9, 32, 16, 32, 16, (5, 8, 4))))
    assert error.reason is Reason.MEDIA_LIMIT
    assert error.metadata["limit"] == "128"


async def test_frames_must_be_those_of_the_plan(service: Running) -> None:
    start = service.start(IMAGE)
    start.frames.CopyFrom(header_to_proto("uint8", (1, 30, 20, 3)))
    assert (await refused(service, start)).field == "frames"


async def test_image_has_one_frame_and_sound_has_none(service: Running) -> None:
    start = service.start(CLIP)
    start.plan.modality = encoding_pb2.MODALITY_IMAGE
    assert (await refused(service, start)).field == "plan.num_frames"
    start.plan.modality = encoding_pb2.MODALITY_AUDIO
    assert (await refused(service, start)).field == "plan.modality"


async def test_upload_begins_with_a_start(service: Running) -> None:
    messages = list(upload(service.start(IMAGE), frames(IMAGE)))
    for broken in (messages[1:], []):
        with pytest.raises(InvalidRequest, match="start"):
            await service.answer(iter(broken))


async def test_early_answers_reach_a_caller_that_is_still_uploading(service: Running) -> None:
    """Uploads of six megabytes that nobody needs: refused by their header, or already encoded."""
    large = VisionPlan(1, 1400, 1400, 16, 24, (1, 4, 6))
    key_of_another = service.start(large)
    key_of_another.target.encoder_fingerprint = "0" * 64
    for _ in range(5):
        with pytest.raises(EmbeddingMismatch):
            await service.encode(key_of_another, frames(large))
    outcomes = []
    for _ in range(6):
        encoded, _ = await service.encode(service.start(large), frames(large))
        outcomes.append(encoded.outcome)
    assert outcomes == [encoding_pb2.CACHE_OUTCOME_MISS] + [encoding_pb2.CACHE_OUTCOME_HIT] * 5


async def test_damaged_chunk_is_refused_and_the_key_stays_usable(service: Running) -> None:
    messages = list(upload(service.start(IMAGE), frames(IMAGE)))
    messages[1].chunk.crc32c ^= 1
    with pytest.raises(InvalidRequest, match="damaged"):
        await service.answer(iter(messages))
    with pytest.raises(InvalidRequest, match="ended"):
        await service.answer(iter(messages[:1]))
    encoded, _ = await service.encode(service.start(IMAGE), frames(IMAGE))
    assert encoded.outcome == encoding_pb2.CACHE_OUTCOME_MISS


async def test_frames_that_are_not_finite_are_refused(service: Running) -> None:
    values = to_torch(frames(RESIZED)).clone()
    values[0, 0, 0, 0] = float("nan")
    with pytest.raises(InvalidRequest) as error:
        await service.encode(service.start(RESIZED), from_torch(values))
    assert error.value.field == "frames"


async def test_key_of_another_encoder_is_a_mismatch(service: Running) -> None:
    start = service.start(IMAGE)
    start.target.encoder_fingerprint = "0" * 64
    with pytest.raises(EmbeddingMismatch):
        await service.encode(start, frames(IMAGE))


def test_start_up_failure_is_one_line_and_status_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.vision", "--model", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 1
    last = process.stderr.splitlines()[-1]
    assert last.startswith("mimo-vision: ")
    assert "config.json" in last
    assert "Traceback" not in process.stderr


async def test_a_broken_device_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: VisionTower, patches: Tensor, grids: object) -> Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(StartupError, match="device is broken"):
        async with running(tmp_path) as service:
            monkeypatch.setattr(VisionTower, "forward", forward)
            with pytest.raises(Unavailable):
                await service.encode(service.start(IMAGE), frames(IMAGE))
