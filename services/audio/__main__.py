"""The audio process: load tokenizer and embedder, wire the parts, serve."""

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import torch

from mimo.encoder import EncodeService
from mimo.encoder.wire import replica_load
from mimo.errors import StartupError
from mimo.leaf.process import run_leaf
from mimo.leaf.startup import Startup
from mimo.metrics import AUDIO, Metrics
from mimo.rpc.replica import Description
from mimo.rpc.server import End, Service
from mimo.store import open_store
from mimo.v1 import audio_pb2, audio_pb2_grpc
from services.audio.calibration import calibrate
from services.audio.encoder import AudioEncoder
from services.audio.servicer import AudioEncoderServicer
from services.audio.settings import AudioSettings
from services.audio.weights import AudioCheckpoint

SAMPLE_BYTES = 4  # float32


def main() -> int:
    return run_leaf(AUDIO, AudioSettings, audio_service)


@contextlib.asynccontextmanager
async def audio_service(settings: AudioSettings, metrics: Metrics) -> AsyncIterator[Service]:
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
            max_batch_cost=settings.max_batch_seconds,
            max_queued_cost=settings.max_queued_seconds,
            max_payload_bytes=int(settings.max_item_seconds * loaded.sample_rate * SAMPLE_BYTES),
            work_per_second=loaded.seconds_per_second,
            fatal=(torch.AcceleratorError,),
            on_failure=end.because,
        )
        servicer = AudioEncoderServicer(
            encodes, sample_rate=loaded.sample_rate, max_item_seconds=settings.max_item_seconds
        )
        async with contextlib.aclosing(encodes):
            yield Service(
                add=functools.partial(audio_pb2_grpc.add_AudioEncoderServicer_to_server, servicer),
                names=[audio_pb2.DESCRIPTOR.services_by_name["AudioEncoder"].full_name],
                description=loaded.description,
                load=lambda: replica_load(encodes.load),
                ended=end,
            )
        if end.is_set():
            raise StartupError(end.reason)


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    encoder: AudioEncoder
    sample_rate: int
    description: Description
    seconds_per_second: float


def load(settings: AudioSettings, metrics: Metrics) -> LoadedEncoder:
    """Read the checkpoint, probe the attention backends, warm up. Raises StartupError."""
    startup = Startup(settings, metrics)
    compute = startup.compute
    with startup.phase("weights"):
        checkpoint = AudioCheckpoint.open(
            startup.directory, settings.audio_tokenizer_path or None, settings.numeric_overrides
        )
        tokenizer_config = checkpoint.tokenizer_config
        startup.use_threads(tokenizer_config.d_model)
        tower = checkpoint.load(
            dtype=compute.dtype, device=compute.device, selector=startup.selector
        )
        weights = checkpoint.fingerprint(settings.fingerprint_mode)
    startup.probe()
    with startup.phase("calibrate"):
        encoder = AudioEncoder(tower, compute.device)
        seconds_per_second = calibrate(encoder, tokenizer_config.sampling_rate)
    description = startup.describe(
        weights=weights,
        config={
            "audio_config": asdict(checkpoint.encoder_config),
            "audio_tokenizer": asdict(tokenizer_config),
        },
        numeric_profile=tokenizer_config.numeric_profile,
        hidden_size=checkpoint.encoder_config.out_hidden_size,
        limits={
            "max_batch_seconds": int(settings.max_batch_seconds),
            "max_item_seconds": int(settings.max_item_seconds),
            "sample_rate": tokenizer_config.sampling_rate,
            "segment_frames": checkpoint.encoder_config.audio_segment_size,
        },
    )
    return LoadedEncoder(encoder, tokenizer_config.sampling_rate, description, seconds_per_second)


if __name__ == "__main__":
    sys.exit(main())
