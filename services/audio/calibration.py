"""A first encode at start: how many seconds of sound per second."""

import torch

from mimo.leaf.calibration import fastest_s
from mimo.nn.interop import from_torch
from services.audio.encoder import AudioEncoder
from services.audio.plan import AudioPlan

SECONDS = 2  # small enough for the published model on a laptop


def calibrate(encoder: AudioEncoder, sample_rate: int) -> float:
    """Seconds of sound encoded per second."""
    plan = AudioPlan(SECONDS * sample_rate, sample_rate)
    silence = from_torch(torch.zeros(plan.num_samples))
    return plan.seconds / fastest_s(lambda: encoder.encode([(plan, silence)]))
