"""A first encode at start: how many patches per second."""

import torch

from mimo.leaf.calibration import fastest_s
from mimo.nn.interop import from_torch
from services.vision.config import VisionTowerConfig
from services.vision.encoder import VisionEncoder
from services.vision.plan import VisionPlan

SIDE_UNITS = 4  # 16 tokens: small enough for the published tower on a laptop


def calibrate(encoder: VisionEncoder, config: VisionTowerConfig) -> float:
    """Patches of a small image encoded per second."""
    side = SIDE_UNITS * config.spatial_merge_size  # patches
    pixels = side * config.patch_size
    plan = VisionPlan(1, pixels, pixels, pixels, pixels, (1, side, side))
    frames = from_torch(torch.zeros(plan.frames_shape, dtype=torch.uint8))
    return plan.num_patches / fastest_s(lambda: encoder.encode([(plan, frames)]))
