"""A first encode at start: warms the device up and measures how fast it is."""

import time

import torch

from mimo.nn.interop import from_torch
from services.vision.config import VisionTowerConfig
from services.vision.encoder import VisionEncoder
from services.vision.plan import VisionPlan

SIDE_UNITS = 4  # 16 tokens: small enough for the published tower on a laptop
RUNS = 3


def calibrate(encoder: VisionEncoder, config: VisionTowerConfig) -> float:
    """Patches per second of a small image, the best of a few runs."""
    side = SIDE_UNITS * config.spatial_merge_size  # patches
    pixels = side * config.patch_size
    plan = VisionPlan(1, pixels, pixels, pixels, pixels, (1, side, side))
    frames = from_torch(torch.zeros(plan.frames_shape, dtype=torch.uint8))
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        encoder.encode([(plan, frames)])
        seconds.append(time.perf_counter() - started)
    return plan.num_patches / min(seconds)
