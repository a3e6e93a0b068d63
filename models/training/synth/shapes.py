"""Pictures of coloured shapes."""

import random
from dataclasses import dataclass
from io import BytesIO
from math import cos, pi, sin
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from models.training.draw import pick

COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 75, 215),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
    "black": (25, 25, 25),
}
KINDS = ("circle", "square", "triangle", "star")
NUM_LABELS = 1 + len(COLOURS) * len(KINDS)  # label 0 is background

PATCH = 16
_COVERED = 0.15  # share of a patch from which on it shows the shape

Pixels = NDArray[np.uint8]
Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Centre and radius as shares of the picture's width, height and shorter side."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def label(self) -> int:
        return 1 + list(COLOURS).index(self.colour) * len(KINDS) + KINDS.index(self.kind)


@dataclass(frozen=True, slots=True)
class Scene:
    """``layout``: one, left (the first left of the second), above, row (from the left) or many."""

    layout: str
    shapes: tuple[Shape, ...]

    def to_json(self) -> dict[str, Any]:
        fields = [[s.kind, s.colour, s.x, s.y, s.radius] for s in self.shapes]
        return {"layout": self.layout, "shapes": fields}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Scene":
        return cls(fields["layout"], tuple(Shape(*shape) for shape in fields["shapes"]))


def draw_picture(rng: random.Random) -> tuple[Pixels, dict[str, Any]]:
    """A picture [height, width, 3] and its scene."""
    scene = draw_scene(rng)
    height, width = _size(rng)
    return finish(render(scene.shapes, height, width, backdrop(rng), rng), rng), scene.to_json()


def draw_scene(rng: random.Random) -> Scene:
    layout = pick(rng, {"one": 3, "left": 2, "above": 2, "row": 2, "many": 3})
    match layout:
        case "one":
            radius = rng.uniform(0.13, 0.36)
            where = (rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius))
            return Scene(layout, (_shape(rng, *where, radius),))
        case "left" | "above":
            return Scene(layout, _pair(rng, layout))
        case "row":
            places = [(1 + 2 * i) / 6 + rng.uniform(-0.02, 0.02) for i in range(3)]
            row = (_shape(rng, x, rng.uniform(0.2, 0.8), rng.uniform(0.1, 0.14)) for x in places)
            return Scene(layout, tuple(row))
    return Scene(layout, _scattered(rng, rng.randint(1, 5)))


def _shape(rng: random.Random, x: float, y: float, radius: float) -> Shape:
    return Shape(rng.choice(KINDS), rng.choice(list(COLOURS)), x, y, radius)


def _pair(rng: random.Random, layout: str) -> tuple[Shape, ...]:
    """Two different shapes in the two halves, at about the same height or width."""
    radii = rng.uniform(0.11, 0.2), rng.uniform(0.11, 0.2)
    first = rng.uniform(radii[0] + 0.02, max(0.48 - radii[0], radii[0] + 0.03))
    second = rng.uniform(min(0.52 + radii[1], 0.97 - radii[1]), 0.98 - radii[1])
    middle = rng.uniform(0.24, 0.76)
    shift = rng.uniform(-0.07, 0.07)
    while True:
        places = ((first, middle + shift), (second, middle - shift))
        if layout == "above":
            places = ((middle + shift, first), (middle - shift, second))
        shapes = tuple(_shape(rng, *place, r) for place, r in zip(places, radii, strict=True))
        if (shapes[0].kind, shapes[0].colour) != (shapes[1].kind, shapes[1].colour):
            return shapes


def _scattered(rng: random.Random, count: int) -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    while len(shapes) < count:
        r = rng.uniform(0.085, 0.145)
        shape = _shape(rng, rng.uniform(r, 1 - r), rng.uniform(r, 1 - r), r)
        apart = (
            (shape.x - s.x) ** 2 + (shape.y - s.y) ** 2 > (r + s.radius + 0.03) ** 2 for s in shapes
        )
        if all(apart):
            shapes.append(shape)
    return tuple(shapes)


def _size(rng: random.Random) -> tuple[int, int]:
    """Mostly 96 x 96; sometimes other sizes and sizes that the processor has to change."""
    kind = pick(rng, {"usual": 76, "grid": 16, "any": 8})
    if kind == "usual":
        return 96, 96
    if kind == "grid":
        return rng.choice(((64, 64), (64, 96), (96, 64), (96, 128), (128, 96), (128, 128)))
    side = rng.randint(70, 260)
    return side, int(side * rng.uniform(0.85, 1.18))


def backdrop(rng: random.Random) -> Colour:
    if rng.random() < 0.25:
        return 255, 255, 255
    grey = rng.randint(200, 250)
    return _near((grey, grey, grey), rng, 12)


def _near(colour: Colour, rng: random.Random, spread: int) -> Colour:
    red, green, blue = (min(255, max(0, c + rng.randint(-spread, spread))) for c in colour)
    return red, green, blue


def render(
    shapes: tuple[Shape, ...], height: int, width: int, ground: Colour, rng: random.Random
) -> Image.Image:
    """Draw shapes, most often smoothly."""
    scale = 2 if rng.random() < 0.7 else 1
    image = Image.new("RGB", (scale * width, scale * height), ground)
    canvas = ImageDraw.Draw(image)
    for shape in shapes:
        _fill(canvas, shape, scale * height, scale * width, _near(COLOURS[shape.colour], rng, 14))
    return image.reduce(scale) if scale > 1 else image


def _fill(
    canvas: ImageDraw.ImageDraw, shape: Shape, height: int, width: int, colour: Colour | int
) -> None:
    x, y, r = shape.x * width, shape.y * height, shape.radius * min(height, width)
    match shape.kind:
        case "circle":
            canvas.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        case "square":
            canvas.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill=colour)
        case "triangle":
            canvas.polygon(((x, y - r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r)), fill=colour)
        case _:
            corners = []
            for point in range(10):
                reach = r * (1.08 if point % 2 == 0 else 0.46)
                angle = pi * point / 5 - pi / 2
                corners.append((x + reach * cos(angle), y + reach * sin(angle)))
            canvas.polygon(corners, fill=colour)


def finish(image: Image.Image, rng: random.Random) -> Pixels:
    """What happens to pictures on their way: compression, noise, or nothing."""
    if rng.random() < 0.3:
        stored = BytesIO()
        image.save(stored, "JPEG", quality=rng.randint(60, 95))
        image = Image.open(stored).convert("RGB")
    pixels = np.asarray(image)
    if rng.random() < 0.4:
        noise = np.random.default_rng(rng.getrandbits(64)).integers(-8, 9, pixels.shape)
        pixels = np.clip(pixels.astype(np.int16) + noise, 0, 255).astype(np.uint8)
    return pixels


def patch_labels(shapes: tuple[Shape, ...], rows: int, columns: int) -> NDArray[np.int64]:
    """Which shape each patch of a picture of that many patches shows. [rows, columns]."""
    labels = np.zeros((rows, columns), np.int64)
    for shape in shapes:
        mask = Image.new("L", (columns * PATCH, rows * PATCH), 0)
        _fill(ImageDraw.Draw(mask), shape, rows * PATCH, columns * PATCH, 1)
        covered = np.asarray(mask).reshape(rows, PATCH, columns, PATCH).mean((1, 3))
        labels[covered > _COVERED] = shape.label
    return labels
