"""A plan must agree with itself, with the tower and with the frames that follow."""

from dataclasses import replace

import pytest

from mimo.errors import InvalidRequest, Reason
from services.vision.config import VisionTowerConfig
from services.vision.plan import VisionPlan
from tests.support import golden_vision

CONFIG = VisionTowerConfig.from_checkpoint(
    golden_vision.config(patch_size=16, qk_channels=8), overrides={}
)
PLAN = VisionPlan(3, 70, 100, 96, 128, (2, 6, 8))


def check(plan: VisionPlan, max_patches: int = 1 << 20) -> None:
    plan.check(CONFIG, max_patches=max_patches)


# Target sizes of images of many shapes, with the tokens they cost.
@pytest.mark.parametrize(
    ("target", "tokens"),
    [
        ((480, 640), 300),
        ((608, 800), 475),
        ((704, 1280), 880),
        ((1024, 1024), 1024),
        ((1088, 1920), 2040),
        ((2176, 3840), 8160),
        ((2496, 3328), 8112),
        ((64, 128), 8),
        ((96, 96), 9),
        ((32, 1888), 59),
        ((32, 224000), 7000),
    ],
)
def test_a_token_is_32_by_32_pixels(target: tuple[int, int], tokens: int) -> None:
    height, width = target
    plan = VisionPlan(1, 50, 50, height, width, (1, height // 16, width // 16))
    check(plan)
    assert plan.num_patches == 4 * tokens


def test_an_odd_frame_count_is_rounded_up_to_whole_temporal_patches() -> None:
    check(PLAN)
    check(replace(PLAN, num_frames=4))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_frames": 0}, "plan"),
        ({"source_width": 0}, "plan"),
        ({"target_height": 97}, "plan.target_height"),
        ({"target_width": 112}, "plan.target_height"),
        ({"num_frames": 5}, "plan.grid_t"),
        ({"grid_thw": (2, 8, 6)}, "plan.grid_t"),
    ],
)
def test_contradiction_names_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check(replace(PLAN, **changes))  # type: ignore[arg-type]
    assert error.value.field == field


def test_too_many_patches_is_a_media_limit() -> None:
    check(PLAN, max_patches=96)
    with pytest.raises(InvalidRequest) as error:
        check(PLAN, max_patches=95)
    assert error.value.reason is Reason.MEDIA_LIMIT


def test_frames_are_uint8_at_source_size_or_float32_at_target_size() -> None:
    source = ("uint8", (3, 70, 100, 3))
    target = ("float32", (3, 96, 128, 3))
    resized = replace(PLAN, resized=True)
    PLAN.check_frames(*source)
    resized.check_frames(*target)
    for plan, frames in [(PLAN, target), (resized, source)]:
        with pytest.raises(InvalidRequest) as error:
            plan.check_frames(*frames)
        assert error.value.field == "frames"
