"""Turning pictures. Orientations are EXIF's 1..8; display matrices of videos map to them."""

import struct
from typing import Any

from numpy.typing import NDArray

UPRIGHT = 1


def turn(image: NDArray[Any], orientation: int) -> NDArray[Any]:
    """A view of ``image`` [H, W, C], upright. Orientations from 5 on swap height and width."""
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    flip_rows, flip_columns = _FLIPS[orientation]
    if flip_rows:
        image = image[::-1]
    if flip_columns:
        image = image[:, ::-1]
    return image


# After the transposition of 5..8: (upside down, mirrored).
_FLIPS = {
    1: (False, False),
    2: (False, True),
    3: (True, True),
    4: (True, False),
    5: (False, False),
    6: (False, True),
    7: (True, True),
    8: (True, False),
}


def orientation_of_matrix(matrix: bytes) -> int:
    """The nearest orientation to a display matrix of nine native 32-bit integers.

    It maps a stored point (x, y) to (a x + c y, b x + d y), y pointing down.
    """
    if len(matrix) != 36:
        return UPRIGHT
    a, b, _, c, d = struct.unpack("=9i", matrix)[:5]
    if abs(a) + abs(d) >= abs(b) + abs(c):
        mirrored, upside_down = a < 0, d < 0
        return {(0, 0): 1, (1, 0): 2, (1, 1): 3, (0, 1): 4}[mirrored, upside_down]
    # x comes from y and y from x: negative c mirrors, negative b turns upside down.
    return {(0, 0): 5, (1, 0): 6, (1, 1): 7, (0, 1): 8}[c < 0, b < 0]
