"""From a published checkpoint to the decoder's modules, and back."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint.index import CheckpointIndex
from mimo.checkpoint.loader import load
from mimo.checkpoint.rules import Cast, QkvRows, Rule, SplitFusedQkv, qkv_rows
from mimo.errors import CheckpointError
from mimo.nn.attention import AttentionSelector
from mimo.nn.meta import without_weights
from services.llm.model.config import DecoderConfig, LayerSpec
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp

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
) -> tuple[Decoder, Mtp | None]:
    """Build and fill the decoder and, where the checkpoint has any, its MTP blocks.

    ``profile`` overrides entries of the checkpoint's numeric_profile: swa_visible, qkv_rows. Raises
    CheckpointError naming the field or tensor that is missing, unexpected or unsupported.
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
        decoder = Decoder(config, selector, dtype=dtype, device=device)
        mtp = Mtp(config, selector, dtype=dtype, device=device) if num_blocks else None
    load(
        decoder,
        index,
        (wide, *_qkv_rules(config, config.layers, "model.layers", rows)),
        dtype=dtype,
        device=device,
        ignore=(*ELSEWHERE, f"^{re.escape(MTP_PREFIX)}"),
    )
    if mtp is not None:
        load(
            mtp,
            index,
            (wide, *_qkv_rules(config, config.mtp_layers, "layers", rows)),
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
    """One rule for the full layers and one for the sliding ones; none where nothing is fused."""
    if rows is None:
        return []
    kinds: dict[LayerSpec, list[str]] = {}
    for number, spec in enumerate(layers):
        kinds.setdefault(replace(spec, index=0, is_moe=False), []).append(str(number))
    return [
        SplitFusedQkv(
            pattern=rf"^{path}\.({'|'.join(numbers)})\.self_attn\.qkv_proj\.",
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            chunks=config.num_key_value_heads,
            rows=rows,
        )
        for spec, numbers in kinds.items()
    ]
