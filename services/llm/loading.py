"""From a model directory to an engine that is warm, probed and measured."""

import contextlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from tokenizers import Tokenizer

from mimo.checkpoint.index import CheckpointIndex
from mimo.checkpoint.rules import QkvRows, qkv_rows
from mimo.errors import CheckpointError, StartupError
from mimo.leaf.startup import Startup
from mimo.metrics import LLM, Metrics
from mimo.nn.device import Compute
from mimo.nn.heap import keep_freed_buffers
from mimo.nn.linear import pack_weights, packing_for
from mimo.rpc.replica import Description
from mimo.store import Modality
from services.llm.calibration import calibrate
from services.llm.engine.block_manager import BlockGroup, BlockManager
from services.llm.engine.core import EngineCore
from services.llm.engine.drafter import Drafter
from services.llm.engine.kv_cache import KVCache, KVLayout
from services.llm.engine.ranks import LeadingRunner
from services.llm.engine.runner import Runner
from services.llm.engine.sampler import Sampler
from services.llm.engine.scheduler import Scheduler
from services.llm.grammars import GrammarCompiler, NoGrammars
from services.llm.memory import MIB, available_bytes, kv_bytes, weight_bytes
from services.llm.model.config import DecoderConfig
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.parallel import WHOLE, RankLost, Shard
from services.llm.model.weights import ELSEWHERE, load_decoder
from services.llm.ranks import Ranks
from services.llm.servicer import ModelFacts
from services.llm.settings import LlmSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """``prefill_rate``: prompt tokens per second, measured. ``ranks``: the model's other
    processes, to be stopped in the end."""

    core: EngineCore
    facts: ModelFacts
    grammars: GrammarCompiler | NoGrammars
    description: Description
    prefill_rate: float
    ranks: Ranks | None


@dataclass(frozen=True, slots=True)
class LoadedShare:
    """What a rank above 0 computes with."""

    runner: Runner
    compute: Compute
    hidden_size: int


def load(settings: LlmSettings, metrics: Metrics) -> LoadedDecoder:
    """Read the checkpoint, probe the attention backends, warm up. Raises StartupError.

    Whether weights and cache fit is decided before anything is allocated.
    """
    keep_freed_buffers()
    with contextlib.ExitStack() as undo:
        try:
            loaded = _load(settings, Startup(settings, metrics), undo)
        except RankLost as error:
            raise StartupError(str(error)) from error
        undo.pop_all()
    return loaded


def _load(settings: LlmSettings, startup: Startup, undo: contextlib.ExitStack) -> LoadedDecoder:
    compute = startup.compute
    size = settings.tensor_parallel
    ranks = None
    with startup.phase("weights"):
        index = CheckpointIndex.open(startup.directory)
        names = index.select(lambda name: not re.search("|".join(ELSEWHERE), name))
        cache_bytes = kv_bytes(
            compute.device,
            weight_bytes(names.values(), compute.dtype) // size,
            available_bytes(compute.device) // (size if compute.device_type == "cpu" else 1),
            settings.kv_memory_mib,
        )
        if size > 1:
            ranks = Ranks(size, asdict(settings), compute.device, cache_bytes)
            undo.callback(ranks.stop)
        decoder, mtp = _load_modules(settings, startup, index, ranks.shard if ranks else WHOLE)
        config = decoder.config
        weights = index.fingerprint(names, mode=settings.fingerprint_mode)
    startup.use_threads(config.hidden_size, size)
    startup.probe()
    if ranks is not None:
        ranks.wait_until_ready(compute.device_type)
    with startup.phase("calibrate"):
        pad_ids = _pad_ids(config)
        backends = [(bound.layer_kind, bound.backend.name) for bound in startup.selector.choices]
        core = build_core(
            settings,
            compute,
            decoder,
            mtp,
            cache_bytes,
            ranks,
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
    return LoadedDecoder(core, facts, grammars, description, prefill_rate, ranks)


def load_share(settings: LlmSettings, shard: Shard, cache_bytes: int) -> LoadedShare:
    """A rank's part of the model and its cache. Raises StartupError."""
    keep_freed_buffers()
    startup = Startup(settings, Metrics(LLM))
    index = CheckpointIndex.open(startup.directory)
    decoder, mtp = _load_modules(settings, startup, index, shard)
    config, compute = decoder.config, startup.compute
    startup.use_threads(config.hidden_size, shard.size)
    startup.probe()
    _, _, cache = _build_cache(settings, compute, config, mtp, cache_bytes)
    runner = Runner(decoder, mtp, cache, compute.device, shard)
    return LoadedShare(runner, compute, config.hidden_size)


def _load_modules(
    settings: LlmSettings, startup: Startup, index: CheckpointIndex, shard: Shard
) -> tuple[Decoder, Mtp | None]:
    """The decoder and, where drafts are wanted, its MTP blocks, as the device multiplies best."""
    decoder, mtp = load_decoder(
        index,
        dtype=startup.compute.dtype,
        device=startup.compute.device,
        selector=startup.selector,
        profile=settings.numeric_overrides,
        shard=shard,
    )
    if settings.max_draft_tokens == 0:
        mtp = None
    packing = packing_for(startup.compute.dtype, startup.compute.device)
    if packing is not None:
        for module in filter(None, (decoder, mtp)):
            pack_weights(module, packing)
    return decoder, mtp


def build_core(
    settings: LlmSettings,
    compute: Compute,
    decoder: Decoder,
    mtp: Mtp | None,
    cache_bytes: int,
    ranks: Ranks | None,
    masked_ids: set[int],
    identity: bytes = b"",
) -> EngineCore:
    """Put the parts of the engine together.

    ``identity`` names what decides keys and values besides tokens, for the prefix cache.
    """
    limits = _limits(settings, compute, decoder.config)
    layout, groups, cache = _build_cache(settings, compute, decoder.config, mtp, cache_bytes)
    if ranks is None:
        runner = Runner(decoder, mtp, cache, compute.device)
    else:
        runner = LeadingRunner(decoder, mtp, cache, compute.device, ranks.shard, ranks)
    sampler = Sampler(masked_ids)
    drafter = None
    if mtp is not None:
        drafter = Drafter(runner, sampler, max_draft_tokens=settings.max_draft_tokens)
    blocks = BlockManager(
        groups, settings.block_size, lookahead=layout.num_draft_tokens, identity=identity
    )
    return EngineCore(Scheduler(blocks, **limits), runner, sampler, drafter)


def _limits(settings: LlmSettings, compute: Compute, config: DecoderConfig) -> Mapping[str, int]:
    is_gpu = compute.device_type == "cuda"
    return {
        "max_running": settings.max_running or (256 if is_gpu else 32),
        "max_step_tokens": settings.max_step_tokens or (8192 if is_gpu else 512),
        "max_context": settings.max_context or config.max_position_embeddings,
    }


def _build_cache(
    settings: LlmSettings,
    compute: Compute,
    config: DecoderConfig,
    mtp: Mtp | None,
    cache_bytes: int,
) -> tuple[KVLayout, tuple[BlockGroup, ...], KVCache]:
    """Divide the cache's memory: the same blocks on every rank."""
    layout = KVLayout(
        layers=(*config.layers, *(config.mtp_layers if mtp is not None else ())),
        swa_visible=config.swa_visible,
        num_draft_tokens=0 if mtp is None else config.num_nextn_predict_layers,
        block_size=settings.block_size,
        dtype=compute.dtype,
    )
    groups = layout.groups(cache_bytes, **_limits(settings, compute, config))
    cache = KVCache(layout, groups, compute.device)
    logger.info(
        "KV cache",
        extra={"mib": cache.num_bytes // MIB, **{g.name: g.num_blocks for g in groups}},
    )
    return layout, groups, cache


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
    end_ids = _end_ids(index, vocab_size)
    try:
        return GrammarCompiler.open(path, vocab_size, end_ids)
    except ValueError as error:
        raise CheckpointError(f"{path} is no tokenizer that grammars work with: {error}") from error


def _end_ids(index: CheckpointIndex, vocab_size: int) -> list[int]:
    """What ends a text: generation_config.json knows better than config.json."""
    path = index.directory / "generation_config.json"
    ids = None
    if path.is_file():
        try:
            ids = json.loads(path.read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a JSON object: {error}") from error
    if ids is None:
        path, ids = index.directory / "config.json", index.config.get("eos_token_id")
    if isinstance(ids, int):
        ids = [ids]
    if not (ids and isinstance(ids, list) and all(_is_id(each, vocab_size) for each in ids)):
        raise CheckpointError(f"{path}: eos_token_id must be ids of the vocabulary, found {ids!r}")
    return ids


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and 0 <= value < vocab_size


def _unknown_ids(index: CheckpointIndex, vocab_size: int) -> set[int]:
    """Rows of the head that the tokenizer has no token for. They must never be sampled."""
    path = index.directory / "tokenizer.json"
    if not path.is_file():
        logger.warning("no tokenizer.json: every id of the vocabulary may be sampled")
        return set()
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
    known = tokenizer.get_vocab(with_added_tokens=True).values()
    return set(range(vocab_size)) - set(known)
