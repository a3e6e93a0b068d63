"""Random numbers that depend on what they are for, and which values are kept for measuring."""

import hashlib
import random
from collections.abc import Mapping
from typing import TypeVar

ChoiceT = TypeVar("ChoiceT")

_HELD_OUT_SHARE = 12  # one of so many values


def stream(*purpose: object) -> random.Random:
    """A generator for one purpose, the same on every machine and in every process."""
    return random.Random("/".join(map(str, purpose)))


def pick(rng: random.Random, weights: Mapping[ChoiceT, float]) -> ChoiceT:
    """One key, as often as its weight says."""
    return rng.choices(list(weights), list(weights.values()))[0]


def is_held_out(value: str) -> bool:
    """Whether a string (of a text to read, copy, reverse, sort) is never trained on."""
    digest = hashlib.sha256(value.encode()).digest()
    return int.from_bytes(digest[:4], "little") % _HELD_OUT_SHARE == 0
