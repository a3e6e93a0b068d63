"""The parts of the tower and preprocessor that Qwen2-VL's public implementation shares.

Its tower has no bands, no sinks and no grouped heads, so it is compared with ours in that corner:
every block full, as many key-value heads as heads, an RMS norm and biases in the merger.
"""

from typing import Any

import numpy as np
import pytest
import torch

from mimo.nn.attention import AttentionSelector
from services.vision.config import VisionTowerConfig
from services.vision.model import VisionTower
from services.vision.plan import VisionPlan
from services.vision.preprocess import Preprocessor
from tests.support import golden_vision

pytestmark = pytest.mark.check

transformers = pytest.importorskip("transformers", reason="the oracle is not installed")

DEPTH = 3
GRIDS = [(1, 4, 6), (2, 2, 2), (2, 4, 4), (1, 2, 32)]


def qwen(dtype: torch.dtype) -> Any:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    config = Qwen2_5_VLVisionConfig(
        depth=DEPTH,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        in_channels=3,
        patch_size=4,
        temporal_patch_size=2,
        spatial_merge_size=2,
        out_hidden_size=24,
        hidden_act="silu",
        fullatt_block_indexes=list(range(DEPTH)),
    )
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = Qwen2_5_VisionTransformerPretrainedModel(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms start at one and biases at zero: make both visible
                parameter.add_(torch.randn_like(parameter) * 0.2)
            assert parameter.isfinite().all(), name
    return model


def ours(oracle: Any, dtype: torch.dtype) -> VisionTower:
    config = VisionTowerConfig.from_checkpoint(
        golden_vision.config(
            depth=DEPTH,
            num_key_value_heads=4,
            use_sink=False,
            vit_window_attn_types=[-1] * DEPTH,
            fullatt_block_indexes=list(range(DEPTH)),
        ),
        overrides={"vision_merger_norm": "rms"},
    )
    tower = VisionTower(
        config,
        AttentionSelector("vision"),
        dtype=dtype,
        merger_biases=("mlp.0", "mlp.2"),
    )
    tower.load_state_dict(oracle.state_dict())
    return tower


# The oracle's rotary frequencies are float32 even in a float64 model.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@torch.inference_mode()
def test_tower_without_bands_and_sinks(dtype: torch.dtype, tolerance: float) -> None:
    oracle = qwen(dtype)
    count = sum(t * h * w for t, h, w in GRIDS)
    patches = golden_vision.formula(9, count * 96).view(count, 96).to(dtype)
    theirs = oracle(patches, grid_thw=torch.tensor(GRIDS)).pooler_output
    assert (ours(oracle, dtype)(patches, GRIDS) - theirs).abs().max().item() < tolerance


@pytest.mark.parametrize(("height", "width"), [(96, 128), (64, 192), (224, 224)])
def test_patches_of_images_that_need_no_resize(height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    image = np.random.default_rng(6).integers(0, 256, (height, width, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 8192, "longest_edge": 8388608},
    )
    theirs = processor(images=[image], return_tensors="pt")
    grid_t, grid_h, grid_w = theirs["image_grid_thw"][0].tolist()
    config = VisionTowerConfig.from_checkpoint(golden_vision.config(patch_size=16))
    plan = VisionPlan(1, height, width, height, width, (grid_t, grid_h, grid_w))
    plan.check(config, max_patches=1 << 20)
    patches = Preprocessor(config, "cpu")(torch.from_numpy(image).unsqueeze(0), plan)
    assert (patches - theirs["pixel_values"]).abs().max().item() < 1e-6
