"""From a published checkpoint to the decoder's modules, and back."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mimo.checkpoint.index import CheckpointIndex
from mimo.checkpoint.loader import load
from mimo.checkpoint.rules import Cast, Narrow, QkvRows, Rule, SplitFusedQkv, qkv_rows
from mimo.errors import CheckpointError
from mimo.nn.attention import AttentionSelector
from mimo.nn.meta import without_weights
from services.llm.model.config import DecoderConfig, LayerSpec
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.parallel import (
    WHOLE,
    Shard,
    head_range,
    kv_head_range,
    share_of,
    vocabulary_rows,
)

logger = logging.getLogger(__name__)

MTP_PREFIX = "model.mtp."

# Tensors of the other services, and tables that old exports stored and everybody computes.
ELSEWHERE = (
    r"^(model\.)?visual\.",
    r"^vision_model\.",
    r"^audio_",
    r"speech_embeddings",
    r"rotary_emb\.inv_freq|cos_cached|sin_cached",
)

# Kept in float32 whatever the model's dtype is: gates decide, sinks are logits, and both are small.
WIDE = r"\.mlp\.gate\.(weight|e_score_correction_bias)$|\.attention_sink_bias$"


def load_decoder(
    index: CheckpointIndex,
    *,
    dtype: torch.dtype,
    device: str,
    selector: AttentionSelector,
    profile: Mapping[str, Any] | None = None,
    shard: Shard = WHOLE,
) -> tuple[Decoder, Mtp | None]:
    """Build and fill the decoder and, where the checkpoint has any, its MTP blocks.

    ``profile`` overrides entries of the checkpoint's numeric_profile: swa_visible, qkv_rows. Of a
    ``shard`` only the rank's part is kept. Raises CheckpointError naming the field or tensor that
    is missing, unexpected or unsupported, ConfigError for a number of ranks that does not fit.
    """
    config = DecoderConfig.from_checkpoint(index.config, profile)
    _refuse_mxfp4(index)
    num_blocks = _count_mtp_blocks(index)
    if num_blocks != config.num_nextn_predict_layers:
        logger.info("MTP blocks in the checkpoint: %d", num_blocks)
        config = replace(config, num_nextn_predict_layers=num_blocks)
    rows = qkv_rows(index.config, (profile or {}).get("qkv_rows"))
    wide = Cast(WIDE, str(torch.promote_types(torch.float32, dtype)).removeprefix("torch."))

    with without_weights():
        share = share_of(config, shard.size)
        decoder = Decoder(share, selector, dtype=dtype, device=device, shard=shard)
        mtp = Mtp(share, selector, dtype=dtype, device=device, shard=shard) if num_blocks else None
    load(
        decoder,
        index,
        (
            wide,
            *_qkv_rules(config, config.layers, "model.layers", rows),
            *_share_rules(config, config.layers, "model.layers", shard),
        ),
        dtype=dtype,
        device=device,
        ignore=(*ELSEWHERE, f"^{re.escape(MTP_PREFIX)}"),
    )
    if mtp is not None:
        load(
            mtp,
            index,
            (
                wide,
                *_qkv_rules(config, config.mtp_layers, "layers", rows),
                *_share_rules(config, config.mtp_layers, "layers", shard),
            ),
            prefix=MTP_PREFIX,
            dtype=dtype,
            device=device,
            ignore=ELSEWHERE,
        )
    return decoder, mtp


def published_tensors(decoder: Decoder, mtp: Mtp | None) -> dict[str, Tensor]:
    """Every tensor under its published name, projections split and experts apart, as views."""
    tensors = dict(decoder.state_dict())
    if mtp is not None:
        tensors |= {MTP_PREFIX + name: tensor for name, tensor in mtp.state_dict().items()}
    return tensors


def _count_mtp_blocks(index: CheckpointIndex) -> int:
    """By the tensors: published configurations do not tell."""
    found = (re.match(rf"{re.escape(MTP_PREFIX)}layers\.(\d+)\.", name) for name in index.tensors)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _refuse_mxfp4(index: CheckpointIndex) -> None:
    for name, info in index.tensors.items():
        if ".mlp.experts." in name and info.dtype == "U8":
            raise CheckpointError(
                f"tensor {name} is stored as MXFP4, which this decoder does not compute; "
                "use a BF16 checkpoint of the model"
            )


def _qkv_rules(
    config: DecoderConfig, layers: Sequence[LayerSpec], path: str, rows: QkvRows | None
) -> list[Rule]:
    """A rule for each geometry of layers; none where nothing is fused."""
    if rows is None:
        return []
    return [
        SplitFusedQkv(
            pattern=rf"^{path}\.({numbers})\.self_attn\.qkv_proj\.",
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            chunks=config.num_key_value_heads,
            rows=rows,
        )
        for spec, numbers in _by_geometry(layers).items()
    ]


def _share_rules(
    config: DecoderConfig, layers: Sequence[LayerSpec], path: str, shard: Shard
) -> list[Rule]:
    """The rank's part of every tensor that is not on all ranks; none for a whole model."""
    if shard.size == 1:
        return []
    vocabulary = vocabulary_rows(config.vocab_size, shard.rank, shard.size)
    rules = [_keep(r"^(model\.embed_tokens|lm_head)\.", vocabulary, config.vocab_size)]
    for mlp, width in (
        (rf"^{path}\.\d+\.mlp\.", config.intermediate_size),
        (rf"^{path}\.\d+\.mlp\.experts\.\d+\.", config.moe_intermediate_size),
    ):
        own = width // shard.size
        part = range(shard.rank * own, (shard.rank + 1) * own)
        rules += [
            _keep(rf"{mlp}(gate|up)_proj\.", part, width),
            _keep(rf"{mlp}down_proj\.", part, width, dim=1),
        ]
    for spec, numbers in _by_geometry(layers).items():
        attention = rf"^{path}\.({numbers})\.self_attn\."
        heads, kv_heads = head_range(spec, shard), kv_head_range(spec, shard)
        num, num_kv = spec.num_heads, spec.num_kv_heads
        width, v_width = spec.head_dim, spec.v_head_dim
        rules += [
            _keep(rf"{attention}q_proj\.", _wide(heads, width), num * width),
            _keep(rf"{attention}k_proj\.", _wide(kv_heads, width), num_kv * width),
            _keep(rf"{attention}v_proj\.", _wide(kv_heads, v_width), num_kv * v_width),
            _keep(rf"{attention}o_proj\.", _wide(heads, v_width), num * v_width, dim=1),
            _keep(rf"{attention}attention_sink_bias$", heads, num),
        ]
    return rules


def _keep(pattern: str, part: range, size: int, dim: Literal[0, 1] = 0) -> Rule:
    return Narrow(pattern, dim, part.start, part.stop, size)


def _wide(heads: range, width: int) -> range:
    """The elements of these heads."""
    return range(heads.start * width, heads.stop * width)


def _by_geometry(layers: Sequence[LayerSpec]) -> dict[LayerSpec, str]:
    """Layers of equal shapes: one of them, and a pattern of the numbers of all."""
    kinds: dict[LayerSpec, list[str]] = {}
    for number, spec in enumerate(layers):
        kinds.setdefault(replace(spec, index=0, is_moe=False), []).append(str(number))
    return {spec: "|".join(numbers) for spec, numbers in kinds.items()}
