"""Resize, normalisation and patch layout against golden numbers."""

import pytest
import torch
from torch import Tensor

from services.vision import preprocess
from services.vision.config import VisionTowerConfig
from services.vision.plan import VisionPlan
from services.vision.preprocess import Preprocessor
from tests.support import golden_vision


def config(stats: str = "clip") -> VisionTowerConfig:
    return VisionTowerConfig.from_checkpoint(
        golden_vision.config(patch_size=16), overrides={"vision_pixel_stats": stats}
    )


def gradient() -> Tensor:
    """[1, 70, 100, 3] with value (3 x + 5 y + 37 c) mod 256."""
    y, x, c = torch.meshgrid(torch.arange(70), torch.arange(100), torch.arange(3), indexing="ij")
    return ((3 * x + 5 * y + 37 * c) % 256).to(torch.uint8).unsqueeze(0)


def near(expected: object, tolerance: float = 2e-6) -> object:
    return pytest.approx(expected, rel=0, abs=tolerance)


IMAGE = VisionPlan(1, 70, 100, 96, 128, (1, 6, 8))


def test_image_with_clip_statistics() -> None:
    patches = Preprocessor(config(), "cpu")(gradient(), IMAGE)
    assert patches.shape == (48, 1536)
    assert patches.dtype == torch.float32
    assert patches[0, :4].tolist() == near([-1.792263, -1.762838, -1.728623, -1.694407])
    assert patches[0, 256].item() == near(-1.792263)  # the frame again: second half in time
    assert patches[0, 512].item() == near(-1.196810)  # green
    assert patches[1, :2].tolist() == near([-1.249612, -1.215397])
    assert patches[4, :2].tolist() == near([-0.702171, -0.667956])
    assert patches.double().sum().item() == near(12761.4953, 0.02)
    assert patches.double().norm().item() == near(288.21483, 1e-4)


def test_image_with_imagenet_statistics() -> None:
    patches = Preprocessor(config("imagenet"), "cpu")(gradient(), IMAGE)
    assert patches[0, :4].tolist() == near([-2.117904, -2.083387, -2.043251, -2.003115])


def test_odd_clip_repeats_its_last_frame() -> None:
    frames = torch.tensor([0, 40, 80], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 64, 96, 3)
    plan = VisionPlan(3, 64, 96, 96, 128, (2, 6, 8))
    patches = Preprocessor(config("imagenet"), "cpu")(frames, plan)
    assert patches.shape == (96, 1536)
    assert patches[0, 0].item() == near(-2.117904)
    assert patches[0, 256].item() == near(-1.432914)
    red = patches[48:, :512]
    assert red.min().item() == near(-0.747924)
    assert red.max().item() == near(-0.747924)


def test_long_clip_is_resized_in_runs_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.cat([gradient(), 255 - gradient(), gradient() // 2])
    plan = VisionPlan(3, 70, 100, 96, 128, (2, 6, 8))
    at_once = Preprocessor(config(), "cpu")(frames, plan)
    monkeypatch.setattr(preprocess, "RESIZE_VALUES", 2 * frames[0].numel())
    assert Preprocessor(config(), "cpu")(frames, plan).equal(at_once)


def test_resized_frames_are_not_resized_again() -> None:
    frames = gradient().float()[:, :64, :96]
    plan = VisionPlan(1, 500, 750, 64, 96, (1, 4, 6), resized=True)
    source = VisionPlan(1, 64, 96, 64, 96, (1, 4, 6))
    patches = Preprocessor(config(), "cpu")
    assert patches(frames, plan).equal(patches(gradient()[:, :64, :96], source))


def test_row_and_column_of_every_pixel() -> None:
    frames = torch.rand(4, 64, 96, 3) * 255
    plan = VisionPlan(4, 64, 96, 64, 96, (2, 4, 6), resized=True)
    patches = Preprocessor(config(), "cpu")(frames, plan).view(-1, 3, 2, 16, 16)
    mean = 255 * torch.tensor(config().pixel_mean)
    std = 255 * torch.tensor(config().pixel_std)
    expected = (frames - mean) / std  # [4, 64, 96, 3]
    row = 0
    for pair in range(2):
        for a in range(2):
            for b in range(3):
                for r in range(2):
                    for s in range(2):
                        y, x = 16 * (2 * a + r), 16 * (2 * b + s)
                        cut = expected[2 * pair : 2 * pair + 2, y : y + 16, x : x + 16]
                        assert patches[row].equal(cut.permute(3, 0, 1, 2))
                        row += 1
