"""The audio process: load tokenizer and encoder, wire the parts, serve."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch

from mimo import logs
from mimo.checkpoint.directory import model_directory
from mimo.config import parse
from mimo.encoder import EncodeService
from mimo.encoder.fingerprint import encoder_fingerprint
from mimo.encoder.wire import replica_load
from mimo.metrics import AUDIO, Metrics
from mimo.nn.attention import AttentionSelector
from mimo.nn.attention.override import override_for
from mimo.nn.device import Compute
from mimo.rpc.replica import AttentionChoice, Description
from mimo.rpc.server import Service, exit_status, serve
from mimo.store import open_store
from mimo.v1 import audio_pb2, audio_pb2_grpc
from services.audio.calibration import calibrate
from services.audio.encoder import AudioTower
from services.audio.servicer import AudioEncoderServicer
from services.audio.settings import AudioSettings
from services.audio.weights import AudioCheckpoint

PROGRAM = "mimo-audio"

# Narrower models lose more by handing their products to other threads than they gain.
MULTITHREADED_WIDTH = 512

SAMPLE_BYTES = 4  # float32


def main() -> int:
    return exit_status(PROGRAM, _serve)


def _serve() -> None:
    settings = parse(AudioSettings, program=PROGRAM)
    logs.configure(AUDIO, level=settings.log_level, form=settings.log_format)
    metrics = Metrics(AUDIO)
    asyncio.run(
        serve(settings, settings.address, metrics, lambda: audio_service(settings, metrics))
    )


@contextlib.asynccontextmanager
async def audio_service(settings: AudioSettings, metrics: Metrics) -> AsyncIterator[Service]:
    """Load the encoder off the event loop and put it behind its servicer.

    Raises StartupError when the model, the device or an option does not fit.
    """
    store = open_store(settings.store, metrics)
    loaded = await asyncio.to_thread(load, settings, metrics)
    encodes = EncodeService(
        store,
        loaded.tower,
        metrics,
        encoder_fingerprint=loaded.description.fingerprint,
        max_batch_cost=settings.max_batch_seconds,
        max_queued_cost=settings.max_queued_seconds,
        max_payload_bytes=int(settings.max_item_seconds * loaded.sample_rate * SAMPLE_BYTES),
        work_per_second=loaded.seconds_per_second,
    )
    servicer = AudioEncoderServicer(
        encodes, sample_rate=loaded.sample_rate, max_item_seconds=settings.max_item_seconds
    )
    try:
        yield Service(
            add=lambda server: audio_pb2_grpc.add_AudioEncoderServicer_to_server(servicer, server),
            names=[audio_pb2.DESCRIPTOR.services_by_name["AudioEncoder"].full_name],
            description=loaded.description,
            load=lambda: replica_load(encodes.load),
        )
    finally:
        await encodes.close()
        await store.aclose()


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    tower: AudioTower
    sample_rate: int
    description: Description
    seconds_per_second: float


def load(settings: AudioSettings, metrics: Metrics) -> LoadedEncoder:
    """Read the checkpoint, probe the attention backends, warm up. Raises StartupError."""
    started = time.monotonic()

    def finish_phase(phase: str) -> None:
        nonlocal started
        now = time.monotonic()
        metrics.set("mimo_startup_seconds", now - started, phase=phase)
        started = now

    compute = Compute.resolve(settings.device, settings.dtype)
    directory = model_directory(settings.model)
    checkpoint = AudioCheckpoint.open(
        directory, settings.audio_tokenizer_path or None, settings.numeric_overrides
    )
    tokenizer_config = checkpoint.tokenizer_config
    if compute.device_type == "cpu":
        narrow = tokenizer_config.d_model < MULTITHREADED_WIDTH
        torch.set_num_threads(settings.threads or (1 if narrow else torch.get_num_threads()))
    selector = AttentionSelector(AUDIO, override=override_for(AUDIO, settings.attention))
    encoder = checkpoint.load(dtype=compute.dtype, device=compute.device, selector=selector)
    fingerprint = encoder_fingerprint(
        weights=checkpoint.fingerprint("index" if settings.fingerprint_from_index else "content"),
        config={
            "audio_config": asdict(checkpoint.encoder_config),
            "audio_tokenizer": asdict(tokenizer_config),
        },
        numeric_profile=tokenizer_config.numeric_profile,
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

    tower = AudioTower(encoder, compute.device)
    seconds_per_second = calibrate(tower, tokenizer_config.sampling_rate)
    finish_phase("calibrate")

    description = Description(
        component=AUDIO,
        version=version("mimo-serve"),
        model=settings.served_model_name or directory.name,
        fingerprint=fingerprint,
        dtype=compute.dtype_name,
        device=compute.device_type,
        hidden_size=checkpoint.encoder_config.out_hidden_size,
        embedding_dtype=compute.dtype_name,
        numeric_profile=tokenizer_config.numeric_profile,
        attention=attention,
        limits={
            "max_batch_seconds": int(settings.max_batch_seconds),
            "max_item_seconds": int(settings.max_item_seconds),
            "sample_rate": tokenizer_config.sampling_rate,
            "segment_frames": checkpoint.encoder_config.audio_segment_size,
        },
    )
    return LoadedEncoder(tower, tokenizer_config.sampling_rate, description, seconds_per_second)


if __name__ == "__main__":
    sys.exit(main())
