"""Which frames of a video are used, how large, and how its sound is dealt out among them."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.items import AudioPlan, MediaOptions, ResizedBy, VideoPlan
from gateway.media.plan.image import PixelBudget, requested_budget, smart_resize
from gateway.media.processor import ProcessorConfig
from mimo.errors import InvalidRequest, Reason

# Frames are scaled before they travel only when that saves this much of the upload.
RESIZE_GAIN = 4

_UINT8_BYTES, _FLOAT32_BYTES = 1, 4


@dataclass(frozen=True, slots=True)
class Sampling:
    """The frames taken from a video, with their times in seconds (float32 values)."""

    frame_indices: tuple[int, ...]
    timestamps: tuple[float, ...]

    @property
    def end(self) -> float:
        """When the last frame gives way, taking the first interval for the last."""
        times = np.asarray(self.timestamps, np.float32)
        interval = float(times[1] - times[0]) if len(times) > 1 else 1.0
        return float(times[-1] + np.float32(interval or 1.0))


def plan_video(
    *,
    stream_index: int,
    height: int,
    width: int,
    orientation: int,
    num_frames: int,
    frame_rate: float,
    sound: AudioPlan | None,
    options: MediaOptions,
    config: ProcessorConfig,
) -> VideoPlan:
    """Plan a video of ``num_frames`` frames of ``height`` x ``width`` before turning them."""
    if orientation >= 5:  # the turned ones
        height, width = width, height
    sampling = sample_frames(num_frames, frame_rate, options, config)
    budget = frame_budget(len(sampling.frame_indices), options, config)
    target_height, target_width = smart_resize(height, width, config.unit, budget)
    grid_thw = (
        -(-len(sampling.frame_indices) // config.frames_per_grid),
        target_height // config.patch_size,
        target_width // config.patch_size,
    )
    grid_times = sampling.timestamps[:: config.frames_per_grid]
    if sound is None:
        segments: tuple[tuple[int, int], ...] = ()
        groups = tuple((grid, grid + 1) for grid in range(grid_thw[0]))
    else:
        segments = sound_segments(grid_times, sampling.end, sound.num_tokens, config)
        groups = group_grids(grid_times, config.video_audio_interleave_length)
    return VideoPlan(
        stream_index=stream_index,
        source_height=height,
        source_width=width,
        target_height=target_height,
        target_width=target_width,
        orientation=orientation,
        num_source_frames=num_frames,
        frame_indices=sampling.frame_indices,
        timestamps=sampling.timestamps,
        grid_thw=grid_thw,
        tokens_per_grid=grid_thw[1] * grid_thw[2] // config.merge_size**2,
        labels=tuple(label(time) for time in grid_times),
        groups=groups,
        resized_by=choose_resizer(height * width, target_height * target_width),
        sound=sound,
        sound_segments=segments,
    )


def sample_frames(
    num_frames: int, frame_rate: float, options: MediaOptions, config: ProcessorConfig
) -> Sampling:
    """Spread the sampled frames evenly over the whole video, both ends included.

    A video of one frame gives that frame. Times are index / rate, whatever the container says.
    """
    if num_frames == 1:
        return Sampling((0,), (0.0,))
    count = _sample_count(num_frames, frame_rate, options, config)
    indices = np.linspace(0, num_frames - 1, count).astype(np.int64)
    timestamps = indices.astype(np.float32) / np.float32(frame_rate)
    return Sampling(tuple(indices.tolist()), tuple(timestamps.tolist()))


def _sample_count(
    num_frames: int, frame_rate: float, options: MediaOptions, config: ProcessorConfig
) -> int:
    factor = config.frames_per_grid
    highest = min(options.max_frames or config.max_frames, config.max_frames) // factor * factor
    if highest < factor:
        raise InvalidRequest(
            f"max_frames must be at least {factor}, the frames of one temporal grid",
            reason=Reason.INVALID_VALUE,
        )
    wanted = options.num_frames
    if wanted is None and options.fps is None:
        wanted = config.num_frames
    if wanted is not None:
        count: float = min(max(round(wanted / factor) * factor, factor), highest)
    else:
        lowest = math.ceil((options.min_frames or config.min_frames) / factor) * factor
        count = num_frames / frame_rate * (options.fps or config.fps)
        count = min(max(count, lowest), highest)
    count = math.floor(min(count, num_frames) / factor) * factor
    # Shorter than one temporal grid: every frame there is.
    return int(count) or num_frames


def frame_budget(num_sampled: int, options: MediaOptions, config: ProcessorConfig) -> PixelBudget:
    """The area one frame may have so that the whole video stays within its budget."""
    budget = requested_budget(options, config.video_min_pixels, config.video_max_pixels, config)
    total = config.video_total_max_pixels
    if options.total_max_pixels is not None:
        total = min(options.total_max_pixels, total)
    share = total * config.frames_per_grid // num_sampled
    return PixelBudget(budget.min_pixels, max(budget.min_pixels, min(share, budget.max_pixels)))


def label(time: float) -> str:
    """A grid's time as the prompt spells it: MM:SS, truncated, minutes without an upper bound."""
    seconds = np.float32(time)
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def sound_segments(
    grid_times: Sequence[float], end: float, num_sound_tokens: int, config: ProcessorConfig
) -> tuple[tuple[int, int], ...]:
    """(first embedding, count) of the sound that plays during each grid.

    A sound shorter than the picture leaves the last counts at 0; a longer one is cut off.
    """
    rate = np.float32(config.audio_tokens_per_second)
    borders = [int(np.float32(time) * rate) for time in (*grid_times, end)]
    return tuple(
        (start, max(0, min(stop, num_sound_tokens) - start))
        for start, stop in itertools.pairwise(borders)
    )


def group_grids(grid_times: Sequence[float], interleave: float) -> tuple[tuple[int, int], ...]:
    """Runs of grids between two runs of sound: each grid alone for 0, all together for -1, else
    those within the same ``interleave`` seconds."""
    if interleave < 0:
        return ((0, len(grid_times)),)
    if interleave == 0:
        return tuple((grid, grid + 1) for grid in range(len(grid_times)))
    groups = []
    start = 0
    for _, run in itertools.groupby(grid_times, lambda time: int(time // interleave)):
        stop = start + len(list(run))
        groups.append((start, stop))
        start = stop
    return tuple(groups)


def choose_resizer(source_area: int, target_area: int) -> ResizedBy:
    """The gateway scales frames down only when their pixels outweigh the scaled floats by far."""
    if source_area * _UINT8_BYTES > RESIZE_GAIN * target_area * _FLOAT32_BYTES:
        return ResizedBy.GATEWAY
    return ResizedBy.ENCODER
