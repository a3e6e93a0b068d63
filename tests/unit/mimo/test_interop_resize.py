"""The device's bilinear resize against hand-checked values."""

import torch

from mimo.nn.resize import bilinear


def test_upscaling_a_ramp() -> None:
    ramp = torch.arange(0, 120, 10, dtype=torch.float32).view(3, 4, 1)
    third = 20 / 3
    row = torch.tensor([0, 5, 5 + third, 5 + 2 * third, 25, 30])
    expected = row + torch.tensor([0.0, 25.0, 55.0, 80.0])[:, None]
    torch.testing.assert_close(bilinear(ramp, 4, 6)[..., 0], expected)


def test_downscaling_takes_two_taps_without_antialiasing() -> None:
    values = torch.arange(24, dtype=torch.float32).square().view(4, 6, 1)
    expected = torch.tensor([[21.5, 39.5, 65.5], [249.5, 315.5, 389.5]])
    torch.testing.assert_close(bilinear(values, 2, 3)[..., 0], expected)


def test_equal_size_is_the_identity_in_float32() -> None:
    image = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8)
    out = bilinear(image, 5, 7)
    assert out.dtype is torch.float32
    assert torch.equal(out, image.float())


def test_frames_resize_independently() -> None:
    frames = torch.rand(4, 6, 5, 3, generator=torch.Generator().manual_seed(0))
    out = bilinear(frames, 9, 4)
    assert out.shape == (4, 9, 4, 3)
    for frame, resized in zip(frames, out, strict=True):
        assert torch.equal(bilinear(frame, 9, 4), resized)
