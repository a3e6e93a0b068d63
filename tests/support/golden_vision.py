"""A vision tower small enough to write down, whose weights and inputs are a formula.

Every number is sin(12.9898 k + 78.233 i): k numbers the tensors, i the elements. The expected
outputs in the tests were computed by independent implementations in float64.
"""

import math
from typing import Any

import torch
from torch import Tensor

CONFIG: dict[str, Any] = {
    "hidden_size": 24,
    "vision_config": {
        "depth": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "qk_channels": 8,
        "kv_channels": 8,
        "in_chans": 3,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 24,
        "hidden_act": "silu",
        "use_sink": True,
        "visual_token_window_size": 5,
        "vit_window_attn_types": [-1, 0, 1, 1, 0, -1],
        "fullatt_block_indexes": [0, 5],
    },
}

GRIDS = [(1, 4, 6), (2, 8, 4)]


def config(**vision: Any) -> dict[str, Any]:
    """The configuration as a checkpoint states it, with fields of ``vision_config`` replaced."""
    return {**CONFIG, "vision_config": {**CONFIG["vision_config"], **vision}}


def formula(k: int, count: int) -> Tensor:
    index = torch.arange(count, dtype=torch.float64)
    return torch.sin(12.9898 * k + 78.233 * index)


def pixels() -> Tensor:
    """Patches of both items: [88, 96] float64."""
    return formula(777, 88 * 96).view(88, 96)


def weights() -> dict[str, Tensor]:
    """The tower's 80 tensors in float64, under published names without the prefix."""
    return {
        name: _value(name, k, shape) for k, (name, shape) in enumerate(_shapes().items(), start=1)
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (32, 3, 2, 4, 4)}
    for i in range(6):
        block = {
            "norm1.weight": (32,),
            "attn.qkv.weight": (64, 32),
            "attn.qkv.bias": (64,),
            "attn.proj.weight": (32, 32),
            "attn.proj.bias": (32,),
            "attn.sinks": (4,),
            "norm2.weight": (32,),
            "mlp.gate_proj.weight": (48, 32),
            "mlp.gate_proj.bias": (48,),
            "mlp.up_proj.weight": (48, 32),
            "mlp.up_proj.bias": (48,),
            "mlp.down_proj.weight": (32, 48),
            "mlp.down_proj.bias": (32,),
        }
        if i in (0, 5):
            del block["attn.sinks"]
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return shapes | {
        "merger.ln_q.weight": (32,),
        "merger.mlp.0.weight": (128, 128),
        "merger.mlp.2.weight": (24, 128),
    }


def _value(name: str, k: int, shape: tuple[int, ...]) -> Tensor:
    u = formula(k, math.prod(shape)).view(shape)
    if name.endswith("sinks"):
        return 2 * u
    if name.endswith("bias"):
        return 0.1 * u
    if len(shape) == 1:
        return 1 + 0.25 * u
    return u * 1.5 / math.sqrt(math.prod(shape[1:]))
