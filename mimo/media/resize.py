"""Bilinear resizing as the model was trained with: no antialias, half-pixel centres, float output.

Scale, weights and blending are float32, as in ``torch.nn.functional.interpolate`` with
``mode="bilinear", align_corners=False``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Output rows computed at once: bounds the float copies of a large source to a few of its rows.
_BAND_ROWS = 64


def bilinear(image: NDArray[Any], height: int, width: int) -> NDArray[np.float32]:
    """Resize ``image`` [H, W, C] (uint8 or float32) to float32 [height, width, C].

    Values are neither clamped nor rounded. An unchanged size gives the values back unchanged.
    """
    resized = np.empty((height, width, image.shape[2]), np.float32)
    top, bottom, down = _taps(image.shape[0], height)
    left, right, across = _taps(image.shape[1], width)
    across = across[None, :, None]  # [1, width, 1]
    for start in range(0, height, _BAND_ROWS):
        band = slice(start, start + _BAND_ROWS)
        upper = _blend_columns(image[top[band]], left, right, across)
        lower = _blend_columns(image[bottom[band]], left, right, across)
        weight = down[band, None, None]  # [rows, 1, 1]
        resized[band] = upper * (1 - weight) + lower * weight
    return resized


def _blend_columns(
    rows: NDArray[Any],
    left: NDArray[np.intp],
    right: NDArray[np.intp],
    across: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Interpolate whole rows [R, W, C] along the width -> [R, width, C]."""
    near = rows.take(left, axis=1).astype(np.float32, copy=False)
    far = rows.take(right, axis=1).astype(np.float32, copy=False)
    blended: NDArray[np.float32] = near * (1 - across) + far * across
    return blended


def _taps(
    source: int, target: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """The two source positions of every target position, and the weight of the second."""
    scale = float(np.float32(source) / np.float32(target))
    centre = (np.arange(target) + 0.5) * scale - 0.5  # one rounding, as a fused multiply-add has
    position = np.maximum(centre, 0).astype(np.float32)
    first = position.astype(np.intp)
    second = np.minimum(first + 1, source - 1)
    return first, second, position - first.astype(np.float32)
