"""Short sounds: spoken digits, commands and colours, and beeps to count."""

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.training.draw import pick
from models.training.synth.espeak import Samples, espeak
from models.training.synth.shapes import COLOURS

SAMPLE_RATE = 24_000
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COMMANDS = (
    "go", "stop", "left", "right", "up", "down", "yes", "no", "on", "off", "open", "close",
)  # fmt: skip
BEEP = "beep"
WORDS = (*DIGITS, *COMMANDS, *COLOURS, BEEP)

_ACCENTS = ("en-us", "en", "en-gb-scotland", "en-gb-x-rp", "en-029")
_TIMBRES = ("", "+m1", "+m2", "+m3", "+m7", "+f1", "+f2", "+f3")
VOICES = tuple(accent + timbre for accent in _ACCENTS for timbre in _TIMBRES)
UNSEEN_VOICES = ("en-us+f4", "en+m5", "en-gb-x-gbclan", "en-gb-x-gbcwmd+f2", "en-us-nyc+m4")
SPEEDS = (*range(120, 146, 5), *range(160, 196, 5))  # words per minute
UNSEEN_SPEEDS = (150, 155, 200)

# How often each kind is heard. Training hears more commands: twelve words in one clip out of five
# were the last to be told apart.
_KINDS = {"digits": 5, "commands": 2, "colour": 1.5, "beeps": 1.5}
_KINDS_TAUGHT = _KINDS | {"commands": 5}


def draw_sound(
    rng: random.Random, *, unseen: bool, taught: bool
) -> tuple[NDArray[np.int16], dict[str, Any]]:
    """16-bit samples, as a wave file holds them, and what is heard: ``kind`` and ``words``.

    ``unseen`` takes the voices and speeds that are never trained on, ``taught`` the training mix.
    """
    kind = pick(rng, _KINDS_TAUGHT if taught else _KINDS)
    if kind == "beeps":
        words = [BEEP] * rng.randint(1, 5)
        sound = beeps(rng, len(words))
        facts: dict[str, Any] = {"kind": kind, "words": words}
    else:
        words = _words(rng, kind)
        voice = rng.choice(UNSEEN_VOICES if unseen else VOICES)
        speed = rng.choice(UNSEEN_SPEEDS if unseen else SPEEDS)
        sound = espeak().speak(
            (", " if rng.random() < 0.3 else " ").join(words),
            voice=voice,
            words_per_minute=speed,
            pitch=rng.randint(30, 70),
            sample_rate=SAMPLE_RATE,
        )
        facts = {"kind": kind, "words": words, "voice": voice, "speed": speed}
    return _record(rng, sound), facts


def _words(rng: random.Random, kind: str) -> list[str]:
    match kind:
        case "digits":
            return [rng.choice(DIGITS) for _ in range(rng.randint(1, 5))]
        case "commands":
            return [rng.choice(COMMANDS) for _ in range(rng.randint(1, 2))]
    return [rng.choice(list(COLOURS))]


def beeps(rng: random.Random, count: int) -> Samples:
    """Equal tones with equal gaps, soft at both ends."""
    pitch, length, gap = rng.uniform(400, 2000), rng.uniform(0.08, 0.2), rng.uniform(0.12, 0.3)
    time = np.arange(int(SAMPLE_RATE * length)) / SAMPLE_RATE
    fade = np.minimum(1, np.minimum(time, time[::-1]) / 0.01)
    tone = 0.5 * np.sin(2 * np.pi * pitch * time) * fade
    pieces = [tone, np.zeros(int(SAMPLE_RATE * gap))] * count
    return np.concatenate(pieces[:-1]).astype(np.float32)


def _record(rng: random.Random, sound: Samples) -> NDArray[np.int16]:
    """Silence around the sound, a level, and in most recordings noise."""
    before, after = rng.randint(0, 4_800), rng.randint(480, 4_800)
    samples = np.pad(sound, (before, after)) * rng.uniform(0.3, 1.2)
    if rng.random() < 0.7:
        noise = np.random.default_rng(rng.getrandbits(64)).standard_normal(len(samples))
        samples = samples + noise * 10 ** rng.uniform(-4.5, -2.3)
    return (np.clip(samples, -1, 1) * 32_767).astype(np.int16)
