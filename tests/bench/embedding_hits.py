"""What a hit costs, and from which cost of encoding on it pays."""

import asyncio
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, Manifest
from mimo.store.redis_store import RedisStore
from tests.bench.embedding_sender import MIB, PATIENT, embedding

BFLOAT16_BYTES = 2


def run_hits(pipe: Any, store_url: str, size: str, rounds: int) -> None:
    """Look-ups of one entry, as an encoder (``find``) and a decoder (``get``) make them, and its
    first writing: wall p50 and p99 and CPU of this process, in milliseconds."""
    pipe.send(asyncio.run(_hits(store_url, size, rounds)))


async def _hits(store_url: str, size: str, rounds: int) -> dict[str, dict[str, float]]:
    store = RedisStore.from_url(store_url, Metrics("llm"), limits=PATIENT)
    tensor, key = embedding(size), EmbeddingKey(secrets.token_hex(32))
    manifest = Manifest.describe(key, tensor, encoder_fingerprint="bench", encode_ms=1e6)
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "put": lambda: store.put(manifest, tensor, replace=True),
        "find": lambda: store.find(key),
        "get": lambda: store.get(key),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            await step()
            samples[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    await store.aclose()
    return {name: _summary(each[1:]) for name, each in samples.items()}


def _summary(samples: list[tuple[float, float]]) -> dict[str, float]:
    walls = sorted(1e3 * wall for wall, _ in samples)
    return {
        "wall_p50_ms": statistics.median(walls),
        "wall_p99_ms": walls[min(len(walls) - 1, int(0.99 * len(walls)))],
        "cpu_ms": statistics.median(1e3 * cpu for _, cpu in samples),
    }


def run_towers(pipe: Any, model: str) -> None:
    """Milliseconds in which each tower of ``model`` makes a MiB of bfloat16 embedding, one thread.

    Without a model, of the small one with random weights: the work is the same as with trained.
    """
    if model:
        pipe.send(_towers(Path(model)))
        return
    from models.generate import generate

    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        pipe.send(_towers(Path(directory)))


def _towers(model: Path) -> dict[str, float]:
    from services.audio.__main__ import load as load_audio
    from services.audio.settings import AudioSettings
    from services.vision.__main__ import load as load_vision
    from services.vision.settings import VisionSettings

    common: dict[str, Any] = {"model": str(model), "store": "memory://", "threads": 1}
    sees = load_vision(VisionSettings(**common, dtype="bfloat16"), Metrics("vision"))
    hears = load_audio(AudioSettings(**common, dtype="bfloat16"), Metrics("audio"))
    image_rows = sees.patches_per_second / sees.config.merge_factor
    sound_rows = hears.seconds_per_second * _rows_per_second(hears.encoder, hears.sample_rate)
    return {
        "vision": _ms_per_mib(image_rows, sees.config.out_hidden_size),
        "audio": _ms_per_mib(sound_rows, hears.description.hidden_size),
    }


def _rows_per_second(encoder: Any, sample_rate: int) -> float:
    """Rows that one second of sound becomes."""
    import torch

    from mimo.nn.interop import from_torch
    from services.audio.plan import AudioPlan

    plan = AudioPlan(8 * sample_rate, sample_rate)
    (rows,) = encoder.encode([(plan, from_torch(torch.zeros(plan.num_samples)))])
    return float(rows.shape[0]) / plan.seconds


def _ms_per_mib(rows_per_second: float, width: int) -> float:
    return 1e3 * MIB / (rows_per_second * width * BFLOAT16_BYTES)
