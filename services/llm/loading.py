"""From a model directory to an engine that is warm, probed and measured."""

import logging
import re
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import cast

import torch
from tokenizers import Tokenizer

from mimo.checkpoint.directory import model_directory
from mimo.checkpoint.index import CheckpointIndex
from mimo.checkpoint.rules import QkvRows, qkv_rows
from mimo.encoder.fingerprint import encoder_fingerprint
from mimo.metrics import LLM, Metrics
from mimo.nn.attention import AttentionSelector
from mimo.nn.attention.override import override_for
from mimo.nn.device import Compute
from mimo.rpc.replica import AttentionChoice, Description
from mimo.store import Modality
from services.llm.calibration import calibrate
from services.llm.engine.block_manager import BlockManager
from services.llm.engine.core import EngineCore
from services.llm.engine.drafter import Drafter
from services.llm.engine.kv_cache import KVCache, KVLayout
from services.llm.engine.runner import Runner
from services.llm.engine.sampler import Sampler
from services.llm.engine.scheduler import Scheduler
from services.llm.memory import MIB, available_bytes, kv_bytes, weight_bytes
from services.llm.model.config import DecoderConfig
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.weights import ELSEWHERE, load_decoder
from services.llm.servicer import ModelFacts
from services.llm.settings import LlmSettings

# Narrower models lose more by handing their products to other threads than they gain.
MULTITHREADED_WIDTH = 512

# The metric's word for a kind of layer.
_LAYER_KINDS = {"sliding": "window"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """``prefill_rate``: prompt tokens per second, measured."""

    core: EngineCore
    facts: ModelFacts
    description: Description
    prefill_rate: float


def load(settings: LlmSettings, metrics: Metrics) -> LoadedDecoder:
    """Read the checkpoint, probe the attention backends, warm up. Raises StartupError.

    Whether weights and cache fit is decided before anything is allocated.
    """
    phases = _Phases(metrics)
    compute = Compute.resolve(settings.device, settings.dtype)
    index = CheckpointIndex.open(model_directory(settings.model))
    names = index.select(lambda name: not re.search("|".join(ELSEWHERE), name))
    cache_bytes = kv_bytes(
        compute.device,
        weight_bytes(names.values(), compute.dtype),
        available_bytes(compute.device),
        settings.kv_memory_mib,
    )
    selector = AttentionSelector(LLM, override=override_for(LLM, settings.attention))
    decoder, mtp = load_decoder(
        index,
        dtype=compute.dtype,
        device=compute.device,
        selector=selector,
        profile=settings.numeric_overrides,
    )
    config = decoder.config
    rows = qkv_rows(index.config, cast("QkvRows | None", settings.qkv_rows or None))
    numeric_profile = {"swa_visible": str(config.swa_visible), "qkv_rows": rows or "split"}
    fingerprint = encoder_fingerprint(
        weights=index.fingerprint(
            names, mode="index" if settings.fingerprint_from_index else "content"
        ),
        config=index.config,
        numeric_profile=numeric_profile,
        dtype=compute.dtype_name,
        device_type=compute.device_type,
    )
    phases.finish("weights")

    if compute.device_type == "cpu":
        is_narrow = config.hidden_size < MULTITHREADED_WIDTH
        torch.set_num_threads(settings.threads or (1 if is_narrow else torch.get_num_threads()))
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
        kind = _LAYER_KINDS.get(choice.layer_kind, choice.layer_kind)
        metrics.set("mimo_attention_demoted", choice.demoted, layer_kind=kind)
    phases.finish("probe")

    pad_ids = _pad_ids(config)
    core = build_core(
        settings,
        compute,
        decoder,
        mtp if settings.max_draft_tokens > 0 else None,
        cache_bytes,
        masked_ids=_unknown_ids(index, config.vocab_size) | set(pad_ids.values()),
    )
    prefill_rate = calibrate(core)
    phases.finish("calibrate")

    scheduler = core.scheduler
    description = Description(
        component=LLM,
        version=version("mimo-serve"),
        model=settings.served_model_name or index.directory.name,
        fingerprint=fingerprint,
        dtype=compute.dtype_name,
        device=compute.device_type,
        hidden_size=config.hidden_size,
        embedding_dtype=compute.dtype_name,
        numeric_profile=numeric_profile,
        attention=attention,
        limits={
            "max_context_tokens": scheduler.max_context,
            "max_running_requests": scheduler.max_running,
            "max_step_tokens": scheduler.max_step_tokens,
            "max_draft_tokens": core.max_draft_tokens,
        },
    )
    facts = ModelFacts(fingerprint, config.vocab_size, config.hidden_size, pad_ids)
    return LoadedDecoder(core, facts, description, prefill_rate)


def build_core(
    settings: LlmSettings,
    compute: Compute,
    decoder: Decoder,
    mtp: Mtp | None,
    cache_bytes: int,
    masked_ids: set[int],
) -> EngineCore:
    """Divide the cache's memory and put the parts of the engine together."""
    config = decoder.config
    is_gpu = compute.device_type == "cuda"
    limits = {
        "max_running": settings.max_running or (256 if is_gpu else 32),
        "max_step_tokens": settings.max_step_tokens or (8192 if is_gpu else 512),
        "max_context": settings.max_context or config.max_position_embeddings,
    }
    layout = KVLayout(
        layers=(*config.layers, *(config.mtp_layers if mtp is not None else ())),
        swa_visible=config.swa_visible,
        num_draft_tokens=0 if mtp is None else config.num_nextn_predict_layers,
        block_size=settings.block_size,
        dtype=compute.dtype,
    )
    groups = layout.groups(cache_bytes, **limits)
    cache = KVCache(layout, groups, compute.device)
    logger.info(
        "KV cache",
        extra={"mib": cache.num_bytes // MIB, **{g.name: g.num_blocks for g in groups}},
    )
    runner = Runner(decoder, mtp, cache, compute.device)
    sampler = Sampler(masked_ids)
    drafter = None
    if mtp is not None:
        drafter = Drafter(runner, sampler, max_draft_tokens=settings.max_draft_tokens)
    scheduler = Scheduler(BlockManager(groups, settings.block_size), **limits)
    return EngineCore(scheduler, runner, sampler, drafter)


class _Phases:
    """Durations of the phases of a start, as metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = time.monotonic()

    def finish(self, phase: str) -> None:
        now = time.monotonic()
        self._metrics.set("mimo_startup_seconds", now - self._started, phase=phase)
        self._started = now


def _pad_ids(config: DecoderConfig) -> dict[Modality, int]:
    ids = {
        Modality.IMAGE: config.image_token_id,
        Modality.VIDEO: config.video_token_id,
        Modality.AUDIO: config.audio_token_id,
    }
    return {modality: pad_id for modality, pad_id in ids.items() if pad_id is not None}


def _unknown_ids(index: CheckpointIndex, vocab_size: int) -> set[int]:
    """Rows of the head that the tokenizer has no token for. They must never be sampled."""
    path = index.directory / "tokenizer.json"
    if not path.is_file():
        logger.warning("no tokenizer.json: every id of the vocabulary may be sampled")
        return set()
    known = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    return set(range(vocab_size)) - set(known)
