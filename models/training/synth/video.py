"""Short clips of one shape that moves or changes its colour."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from gateway.items import MediaOptions
from gateway.media.plan.video import sample_frames
from gateway.media.processor import ProcessorConfig
from models.training.draw import pick
from models.training.synth.shapes import COLOURS, KINDS, Pixels, Shape, backdrop, finish, render

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
FRAME_RATES = (4.0, 5.0, 8.0, 10.0, 12.0, 15.0, 24.0, 25.0, 30.0)


def draw_video(
    rng: random.Random, processor: ProcessorConfig, *, every_frame: bool = False
) -> tuple[Pixels, dict[str, Any]]:
    """The frames [frames, height, width, 3] that the processor takes from a clip, and its facts.

    ``change`` is a direction or "colour"; ``shapes`` holds the shape of each of these frames. With
    ``every_frame`` the same clip is drawn whole.
    """
    rate = rng.choice(FRAME_RATES)
    num_frames = max(4, round(rng.uniform(1.0, 5.9) * rate))
    indices: Sequence[int] = range(num_frames)
    if not every_frame:
        indices = sample_frames(num_frames, rate, MediaOptions(), processor).frame_indices
    times = [index / (num_frames - 1) for index in indices]  # 0 at the start, 1 at the end
    height, width = pick(rng, {(64, 64): 70, (96, 96): 22, (64, 96): 8})
    change = pick(rng, {"left": 1, "right": 1, "up": 1, "down": 1, "colour": 2})
    shapes = _recolour(rng, times) if change == "colour" else _move(rng, times, change)
    ground, style = backdrop(rng), rng.getrandbits(32)
    frames = []
    for shape in shapes:
        # One seed for all frames: colours and drawing stay the same throughout a clip.
        image: Image.Image = render((shape,), height, width, ground, random.Random(style))
        frames.append(finish(image, random.Random(style)))
    facts = {
        "change": change,
        "rate": rate,
        "num_frames": num_frames,
        "shapes": [[s.kind, s.colour, s.x, s.y, s.radius] for s in shapes],
    }
    return np.stack(frames), facts


def _move(rng: random.Random, times: list[float], direction: str) -> list[Shape]:
    radius = rng.uniform(0.12, 0.2)
    distance = rng.uniform(0.28, 0.6)
    start = rng.uniform(radius, max(radius + 0.01, 1 - radius - distance))
    across = rng.uniform(radius, 1 - radius)
    kind, colour = rng.choice(KINDS), rng.choice(list(COLOURS))
    dx, dy = DIRECTIONS[direction]
    shapes = []
    for time in times:
        along = start + distance * time
        along = along if dx + dy > 0 else 1 - along
        x, y = (along, across) if dx else (across, along)
        shapes.append(Shape(kind, colour, x, y, radius))
    return shapes


def _recolour(rng: random.Random, times: list[float]) -> list[Shape]:
    """The change falls between two grids or inside one, never before the second frame."""
    radius = rng.uniform(0.12, 0.24)
    x, y = rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius)
    kind = rng.choice(KINDS)
    before, after = rng.sample(list(COLOURS), 2)
    moment = rng.uniform(0.3, 0.8)
    return [Shape(kind, before if time < moment else after, x, y, radius) for time in times]
