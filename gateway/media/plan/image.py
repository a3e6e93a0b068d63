"""Sizes of pictures: how many pixels, patches and tokens an image of a given size becomes."""

import math
from dataclasses import dataclass

from gateway.items import ImagePlan, MediaOptions
from gateway.media.processor import ProcessorConfig
from mimo.errors import InvalidRequest, Reason

MAX_ASPECT = 200


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """Bounds on the area a picture or frame is scaled to."""

    min_pixels: int
    max_pixels: int


def plan_image(
    height: int, width: int, orientation: int, options: MediaOptions, config: ProcessorConfig
) -> ImagePlan:
    """Plan a picture of ``height`` x ``width`` pixels as it is stored, before turning it.

    Raises InvalidRequest for impossible pixel bounds or an extreme aspect ratio.
    """
    if orientation >= 5:  # the turned ones
        height, width = width, height
    budget = requested_budget(options, config.image_min_pixels, config.image_max_pixels, config)
    target_height, target_width = smart_resize(height, width, config.unit, budget)
    grid_thw = (1, target_height // config.patch_size, target_width // config.patch_size)
    return ImagePlan(
        source_height=height,
        source_width=width,
        target_height=target_height,
        target_width=target_width,
        orientation=orientation,
        grid_thw=grid_thw,
        num_tokens=math.prod(grid_thw) // config.merge_size**2,
    )


def requested_budget(
    options: MediaOptions, min_pixels: int, max_pixels: int, config: ProcessorConfig
) -> PixelBudget:
    """The request's bounds within the model's: nothing above its maximum or below one token."""
    if options.max_pixels is not None:
        max_pixels = min(options.max_pixels, max_pixels)
    if options.min_pixels is not None:
        min_pixels = min(options.min_pixels, max_pixels)
    smallest = config.unit**2
    max_pixels = max(max_pixels, smallest)
    return PixelBudget(max(min(min_pixels, max_pixels), smallest), max_pixels)


def smart_resize(height: int, width: int, unit: int, budget: PixelBudget) -> tuple[int, int]:
    """The nearest size whose sides are multiples of ``unit`` and whose area is within the budget.

    Float64 arithmetic and rounding half to even, as the model was trained. Raises InvalidRequest
    when one side is more than 200 times the other.
    """
    if min(height, width) < unit:
        scale = unit / min(height, width)
        height, width = round(height * scale), round(width * scale)
    elif max(height, width) / min(height, width) > MAX_ASPECT:
        raise InvalidRequest(
            f"aspect ratio of {width}x{height} is above {MAX_ASPECT}:1",
            reason=Reason.MEDIA_LIMIT,
            which="aspect",
            limit=MAX_ASPECT,
        )
    target_height, target_width = round(height / unit) * unit, round(width / unit) * unit
    if target_height * target_width > budget.max_pixels:
        shrink = math.sqrt(height * width / budget.max_pixels)
        # A very long picture would otherwise shrink to nothing.
        target_height = max(unit, math.floor(height / shrink / unit) * unit)
        target_width = max(unit, math.floor(width / shrink / unit) * unit)
    elif target_height * target_width < budget.min_pixels:
        grow = math.sqrt(budget.min_pixels / (height * width))
        target_height = math.ceil(height * grow / unit) * unit
        target_width = math.ceil(width * grow / unit) * unit
    return target_height, target_width
