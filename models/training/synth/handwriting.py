"""Handwritten digits: scikit-learn's 1,797 scans of 8 x 8, enlarged."""

import random
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.training.draw import stream
from models.training.synth.shapes import Pixels

SIDE = 64
NUM_TRAINING = 1_497  # originals; the other 300 are never trained on


def draw_digit(rng: random.Random, *, held_out: bool) -> tuple[Pixels, dict[str, Any]]:
    """A picture [64, 64, 3], its digit and which original it is. Held-out ones are not turned."""
    images, digits = _scans()
    training, kept = _originals(len(digits))
    original = rng.choice(kept if held_out else training)
    scan = Image.fromarray((images[original] * 15.9).astype(np.uint8))
    side = 52 if held_out else rng.randint(40, 60)
    scan = scan.resize((side, side), Image.Resampling.BILINEAR)
    if not held_out:
        scan = scan.rotate(rng.uniform(-14, 14), Image.Resampling.BILINEAR)
    margin = (SIDE - side) // 2
    slack = 0 if held_out else margin
    page = Image.new("L", (SIDE, SIDE), 0)
    page.paste(scan, (margin + rng.randint(-slack, slack), margin + rng.randint(-slack, slack)))
    pixels = np.asarray(page)
    if rng.random() < 0.5:
        pixels = 255 - pixels
    facts = {"digit": int(digits[original]), "original": int(original)}
    return np.repeat(pixels[:, :, None], 3, axis=2), facts


@lru_cache(maxsize=1)
def _scans() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    from sklearn.datasets import load_digits  # only training needs it

    scans = load_digits()
    return scans.images, scans.target


@lru_cache(maxsize=1)
def _originals(count: int) -> tuple[list[int], list[int]]:
    order = list(range(count))
    stream("handwriting").shuffle(order)
    return order[:NUM_TRAINING], order[NUM_TRAINING:]
