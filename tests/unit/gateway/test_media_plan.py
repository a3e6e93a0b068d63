"""Planning: the published tables of sizes, frames, budgets, labels, tokens and sound segments."""

import json
from typing import Any

import pytest

from gateway.items import (
    AudioPlan,
    MediaOptions,
    Modality,
    PlannedMedia,
    ResizedBy,
    VideoPlan,
)
from gateway.media.plan.audio import plan_audio
from gateway.media.plan.image import PixelBudget, plan_image, smart_resize
from gateway.media.plan.video import (
    Sampling,
    choose_resizer,
    frame_budget,
    group_grids,
    label,
    plan_video,
    sample_frames,
    sound_segments,
)
from gateway.media.processor import ProcessorConfig
from mimo.errors import CheckpointError, InvalidRequest, Reason

TOKEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "audio_token_id": 151669,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "video_start_token_id": 151670,
    "video_end_token_id": 151671,
    "audio_start_token_id": 151673,
    "audio_end_token_id": 151674,
}
PUBLISHED = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "temporal_compression_ratio": 1,
    "image_min_pixels": 8192,
    "image_max_pixels": 8388608,
    "video_min_pixels": 8192,
    "video_max_pixels": 8388608,
    "video_total_max_pixels": 268435456,
    "fps": 1.0,
    "min_frames": None,
    "max_frames": 3600,
    "num_frames": None,
    "use_video_timestamps": True,
    "use_per_grid_t_timestamps": False,
    "video_audio_interleave_length": 0.0,
    "rope_type": "rope",
    "audio_sampling_rate": 24000,
    "audio_input_id_per_second": 25.0,
    "audio_group_size": 4,
    **TOKEN_IDS,
}
CONFIG = ProcessorConfig.from_checkpoint({"processor_config": PUBLISHED})
BUDGET = PixelBudget(8192, 8388608)


def options(**given: Any) -> MediaOptions:
    return MediaOptions(**given)


def test_missing_values_take_the_engines_defaults() -> None:
    config = ProcessorConfig.from_checkpoint({"processor_config": TOKEN_IDS | {"fps": 0}})
    assert (config.image_min_pixels, config.image_max_pixels) == (4096, 4194304)
    assert config.video_total_max_pixels == 16777216
    assert (config.fps, config.min_frames, config.max_frames) == (2.0, 8, 256)
    assert CONFIG.min_frames == 8
    assert CONFIG.audio_tokens_per_second == 6.25


def test_token_ids_stand_in_either_object() -> None:
    nested = {key: value for key, value in TOKEN_IDS.items() if key.startswith("video")}
    top = {key: value for key, value in TOKEN_IDS.items() if key not in nested}
    config = ProcessorConfig.from_checkpoint({**top, "processor_config": nested})
    assert config.token_ids == CONFIG.token_ids


@pytest.mark.parametrize("key", TOKEN_IDS)
def test_a_missing_token_id_stops_the_start(key: str) -> None:
    ids = {name: value for name, value in TOKEN_IDS.items() if name != key}
    with pytest.raises(CheckpointError, match=key):
        ProcessorConfig.from_checkpoint({"processor_config": ids})


@pytest.mark.parametrize(
    "setting",
    [
        {"use_video_timestamps": False},
        {"use_per_grid_t_timestamps": True},
        {"rope_type": "mrope"},
        {"audio_input_id_per_second": 12.5},
    ],
)
def test_settings_that_would_change_prompts_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        ProcessorConfig.from_checkpoint({"processor_config": PUBLISHED | setting})


@pytest.mark.parametrize(
    ("size", "target", "patches", "tokens"),
    [
        ((480, 640), (480, 640), 1200, 300),
        ((600, 800), (608, 800), 1900, 475),
        ((720, 1280), (704, 1280), 3520, 880),
        ((1024, 1024), (1024, 1024), 4096, 1024),
        ((1080, 1920), (1088, 1920), 8160, 2040),
        ((224, 224), (224, 224), 196, 49),
        ((64, 128), (64, 128), 32, 8),
        ((48, 80), (96, 128), 48, 12),
        ((17, 1000), (32, 1888), 236, 59),
        ((1, 7000), (32, 224000), 28000, 7000),
        ((1440, 2560), (1440, 2560), 14400, 3600),
        ((2160, 3840), (2176, 3840), 32640, 8160),
        ((3024, 4032), (2496, 3328), 32448, 8112),
        ((4320, 7680), (2144, 3840), 32160, 8040),
        ((2896, 2896), (2880, 2880), 32400, 8100),
        ((8192, 8192), (2880, 2880), 32400, 8100),
        ((64, 64), (96, 96), 36, 9),
        ((90, 90), (96, 96), 36, 9),
        ((32, 32), (96, 96), 36, 9),
        ((1, 1), (96, 96), 36, 9),
        ((31, 500), (32, 512), 64, 16),
        ((28, 100), (64, 192), 48, 12),
        ((32, 6400), (32, 6400), 800, 200),
        ((7, 8), (96, 128), 48, 12),
    ],
)
def test_picture_sizes(
    size: tuple[int, int], target: tuple[int, int], patches: int, tokens: int
) -> None:
    assert smart_resize(*size, 32, BUDGET) == target
    plan = plan_image(*size, 1, options(), CONFIG)
    assert plan.grid_thw == (1, target[0] // 16, target[1] // 16)
    assert plan.grid_thw[1] * plan.grid_thw[2] == patches
    assert plan.num_tokens == tokens


@pytest.mark.parametrize("size", [(32, 6432), (40, 9000), (9000, 40)])
def test_extreme_aspect_ratios_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        smart_resize(*size, 32, BUDGET)
    assert caught.value.reason == Reason.MEDIA_LIMIT


def test_a_long_picture_never_shrinks_to_nothing() -> None:
    assert smart_resize(100, 20000, 32, PixelBudget(1024, 8192)) == (32, 1280)


def test_turned_pictures_swap_their_sides() -> None:
    plan = plan_image(480, 640, 6, options(), CONFIG)
    assert (plan.source_height, plan.source_width) == (640, 480)
    assert plan.grid_thw == (1, 40, 30)


def test_requested_pixels_stay_within_the_models() -> None:
    assert plan_image(1080, 1920, 1, options(max_pixels=262144), CONFIG).num_tokens <= 256
    assert plan_image(4320, 7680, 1, options(max_pixels=10**9), CONFIG).num_tokens == 8040
    assert plan_image(64, 64, 1, options(min_pixels=1), CONFIG).num_tokens == 4
    assert plan_image(64, 64, 1, options(max_pixels=1), CONFIG).num_tokens == 1


@pytest.mark.parametrize(
    ("num_frames", "rate", "count", "first", "last"),
    [
        (2, 30, 2, [0, 1], 1),
        (7, 30, 6, [0, 1, 2, 3, 4], 6),
        (90, 30, 8, [0, 12, 25, 38, 50], 89),
        (300, 30, 10, [0, 33, 66, 99, 132], 299),
        (451, 29.97, 14, [0, 34, 69, 103, 138], 450),
        (1800, 30, 60, [0, 30, 60, 91, 121], 1799),
        (216000, 30, 3600, [0, 60, 120, 180], 215999),
        (3, 30, 2, [0, 2], 2),
    ],
)
def test_sampled_frames(
    num_frames: int, rate: float, count: int, first: list[int], last: int
) -> None:
    sampling = sample_frames(num_frames, rate, options(), CONFIG)
    assert len(sampling.frame_indices) == count
    assert list(sampling.frame_indices[: len(first)]) == first
    assert sampling.frame_indices[-1] == last


@pytest.mark.parametrize(
    ("num_frames", "rate", "labels"),
    [
        (2, 30, ["00:00"]),
        (7, 30, ["00:00"] * 3),
        (90, 30, ["00:00", "00:00", "00:01", "00:02"]),
        (300, 30, ["00:00", "00:02", "00:04", "00:06", "00:08"]),
        (451, 29.97, ["00:00", "00:02", "00:04", "00:06", "00:09", "00:11"]),
        (1800, 30, ["00:00", "00:02"]),
        (216000, 30, ["00:00", "00:04", "00:08"]),
    ],
)
def test_labels_of_grids(num_frames: int, rate: float, labels: list[str]) -> None:
    sampling = sample_frames(num_frames, rate, options(), CONFIG)
    found = [label(time) for time in sampling.timestamps[::2]]
    assert found[: len(labels)] == labels


def test_labels_have_no_hours() -> None:
    assert label(59.999) == "00:59"
    assert label(6000.0) == "100:00"


def test_a_video_of_one_frame_is_one_grid_at_zero() -> None:
    plan = video(1, 30)
    assert plan.frame_indices == (0,)
    assert plan.grid_thw[0] == 1
    assert plan.labels == ("00:00",)


def test_requested_frame_counts() -> None:
    def count(**given: Any) -> int:
        return len(sample_frames(300, 30, options(**given), CONFIG).frame_indices)

    assert count(num_frames=4) == 4
    assert count(num_frames=7) == 8  # 3.5 pairs round to even
    assert count(num_frames=1) == 2
    assert count(num_frames=1000) == 300
    assert count(fps=2.0) == 20
    assert count(min_frames=13) == 14
    assert count(max_frames=5) == 4
    with pytest.raises(InvalidRequest):
        count(max_frames=1)


@pytest.mark.parametrize(
    ("num_sampled", "max_pixels", "size", "tokens_per_grid"),
    [
        (64, 8388608, (1088, 1920), 2040),
        (128, 4194304, (1088, 1920), 2040),
        (256, 2097152, (1088, 1920), 2040),
        (1000, 536870, (544, 960), 510),
        (3600, 149130, (288, 512), 144),
    ],
)
def test_pixel_budget_of_a_frame(
    num_sampled: int, max_pixels: int, size: tuple[int, int], tokens_per_grid: int
) -> None:
    budget = frame_budget(num_sampled, options(), CONFIG)
    assert budget.max_pixels == max_pixels
    assert smart_resize(1080, 1920, 32, budget) == size
    assert size[0] * size[1] // 1024 == tokens_per_grid


def test_total_budget_can_be_lowered() -> None:
    assert frame_budget(8, options(total_max_pixels=1_000_000), CONFIG).max_pixels == 250_000


def test_small_frames_are_enlarged() -> None:
    assert smart_resize(64, 96, 32, frame_budget(3, options(), CONFIG)) == (96, 128)


def test_end_of_a_video_is_one_interval_after_its_last_frame() -> None:
    sampling = sample_frames(300, 30, options(), CONFIG)
    assert sampling.end == pytest.approx(11.0667, abs=1e-3)
    assert Sampling((0, 1, 2), (0.0, 0.5, 1.0)).end == 1.5
    assert Sampling((0,), (0.0,)).end == 1.0


@pytest.mark.parametrize(
    ("num_sound_tokens", "lengths"),
    [
        (63, [13, 14, 14, 14, 8]),
        (80, [13, 14, 14, 14, 14]),
        (50, [13, 14, 14, 9, 0]),
        (0, [0, 0, 0, 0, 0]),
    ],
)
def test_sound_is_dealt_out_to_grids(num_sound_tokens: int, lengths: list[int]) -> None:
    sampling = sample_frames(300, 30, options(), CONFIG)
    times = sampling.timestamps[::2]
    segments = sound_segments(times, sampling.end, num_sound_tokens, CONFIG)
    assert [count for _, count in segments] == lengths
    assert [start for start, _ in segments] == [0, 13, 27, 41, 55]


def test_half_a_second_has_grids_without_sound() -> None:
    sampling = sample_frames(15, 30, options(), CONFIG)
    segments = sound_segments(sampling.timestamps[::2], sampling.end, 4, CONFIG)
    assert [start for start, _ in segments] == [0, 0, 1, 2]
    assert segments[0] == (0, 0)


def test_grids_between_two_runs_of_sound() -> None:
    times = [0.0, 1.0, 2.5, 7.0]
    assert group_grids(times, 0) == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert group_grids(times, -1) == ((0, 4),)
    assert group_grids(times, 2.0) == ((0, 2), (2, 3), (3, 4))


@pytest.mark.parametrize(
    ("samples", "mel_frames", "tokens"),
    [
        (481, 3, 1),
        (2400, 11, 1),
        (24000, 101, 7),
        (240000, 1001, 63),
        (1440000, 6001, 376),
        (7200000, 30001, 1876),
    ],
)
def test_lengths_of_sound(samples: int, mel_frames: int, tokens: int) -> None:
    plan = sound(samples)
    assert (plan.num_samples, plan.num_mel_frames, plan.num_tokens) == (samples, mel_frames, tokens)


def test_the_shortest_clips_are_padded() -> None:
    assert sound(1).num_samples == 481
    assert sound(480).num_samples == 481
    assert sound(700).num_samples == 700
    with pytest.raises(InvalidRequest) as caught:
        sound(0)
    assert caught.value.reason == Reason.MEDIA_EMPTY


def test_frames_are_scaled_before_they_travel_only_when_that_pays() -> None:
    assert choose_resizer(1080 * 1920, 288 * 512) is ResizedBy.ENCODER
    assert choose_resizer(2160 * 3840, 288 * 512) is ResizedBy.GATEWAY
    assert choose_resizer(16 * 100, 100) is ResizedBy.ENCODER
    assert choose_resizer(16 * 100 + 1, 100) is ResizedBy.GATEWAY


def test_frames_shape_follows_who_resizes() -> None:
    assert video(90, 30, height=480, width=640).frames_shape == (8, 480, 640, 3)
    large = video(90, 30, height=2160, width=3840, max_pixels=65536)
    assert large.frame_dtype == "float32"
    assert large.frames_shape == (8, large.target_height, large.target_width, 3)


@pytest.mark.parametrize("num_sound_samples", [None, 265_600])
def test_plans_survive_json(num_sound_samples: int | None) -> None:
    plan = video(300, 30, sound_samples=num_sound_samples)
    planned = PlannedMedia(Modality.VIDEO, plan, "mp4", 1000, "00" * 32, "11" * 32, None)
    assert PlannedMedia.from_json(planned.to_json()) == planned
    assert json.loads(planned.to_json())["plan"]["resized_by"] == "encoder"
    image = PlannedMedia(
        Modality.IMAGE, plan_image(10, 20, 1, options(), CONFIG), "png", 9, "22" * 32
    )
    assert PlannedMedia.from_json(image.to_json()) == image


def video(
    num_frames: int,
    rate: float,
    *,
    height: int = 64,
    width: int = 96,
    sound_samples: int | None = None,
    **given: Any,
) -> VideoPlan:
    return plan_video(
        stream_index=0,
        height=height,
        width=width,
        orientation=1,
        num_frames=num_frames,
        frame_rate=rate,
        sound=None if sound_samples is None else sound(sound_samples),
        options=options(**given),
        config=CONFIG,
    )


def sound(num_samples: int) -> AudioPlan:
    return plan_audio(
        stream_index=0,
        source_rate=24000,
        source_channels=1,
        num_source_samples=num_samples,
        config=CONFIG,
    )
