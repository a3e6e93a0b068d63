"""Reading vision_config: defaults, numeric switches and contradictions."""

from typing import Any

import pytest

from mimo.errors import CheckpointError
from services.vision.config import (
    CLIP_MEAN,
    IMAGENET_STD,
    MergerNorm,
    PixelStats,
    SinkMode,
    VisionTowerConfig,
)
from tests.support import golden_vision

TYPES = [-1, *[0] * 4, *[1] * 4] * 3 + [-1]

# vision_config of MiMo-V2.5 as published.
PUBLISHED: dict[str, Any] = {
    "depth": 28,
    "hidden_size": 1280,
    "intermediate_size": 4608,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "in_chans": 3,
    "patch_size": 16,
    "spatial_patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 4096,
    "hidden_act": "silu",
    "use_sink": True,
    "visual_token_window_size": 64,
    "vit_window_attn_types": TYPES,
    "fullatt_block_indexes": [0, 9, 18, 27],
    "window_size": 128,
    "num_query_groups": 4,
    "tokens_per_second": 2,
}


def read(**changes: Any) -> VisionTowerConfig:
    return VisionTowerConfig.from_checkpoint(golden_vision.config(**changes))


def test_published_configuration() -> None:
    config = VisionTowerConfig.from_checkpoint({"vision_config": PUBLISHED, "hidden_size": 4096})
    assert config.head_dim == 64, "from qk_channels' default, not 1280 / 32"
    assert config.patch_dim == 1536
    assert [i for i in range(28) if not config.has_sink(i)] == [0, 9, 18, 27]
    assert [i for i in range(28) if config.is_column_order(i)] == [
        *range(5, 9),
        *range(14, 18),
        *range(23, 27),
    ]


def test_defaults_of_the_numeric_switches() -> None:
    config = read()
    assert config.vision_sinks is SinkMode.KEY0
    assert config.vision_merger_norm is MergerNorm.LAYER
    assert config.vision_pixel_stats is PixelStats.CLIP
    assert config.pixel_mean == CLIP_MEAN


def test_flags_beat_the_checkpoints_profile() -> None:
    checkpoint = golden_vision.config() | {
        "numeric_profile": {"vision_sinks": "column", "vision_merger_norm": "rms"}
    }
    config = VisionTowerConfig.from_checkpoint(
        checkpoint, overrides={"vision_sinks": "key0", "vision_pixel_stats": "imagenet"}
    )
    assert config.numeric_profile == {
        "vision_sinks": "key0",
        "vision_merger_norm": "rms",
        "vision_pixel_stats": "imagenet",
        "vision_resize": "bilinear",
    }
    assert config.pixel_std == IMAGENET_STD


def test_pixel_statistics_come_from_the_preprocessor_file_if_there_is_one() -> None:
    preprocessor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 1.0, 1.0]}
    config = VisionTowerConfig.from_checkpoint(golden_vision.config(), preprocessor=preprocessor)
    assert config.vision_pixel_stats is PixelStats.PREPROCESSOR
    assert config.pixel_mean == (0.1, 0.2, 0.3)


def test_both_spellings_of_the_channel_count_are_read() -> None:
    assert read(in_chans=None, in_channels=3).in_channels == 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"depth": 5}, "vit_window_attn_types"),
        ({"fullatt_block_indexes": [0]}, "fullatt_block_indexes"),
        ({"vit_window_attn_types": [-1, 0, 2, 1, 0, -1]}, "vit_window_attn_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"qk_channels": 6, "kv_channels": 6}, "qk_channels"),
        ({"kv_channels": None}, "kv_channels"),
        ({"kv_channels": 16}, "kv_channels"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"spatial_patch_size": 16}, "spatial_patch_size"),
        ({"out_hidden_size": 32}, "out_hidden_size"),
        ({"in_chans": 1}, "in_channels"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": "4"}, "patch_size"),
    ],
)
def test_contradiction_names_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(**changes)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"processor_config": {"patch_size": 16}}, "processor_config.patch_size"),
        ({"processor_config": {"merge_size": 1}}, "processor_config.merge_size"),
        ({"numeric_profile": {"vision_sinks": "row"}}, "vision_sinks"),
        ({"numeric_profile": {"vision_resize": "bicubic"}}, "vision_resize"),
        ({"numeric_profile": {"vision_pixel_stats": "preprocessor"}}, "preprocessor_config.json"),
    ],
)
def test_contradiction_outside_vision_config(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        VisionTowerConfig.from_checkpoint(golden_vision.config() | extra)


def test_text_model_has_no_tower() -> None:
    with pytest.raises(CheckpointError, match="no pictures"):
        VisionTowerConfig.from_checkpoint({"hidden_size": 24})
