"""The vision process: load the tower, wire the parts, serve."""

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import torch

from mimo.checkpoint.index import CheckpointIndex
from mimo.encoder import EncodeService
from mimo.encoder.wire import replica_load
from mimo.errors import StartupError
from mimo.leaf.process import run_leaf
from mimo.leaf.startup import Startup
from mimo.metrics import VISION, Metrics
from mimo.rpc.replica import Description
from mimo.rpc.server import End, Service
from mimo.store import open_store
from mimo.v1 import vision_pb2, vision_pb2_grpc
from services.vision.calibration import calibrate
from services.vision.config import VisionTowerConfig
from services.vision.encoder import VisionEncoder
from services.vision.preprocess import Preprocessor
from services.vision.servicer import VisionEncoderServicer
from services.vision.settings import VisionSettings
from services.vision.weights import find_prefix, load_vision_tower, read_tower_config


def main() -> int:
    return run_leaf(VISION, VisionSettings, vision_service)


@contextlib.asynccontextmanager
async def vision_service(settings: VisionSettings, metrics: Metrics) -> AsyncIterator[Service]:
    """Load the encoder off the event loop and put it behind its servicer.

    Raises StartupError when the model, the device or an option does not fit, and at the end when
    the device broke.
    """
    async with contextlib.aclosing(open_store(settings.store, metrics)) as store:
        loaded = await asyncio.to_thread(load, settings, metrics)
        end = End()
        encodes = EncodeService(
            store,
            loaded.encoder,
            metrics,
            encoder_fingerprint=loaded.description.fingerprint,
            max_batch_cost=settings.max_batch_patches,
            max_queued_cost=settings.max_queued_patches,
            max_payload_bytes=settings.max_item_bytes,
            work_per_second=loaded.patches_per_second,
            fatal=(torch.AcceleratorError,),
            on_failure=end.because,
        )
        servicer = VisionEncoderServicer(
            encodes, loaded.config, max_item_patches=settings.max_item_patches
        )
        async with contextlib.aclosing(encodes):
            yield Service(
                add=functools.partial(
                    vision_pb2_grpc.add_VisionEncoderServicer_to_server, servicer
                ),
                names=[vision_pb2.DESCRIPTOR.services_by_name["VisionEncoder"].full_name],
                description=loaded.description,
                load=lambda: replica_load(encodes.load),
                ended=end,
            )
        if end.is_set():
            raise StartupError(end.reason)


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    encoder: VisionEncoder
    config: VisionTowerConfig
    description: Description
    patches_per_second: float


def load(settings: VisionSettings, metrics: Metrics) -> LoadedEncoder:
    """Read the checkpoint, probe the attention backends, warm up. Raises StartupError."""
    startup = Startup(settings, metrics)
    compute = startup.compute
    with startup.phase("weights"):
        index = CheckpointIndex.open(startup.directory)
        config = read_tower_config(index, settings.numeric_overrides)
        startup.use_threads(config.hidden_size)
        tower = load_vision_tower(
            index, config, dtype=compute.dtype, device=compute.device, selector=startup.selector
        )
        weights = index.fingerprint(
            index.select(find_prefix(index)), mode=settings.fingerprint_mode
        )
    startup.probe()
    with startup.phase("calibrate"):
        encoder = VisionEncoder(
            tower, Preprocessor(config, compute.device), max_patches=settings.max_batch_patches
        )
        patches_per_second = calibrate(encoder, config)
    description = startup.describe(
        weights=weights,
        config=asdict(config),
        numeric_profile=config.numeric_profile,
        hidden_size=config.out_hidden_size,
        limits={
            "max_batch_patches": settings.max_batch_patches,
            "max_item_patches": settings.max_item_patches,
            "max_item_bytes": settings.max_item_bytes,
        },
    )
    return LoadedEncoder(encoder, config, description, patches_per_second)


if __name__ == "__main__":
    sys.exit(main())
