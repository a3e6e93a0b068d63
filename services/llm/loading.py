"""From a model directory to an engine that is warm, probed and measured."""

import json
import logging
import re
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer

from mimo.checkpoint.index import CheckpointIndex
from mimo.checkpoint.rules import QkvRows, qkv_rows
from mimo.leaf.startup import Startup
from mimo.metrics import Metrics
from mimo.nn.device import Compute
from mimo.rpc.replica import Description
from mimo.store import Modality
from services.llm.calibration import calibrate
from services.llm.engine.block_manager import BlockManager
from services.llm.engine.core import EngineCore
from services.llm.engine.drafter import Drafter
from services.llm.engine.kv_cache import KVCache, KVLayout
from services.llm.engine.runner import Runner
from services.llm.engine.sampler import Sampler
from services.llm.engine.scheduler import Scheduler
from services.llm.grammars import GrammarCompiler, NoGrammars
from services.llm.memory import MIB, available_bytes, kv_bytes, weight_bytes
from services.llm.model.config import DecoderConfig
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.weights import ELSEWHERE, load_decoder
from services.llm.servicer import ModelFacts
from services.llm.settings import LlmSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """``prefill_rate``: prompt tokens per second, measured."""

    core: EngineCore
    facts: ModelFacts
    grammars: GrammarCompiler | NoGrammars
    description: Description
    prefill_rate: float


def load(settings: LlmSettings, metrics: Metrics) -> LoadedDecoder:
    """Read the checkpoint, probe the attention backends, warm up. Raises StartupError.

    Whether weights and cache fit is decided before anything is allocated.
    """
    startup = Startup(settings, metrics)
    compute = startup.compute
    with startup.phase("weights"):
        index = CheckpointIndex.open(startup.directory)
        names = index.select(lambda name: not re.search("|".join(ELSEWHERE), name))
        cache_bytes = kv_bytes(
            compute.device,
            weight_bytes(names.values(), compute.dtype),
            available_bytes(compute.device),
            settings.kv_memory_mib,
        )
        decoder, mtp = load_decoder(
            index,
            dtype=compute.dtype,
            device=compute.device,
            selector=startup.selector,
            profile=settings.numeric_overrides,
        )
        config = decoder.config
        weights = index.fingerprint(names, mode=settings.fingerprint_mode)
    startup.use_threads(config.hidden_size)
    startup.probe()
    with startup.phase("calibrate"):
        pad_ids = _pad_ids(config)
        backends = [(bound.layer_kind, bound.backend.name) for bound in startup.selector.choices]
        core = build_core(
            settings,
            compute,
            decoder,
            mtp if settings.max_draft_tokens > 0 else None,
            cache_bytes,
            masked_ids=_unknown_ids(index, config.vocab_size) | set(pad_ids.values()),
            identity=repr((weights, compute.dtype_name, config.swa_visible, backends)).encode(),
        )
        prefill_rate = calibrate(core)
    rows = qkv_rows(index.config, cast("QkvRows | None", settings.qkv_rows or None))
    scheduler = core.scheduler
    description = startup.describe(
        weights=weights,
        config=index.config,
        numeric_profile={"swa_visible": str(config.swa_visible), "qkv_rows": rows or "split"},
        hidden_size=config.hidden_size,
        limits={
            "max_context_tokens": scheduler.max_context,
            "max_running_requests": scheduler.max_running,
            "max_step_tokens": scheduler.max_step_tokens,
            "max_draft_tokens": core.max_draft_tokens,
        },
    )
    facts = ModelFacts(description.fingerprint, config.vocab_size, config.hidden_size, pad_ids)
    grammars = _grammars(index, config.vocab_size)
    return LoadedDecoder(core, facts, grammars, description, prefill_rate)


def build_core(
    settings: LlmSettings,
    compute: Compute,
    decoder: Decoder,
    mtp: Mtp | None,
    cache_bytes: int,
    masked_ids: set[int],
    identity: bytes = b"",
) -> EngineCore:
    """Divide the cache's memory and put the parts of the engine together.

    ``identity`` names what decides keys and values besides tokens, for the prefix cache.
    """
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
    blocks = BlockManager(
        groups, settings.block_size, lookahead=layout.num_draft_tokens, identity=identity
    )
    scheduler = Scheduler(blocks, **limits)
    return EngineCore(scheduler, runner, sampler, drafter)


def _pad_ids(config: DecoderConfig) -> dict[Modality, int]:
    ids = {
        Modality.IMAGE: config.image_token_id,
        Modality.VIDEO: config.video_token_id,
        Modality.AUDIO: config.audio_token_id,
    }
    return {modality: pad_id for modality, pad_id in ids.items() if pad_id is not None}


def _grammars(index: CheckpointIndex, vocab_size: int) -> GrammarCompiler | NoGrammars:
    path = index.directory / "tokenizer.json"
    if not path.is_file():
        return NoGrammars()
    settings = index.directory / "generation_config.json"
    ids = json.loads(settings.read_text()).get("eos_token_id") if settings.is_file() else None
    ids = index.config.get("eos_token_id") if ids is None else ids
    return GrammarCompiler.open(path, vocab_size, [ids] if isinstance(ids, int) else ids or [])


def _unknown_ids(index: CheckpointIndex, vocab_size: int) -> set[int]:
    """Rows of the head that the tokenizer has no token for. They must never be sampled."""
    path = index.directory / "tokenizer.json"
    if not path.is_file():
        logger.warning("no tokenizer.json: every id of the vocabulary may be sampled")
        return set()
    known = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    return set(range(vocab_size)) - set(known)
