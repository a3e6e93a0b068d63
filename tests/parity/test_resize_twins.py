"""Whether the gateway (NumPy) or the encoder (torch) resizes a picture makes no difference."""

import numpy as np
import pytest
import torch

from mimo.media.resize import bilinear as on_the_host
from mimo.nn.resize import bilinear as on_the_device

SIZES = [
    ((70, 100), (96, 128)),  # both up
    ((150, 200), (64, 96)),  # both down
    ((250, 50), (72, 128)),  # down and up
    ((1, 1), (96, 96)),
    ((64, 96), (64, 96)),
    ((130, 31), (130, 32)),  # more rows than the host takes at once, all unchanged
]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(("source", "target"), SIZES)
def test_the_twins_agree(
    source: tuple[int, int], target: tuple[int, int], dtype: type[np.generic]
) -> None:
    image = np.random.default_rng(1).integers(0, 256, (*source, 3)).astype(dtype)
    host = on_the_host(image, *target)
    device = on_the_device(torch.from_numpy(image), *target)
    assert host.dtype == np.float32 and device.dtype is torch.float32
    np.testing.assert_allclose(host, device.numpy(), rtol=0, atol=1e-4)
