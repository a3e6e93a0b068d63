"""Bilinear resizing on the host against worked values."""

import numpy as np

from mimo.media.resize import bilinear


def test_enlarging_a_ramp() -> None:
    ramp = (10 * np.arange(12, dtype=np.float32)).reshape(3, 4, 1)
    expected = [
        [0, 5, 11.66667, 18.33333, 25, 30],
        [25, 30, 36.66667, 43.33334, 50, 55],
        [55, 60, 66.66666, 73.33334, 80, 85],
        [80, 85, 91.66667, 98.33334, 105, 110],
    ]
    np.testing.assert_allclose(bilinear(ramp, 4, 6)[..., 0], expected, atol=1e-4)


def test_shrinking_does_not_antialias() -> None:
    y, x = np.mgrid[:4, :6]
    squares = ((6 * y + x) ** 2).astype(np.float32)[..., None]
    expected = [[21.5, 39.5, 65.5], [249.5, 315.5, 389.5]]
    np.testing.assert_allclose(bilinear(squares, 2, 3)[..., 0], expected, atol=1e-4)


def test_same_size_is_the_identity() -> None:
    image = np.random.default_rng(0).integers(0, 256, (37, 91, 3), dtype=np.uint8)
    assert np.array_equal(bilinear(image, 37, 91), image)
