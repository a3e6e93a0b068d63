"""Loading the tower from safetensors files: every published name, and no other."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.index import CheckpointIndex
from mimo.errors import CheckpointError
from mimo.nn.attention import AttentionSelector
from services.vision.config import CLIP_MEAN, PixelStats, VisionTowerConfig
from services.vision.model import VisionTower
from services.vision.weights import PREFIXES, load_vision_tower, read_tower_config
from tests.support import golden_vision

CONFIG = VisionTowerConfig.from_checkpoint(golden_vision.config())


def checkpoint(directory: Path, tensors: dict[str, Tensor]) -> CheckpointIndex:
    (directory / "config.json").write_text(json.dumps(golden_vision.config()))
    save_file(tensors, directory / "model.safetensors")
    return CheckpointIndex.open(directory)


def tensors(prefix: str = "visual.") -> dict[str, Tensor]:
    return {prefix + name: value.float() for name, value in golden_vision.weights().items()}


def load(index: CheckpointIndex, dtype: torch.dtype = torch.float32) -> VisionTower:
    selector = AttentionSelector("vision")
    return load_vision_tower(index, CONFIG, dtype=dtype, device="cpu", selector=selector)


def published_names() -> set[str]:
    """The 364 tensors of MiMo-V2.5's tower."""
    layers = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    block = ["norm1.weight", "norm2.weight"]
    block += [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    names = {f"blocks.{i}.{name}" for i in range(28) for name in block}
    names |= {f"blocks.{i}.attn.sinks" for i in range(28) if i % 9}
    names |= {"patch_embed.proj.weight"}
    return names | {f"merger.{layer}.weight" for layer in ("ln_q", "mlp.0", "mlp.2")}


def test_published_tower_has_364_tensors_and_728_594_432_values() -> None:
    published = golden_vision.config(
        depth=28,
        hidden_size=1280,
        intermediate_size=4608,
        num_heads=32,
        num_key_value_heads=8,
        qk_channels=None,
        kv_channels=None,
        patch_size=16,
        out_hidden_size=4096,
        visual_token_window_size=64,
        vit_window_attn_types=[-1, *[0] * 4, *[1] * 4] * 3 + [-1],
        fullatt_block_indexes=[0, 9, 18, 27],
    ) | {"hidden_size": 4096}
    with torch.device("meta"):
        tower = VisionTower(
            VisionTowerConfig.from_checkpoint(published), AttentionSelector("vision")
        )
    state = tower.state_dict()
    assert set(state) == published_names()
    assert len(state) == 364
    assert sum(value.numel() for value in state.values()) == 728_594_432
    assert state["blocks.1.attn.qkv.weight"].shape == (3072, 1280)
    assert state["blocks.1.attn.proj.weight"].shape == (1280, 2048)
    assert state["blocks.1.attn.sinks"].shape == (32,)
    assert state["patch_embed.proj.weight"].shape == (1280, 3, 2, 16, 16)
    assert state["merger.mlp.2.weight"].shape == (4096, 5120)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_tensor_arrives(tmp_path: Path, prefix: str) -> None:
    others = {"lm_head.weight": torch.zeros(2, 2), "model.embed_tokens.weight": torch.zeros(2, 2)}
    tower = load(checkpoint(tmp_path, tensors(prefix) | others))
    state = tower.state_dict()
    assert len(state) == 80
    for name, value in golden_vision.weights().items():
        assert state[name].equal(value.float()), name
    assert not any(parameter.requires_grad for parameter in tower.parameters())


def test_loaded_tower_gives_the_golden_output(tmp_path: Path) -> None:
    tower = load(checkpoint(tmp_path, tensors()))
    out = tower(golden_vision.pixels().float(), golden_vision.GRIDS)
    assert out[0, :2].tolist() == pytest.approx([0.11074606, -0.10874157], abs=1e-5)
    assert out.norm().item() == pytest.approx(5.28306054, abs=1e-5)


def test_pixel_statistics_are_read_beside_the_weights(tmp_path: Path) -> None:
    index = checkpoint(tmp_path, tensors())
    assert read_tower_config(index).vision_pixel_stats is PixelStats.CLIP
    published = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(published))
    assert read_tower_config(index).pixel_std == (0.25, 0.25, 0.25)
    assert read_tower_config(index, {"vision_pixel_stats": "clip"}).pixel_mean == CLIP_MEAN
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_tower_config(index)


def test_weights_are_cast_to_the_compute_dtype(tmp_path: Path) -> None:
    tower = load(checkpoint(tmp_path, tensors()), torch.bfloat16)
    assert {value.dtype for value in tower.state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["blocks.2.attn.sinks", "blocks.5.norm2.weight"])
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    incomplete = tensors()
    del incomplete["visual." + name]
    with pytest.raises(CheckpointError, match=name):
        load(checkpoint(tmp_path, incomplete))


@pytest.mark.parametrize("name", ["blocks.0.attn.sinks", "patch_embed.proj.bias", "norm.weight"])
def test_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        load(checkpoint(tmp_path, tensors() | {"visual." + name: torch.zeros(4)}))


def test_misshaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    wrong = tensors() | {"visual.blocks.1.attn.proj.weight": torch.zeros(32, 16)}
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.proj\.weight.*32.*16"):
        load(checkpoint(tmp_path, wrong))


def test_merger_biases_are_used_when_the_checkpoint_has_them(tmp_path: Path) -> None:
    without = load(checkpoint(tmp_path, tensors()))
    biased = tmp_path / "biased"
    biased.mkdir()
    biases = {"visual.merger.mlp.2.bias": torch.arange(24, dtype=torch.float32)}
    tower = load(checkpoint(biased, tensors() | biases))
    x = golden_vision.pixels().float()
    moved = tower(x, golden_vision.GRIDS) - without(x, golden_vision.GRIDS)
    torch.testing.assert_close(moved, torch.arange(24.0).expand(22, 24), rtol=0, atol=1e-5)


@pytest.mark.parametrize("found", [(), ("visual.", "model.visual.")])
def test_there_is_exactly_one_tower(tmp_path: Path, found: tuple[str, ...]) -> None:
    present = {"lm_head.weight": torch.zeros(2, 2)}
    for prefix in found:
        present |= tensors(prefix)
    with pytest.raises(CheckpointError, match="one vision tower"):
        load(checkpoint(tmp_path, present))
