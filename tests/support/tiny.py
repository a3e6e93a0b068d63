"""Seeded random checkpoints of a few kilobytes, in any of the layouts checkpoints come in."""

from pathlib import Path
from typing import Any, Literal

import torch

from models import config, files, generate, tokenizer, weights

Qkv = Literal["split", "interleaved", "plain"]


def decoder_config(*, qkv: Qkv = "split", **overrides: Any) -> dict[str, Any]:
    """A decoder of four layers with both kinds of attention, experts and two MTP blocks.

    Two chunks of fused rows; sliding layers have twice as many kv heads as chunks.
    """
    profile = {"swa_visible": 4} | ({} if qkv == "split" else {"qkv_rows": qkv})
    return {
        **config.decoder_config(),
        "vocab_size": 32,
        "hidden_size": 16,
        "max_position_embeddings": 256,
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 0, 1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "v_head_dim": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 6,
        "swa_v_head_dim": 4,
        "sliding_window": 4,
        "sliding_window_size": 4,
        "attention_projection_layout": "split" if qkv == "split" else "fused_qkv",
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "num_nextn_predict_layers": 2,
        "numeric_profile": profile,
        **overrides,
    }


def write_decoder(
    directory: Path,
    *,
    qkv: Qkv = "split",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """A text-only checkpoint without a tokenizer. The seed fixes the values, ``qkv`` their layout.

    ``overrides`` replace keys of config.json. Returns ``directory``.
    """
    model = decoder_config(qkv=qkv, **overrides)
    draw = weights.Draw(seed)
    tensors = weights.decoder_tensors(model, draw) | weights.mtp_tensors(model, draw)
    stored = files.fuse_qkv(files.round_tensors(tensors, dtype), model)
    files.write_tensors(directory, stored, index=False)
    files.write_json(directory / "config.json", model)
    return directory


def write_omni(
    directory: Path,
    *,
    qkv: Qkv = "interleaved",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """A whole checkpoint with towers, audio tokenizer and the tokenizer of mimo-tiny.

    Its processor budgets are those of mimo-tiny. ``overrides`` replace keys of config.json. Returns
    ``directory``.
    """
    vocabulary = tokenizer.build()
    base = config.model_config(tokenizer.control_ids(vocabulary))
    decoder = decoder_config(qkv=qkv, vocab_size=vocabulary.get_vocab_size())
    hidden = decoder["hidden_size"]
    model = {
        **base,
        **decoder,
        "vision_config": base["vision_config"] | _VISION | {"out_hidden_size": hidden},
        "audio_config": base["audio_config"] | _AUDIO | {"out_hidden_size": hidden},
        "numeric_profile": base["numeric_profile"] | decoder["numeric_profile"],
        **overrides,
    }
    codes = config.audio_tokenizer_config() | _AUDIO_TOKENIZER
    generate.write(directory, model, codes, vocabulary, seed=seed, dtype=dtype)
    return directory


_VISION = {
    "depth": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "qk_channels": 4,
    "kv_channels": 4,
    "vit_window_attn_types": [-1, 0, 1, -1],
    "fullatt_block_indexes": [0, 3],
    "visual_token_window_size": 4,
}

_AUDIO = {
    "speech_vocab_size": "20",
    "speech_zeroemb_idx": "16",
    "input_local_layers": 1,
    "input_local_dim": 16,
    "input_local_head_dim": 4,
    "input_local_intermediate_size": 16,
    "projection_hidden_dim": 32,
}

_AUDIO_TOKENIZER = {
    "d_model": 16,
    "encoder_layers": 3,
    "encoder_ffn_dim": 16,
    "encoder_attn_window_size": [4, 0],
    "codebook_size": [16],
}
