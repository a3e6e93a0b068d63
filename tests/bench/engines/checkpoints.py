"""The models that engines are compared on, in the form that each engine reads.

From one decoder: our own directory; `float32`, split, without drafting blocks and with a
configuration that every engine understands, for the GGUF converter; `transformers`, in bfloat16;
`square`, the same with values zero-padded to the width of keys, which changes no result (vLLM's CPU
attention has no other kind). vLLM and llama.cpp count the query's own key into a window, as
`swa_visible` does, and transformers does not: each is told the number that makes it the same model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint.index import CheckpointIndex
from mimo.nn.attention import AttentionSelector
from models import config, files, weights
from services.llm.model.weights import load_decoder, published_tensors

LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Forms:
    """One model: our directory, the folder in which its other forms lie, and in which ``dtype``
    engines compute."""

    ours: Path
    folder: Path
    dtype: str

    @property
    def transformers(self) -> Path:
        return self.folder / "transformers"

    @property
    def square(self) -> Path:
        return self.folder / "square"

    @property
    def float32(self) -> Path:
        return self.folder / "float32"

    @property
    def gguf(self) -> Path:
        return self.folder / f"{self.dtype}.gguf"

    @property
    def vocab_size(self) -> int:
        return int(json.loads((self.ours / "config.json").read_text())["vocab_size"])


def write_bench_model(directory: Path) -> None:
    """62 million parameters, bfloat16, random, and three drafting blocks that guess nothing."""
    model = {
        **config.decoder_config(),
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "moe_intermediate_size": 256,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "head_dim": 96,
        "v_head_dim": 64,
        "swa_head_dim": 96,
        "swa_v_head_dim": 64,
        "attention_value_scale": 0.707,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_projection_layout": "split",
        "numeric_profile": {"swa_visible": 128},
    }
    draw = weights.Draw(0)
    tensors = weights.decoder_tensors(model, draw) | weights.mtp_tensors(model, draw)
    files.write_tensors(directory, files.round_tensors(tensors, torch.bfloat16), index=False)
    files.write_json(directory / "config.json", model)


def write_forms(forms: Forms) -> None:
    """Everything but the GGUF file, for whose writing there is an environment of its own."""
    index = CheckpointIndex.open(forms.ours)
    decoder, _ = load_decoder(
        index, dtype=torch.float32, device="cpu", selector=AttentionSelector("llm")
    )
    tensors = {name: tensor.float() for name, tensor in published_tensors(decoder, None).items()}
    published = peer_config(index.config, decoder.config.swa_visible)
    others_seen = {"sliding_window_size": decoder.config.swa_visible - 1}
    square, square_config = pad_values(tensors, published)
    for directory, form, form_config, dtype in (
        (forms.float32, tensors, published, torch.float32),
        (forms.transformers, tensors, {**published, **others_seen}, torch.bfloat16),
        (forms.square, square, square_config, torch.bfloat16),
    ):
        files.write_tensors(directory, files.round_tensors(form, dtype), index=False)
        files.write_json(directory / "config.json", form_config)


def peer_config(ours: Mapping[str, Any], window: int) -> dict[str, Any]:
    """The published fields, and those by which transformers calls the same things. ``window``: keys
    that a sliding layer sees, the query's own included."""
    names = [*config.decoder_config(), "eos_token_id", "pad_token_id"]
    same = {name: ours[name] for name in names if ours.get(name) is not None}
    pattern = ours["hybrid_layer_pattern"]
    return {
        **same,
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "dtype": "bfloat16",
        "attention_projection_layout": "split",
        "num_nextn_predict_layers": 0,
        "sliding_window": window,
        "sliding_window_size": window,
        "attention_chunk_size": window,
        "rms_norm_eps": ours["layernorm_epsilon"],
        "layer_types": [LAYER_KINDS[kind] for kind in pattern],
        "mlp_layer_types": ["sparse" if moe else "dense" for moe in ours["moe_layer_freq"]],
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": ours[theta],
                "partial_rotary_factor": ours["partial_rotary_factor"],
            }
            for kind, theta in zip(LAYER_KINDS, ("rope_theta", "swa_rope_theta"), strict=True)
        },
    }


def pad_values(
    tensors: Mapping[str, Tensor], model: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Values as wide as keys: zeros that come out of ``v_proj`` and that ``o_proj`` ignores."""
    narrow, wide = model["v_head_dim"], model["head_dim"]
    padded = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            heads = tensor.unflatten(0, (-1, narrow))  # [H, v, D]
            padded[name] = torch.nn.functional.pad(heads, (0, 0, 0, wide - narrow)).flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            heads = tensor.unflatten(1, (-1, narrow))  # [D, H, v]
            padded[name] = torch.nn.functional.pad(heads, (0, wide - narrow)).flatten(1, 2)
    return padded, {**model, "v_head_dim": wide, "swa_v_head_dim": wide}
