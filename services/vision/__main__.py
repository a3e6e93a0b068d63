"""The vision process: load the tower, wire the parts, serve."""

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch

from mimo import logs
from mimo.checkpoint.directory import model_directory
from mimo.checkpoint.index import CheckpointIndex
from mimo.config import parse
from mimo.encoder import EncodeService
from mimo.encoder.fingerprint import encoder_fingerprint
from mimo.encoder.wire import replica_load
from mimo.metrics import VISION, Metrics
from mimo.nn.attention import AttentionSelector
from mimo.nn.attention.override import override_for
from mimo.nn.device import Compute
from mimo.rpc.replica import AttentionChoice, Description
from mimo.rpc.server import Service, exit_status, serve
from mimo.store import open_store
from mimo.v1 import vision_pb2, vision_pb2_grpc
from services.vision.calibration import calibrate
from services.vision.config import VisionTowerConfig
from services.vision.encoder import VisionEncoder
from services.vision.preprocess import Preprocessor
from services.vision.servicer import VisionEncoderServicer
from services.vision.settings import VisionSettings
from services.vision.weights import find_prefix, load_vision_tower, read_tower_config

PROGRAM = "mimo-vision"

# Narrower towers lose more by handing their products to other threads than they gain.
MULTITHREADED_WIDTH = 512


def main() -> int:
    return exit_status(PROGRAM, _serve)


def _serve() -> None:
    settings = parse(VisionSettings, program=PROGRAM)
    logs.configure(VISION, level=settings.log_level, form=settings.log_format)
    metrics = Metrics(VISION)
    asyncio.run(
        serve(settings, settings.address, metrics, lambda: vision_service(settings, metrics))
    )


@contextlib.asynccontextmanager
async def vision_service(settings: VisionSettings, metrics: Metrics) -> AsyncIterator[Service]:
    """Load the encoder off the event loop and put it behind its servicer.

    Raises StartupError when the model, the device or an option does not fit.
    """
    async with contextlib.aclosing(open_store(settings.store, metrics)) as store:
        loaded = await asyncio.to_thread(load, settings, metrics)
        encodes = EncodeService(
            store,
            loaded.encoder,
            metrics,
            encoder_fingerprint=loaded.description.fingerprint,
            max_batch_cost=settings.max_batch_patches,
            max_queued_cost=settings.max_queued_patches,
            max_payload_bytes=settings.max_item_bytes,
            work_per_second=loaded.patches_per_second,
        )
        servicer = VisionEncoderServicer(
            encodes, loaded.config, max_item_patches=settings.max_item_patches
        )
        try:
            yield Service(
                add=functools.partial(
                    vision_pb2_grpc.add_VisionEncoderServicer_to_server, servicer
                ),
                names=[vision_pb2.DESCRIPTOR.services_by_name["VisionEncoder"].full_name],
                description=loaded.description,
                load=lambda: replica_load(encodes.load),
            )
        finally:
            await encodes.close()


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    encoder: VisionEncoder
    config: VisionTowerConfig
    description: Description
    patches_per_second: float


def load(settings: VisionSettings, metrics: Metrics) -> LoadedEncoder:
    """Read the checkpoint, probe the attention backends, warm up. Raises StartupError."""
    started = time.monotonic()

    def finish_phase(phase: str) -> None:
        nonlocal started
        now = time.monotonic()
        metrics.set("mimo_startup_seconds", now - started, phase=phase)
        started = now

    compute = Compute.resolve(settings.device, settings.dtype)
    index = CheckpointIndex.open(model_directory(settings.model))
    config = read_tower_config(index, settings.numeric_overrides)
    if compute.device_type == "cpu":
        narrow = config.hidden_size < MULTITHREADED_WIDTH
        torch.set_num_threads(settings.threads or (1 if narrow else torch.get_num_threads()))
    selector = AttentionSelector(VISION, override=override_for(VISION, settings.attention))
    tower = load_vision_tower(
        index, config, dtype=compute.dtype, device=compute.device, selector=selector
    )
    fingerprint = encoder_fingerprint(
        weights=index.fingerprint(
            index.select(find_prefix(index)),
            mode="index" if settings.fingerprint_from_index else "content",
        ),
        config=asdict(config),
        numeric_profile=config.numeric_profile,
        dtype=compute.dtype_name,
        device_type=compute.device_type,
    )
    finish_phase("weights")

    selector.probe()
    attention = [
        AttentionChoice(
            layer_kind=str(row["layer_kind"]),
            backend=str(row["backend"]),
            reason=str(row["reason"]),
            demoted=bool(row["demoted"]),
        )
        for row in selector.report()
    ]
    for choice in attention:
        metrics.set("mimo_attention_demoted", choice.demoted, layer_kind=choice.layer_kind)
    finish_phase("probe")

    encoder = VisionEncoder(
        tower, Preprocessor(config, compute.device), max_patches=settings.max_batch_patches
    )
    patches_per_second = calibrate(encoder, config)
    finish_phase("calibrate")

    description = Description(
        component=VISION,
        version=version("mimo-serve"),
        model=settings.served_model_name or index.directory.name,
        fingerprint=fingerprint,
        dtype=compute.dtype_name,
        device=compute.device_type,
        hidden_size=config.out_hidden_size,
        embedding_dtype=compute.dtype_name,
        numeric_profile=config.numeric_profile,
        attention=attention,
        limits={
            "max_batch_patches": settings.max_batch_patches,
            "max_item_patches": settings.max_item_patches,
            "max_item_bytes": settings.max_item_bytes,
        },
    )
    return LoadedEncoder(encoder, config, description, patches_per_second)


if __name__ == "__main__":
    sys.exit(main())
