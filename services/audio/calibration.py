"""A first encode at start: warms the device up and measures how fast it is."""

import time

import torch

from mimo.nn.interop import from_torch
from services.audio.encoder import AudioTower
from services.audio.plan import AudioPlan

SECONDS = 2  # small enough for the published model on a laptop
RUNS = 3


def calibrate(tower: AudioTower, sample_rate: int) -> float:
    """Seconds of sound encoded per second, the best of a few runs."""
    plan = AudioPlan(SECONDS * sample_rate, sample_rate)
    silence = from_torch(torch.zeros(plan.num_samples))
    durations = []
    for _ in range(RUNS):
        started = time.perf_counter()
        tower.encode([(plan, silence)])
        durations.append(time.perf_counter() - started)
    return plan.seconds / min(durations)
