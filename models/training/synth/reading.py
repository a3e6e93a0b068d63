"""Pictures of short printed texts."""

import random
from functools import lru_cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from models.training.draw import is_held_out
from models.training.synth.shapes import COLOURS, Colour, Pixels, finish

ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"  # I and O look like digits
MAX_CHARACTERS = 5
HEIGHT = 64

FONT_FOLDER = "/usr/share/fonts/truetype"
FONTS = (
    "dejavu/DejaVuSans.ttf",
    "dejavu/DejaVuSans-Bold.ttf",
    "dejavu/DejaVuSerif.ttf",
    "dejavu/DejaVuSansMono.ttf",
    "dejavu/DejaVuSansCondensed.ttf",
    "liberation/LiberationSans-Regular.ttf",
    "liberation/LiberationSans-Bold.ttf",
    "liberation/LiberationSerif-Regular.ttf",
    "liberation/LiberationSerif-Bold.ttf",
    "liberation/LiberationMono-Bold.ttf",
)
UNSEEN_FONTS = (
    "dejavu/DejaVuSerif-Bold.ttf",
    "liberation/LiberationMono-Regular.ttf",
    "dejavu/DejaVuSansMono-Bold.ttf",
)

# Characters that fit the width of a picture, one or two patches each.
_ROOM = {96: 3, 128: 4, 160: 5}


def draw_text(rng: random.Random, length: int, *, held_out: bool) -> str:
    """A string. Those of one or two characters are too few to keep some of them back."""
    while True:
        text = "".join(rng.choice(ALPHABET) for _ in range(length))
        if length < 3 or is_held_out(text) == held_out:
            return text


def draw_reading(
    rng: random.Random, fonts: tuple[str, ...], *, held_out: bool
) -> tuple[Pixels, dict[str, Any]]:
    """A picture [height, width, 3] and what it says."""
    text = draw_text(rng, rng.randint(1, MAX_CHARACTERS), held_out=held_out)
    wide_enough = [width for width, room in _ROOM.items() if room >= len(text)]
    width = 160 if rng.random() < 0.6 else rng.choice(wide_enough)
    name, size = rng.choice(fonts), rng.randint(26, 40)
    left, top, right, bottom = font(name, size).getbbox(text)
    while right - left > width - 6:
        size -= 2
        left, top, right, bottom = font(name, size).getbbox(text)
    ink, ground = _colours(rng)
    image = Image.new("RGB", (width, HEIGHT), ground)
    x = rng.uniform(2, width - 4 - (right - left)) - left
    y = rng.uniform(2, max(3.0, HEIGHT - 4 - (bottom - top))) - top
    ImageDraw.Draw(image).text((x, y), text, font=font(name, size), fill=ink)
    return finish(image, rng), {"text": text, "font": name}


def _colours(rng: random.Random) -> tuple[Colour, Colour]:
    """Dark on light, or the reverse. -> (ink, ground)."""

    def grey(low: int, high: int) -> Colour:
        base = rng.randint(low, high)
        red, green, blue = (min(255, max(0, base + rng.randint(-12, 12))) for _ in range(3))
        return red, green, blue

    if rng.random() < 0.3:
        return grey(190, 255), grey(0, 50)
    ink = COLOURS[rng.choice(("red", "blue", "purple", "black", "black", "green"))]
    return ink, (255, 255, 255) if rng.random() < 0.25 else grey(205, 250)


@lru_cache(maxsize=512)
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Raises OSError when Debian's fonts-dejavu and fonts-liberation are not installed."""
    return ImageFont.truetype(f"{FONT_FOLDER}/{name}", size)
