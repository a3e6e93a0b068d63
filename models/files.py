"""The files of a checkpoint in the published layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

# What published checkpoints keep in float32 whatever the model's dtype is.
_FLOAT32 = (".mlp.gate.weight", ".e_score_correction_bias", "._codebook.embed")


def round_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor in the dtype it is stored in."""
    return {
        name: tensor.to(stored_dtype(name, dtype)).contiguous() for name, tensor in tensors.items()
    }


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of one tensor of a model of ``dtype``."""
    return torch.float32 if name.endswith(_FLOAT32) else dtype


def fuse_qkv(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Replace the decoder's q, k and v projections by one ``qkv_proj`` per layer, if ``config``
    says that they are stored so.

    Interleaved rows come in ``num_key_value_heads`` chunks ``[Q_c|K_c|V_c]``, each with an equal
    share of the layer's heads; plain rows are ``[Q|K|V]``.
    """
    if config.get("attention_projection_layout") != "fused_qkv":
        return dict(tensors)
    rows = config["numeric_profile"]["qkv_rows"]
    chunks = 1 if rows == "plain" else config["num_key_value_heads"]
    fused: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not (name.startswith("model.") and ".self_attn." in name):
            fused[name] = tensor
        elif ".q_proj." in name:
            parts = (tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv")
            pieces = zip(*(part.chunk(chunks) for part in parts), strict=True)
            rows_in_order = [piece for chunk in pieces for piece in chunk]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(rows_in_order)
        elif ".k_proj." not in name and ".v_proj." not in name:
            fused[name] = tensor
    return fused


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], *, index: bool) -> None:
    """model.safetensors, and on demand the map of shards that large checkpoints have."""
    directory.mkdir(parents=True, exist_ok=True)
    content = save(dict(tensors), metadata={"format": "pt"})
    (directory / "model.safetensors").write_bytes(content)  # the library's own files are private
    if index:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = dict.fromkeys(sorted(tensors), "model.safetensors")
        write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
