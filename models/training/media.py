"""Synthetic media through the gateway's plans and the encoders' own preprocessing."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gateway.items import AudioPlan, ImagePlan, MediaOptions, VideoPlan
from gateway.media.plan.audio import plan_audio
from gateway.media.plan.image import plan_image
from gateway.media.plan.video import plan_video
from gateway.media.processor import ProcessorConfig
from models.training.corpus import Facts
from models.training.synth.sound import SAMPLE_RATE
from services.vision.config import VisionTowerConfig
from services.vision.plan import VisionPlan
from services.vision.preprocess import Preprocessor

Frames = NDArray[np.uint8]  # [height, width, 3] or [frames, height, width, 3]


def picture_plan(pixels_shape: tuple[int, ...], processor: ProcessorConfig) -> ImagePlan:
    height, width = pixels_shape[-3:-1]
    return plan_image(height, width, 1, MediaOptions(), processor)


def sound_plan(num_samples: int, processor: ProcessorConfig) -> AudioPlan:
    return plan_audio(
        stream_index=0,
        source_rate=SAMPLE_RATE,
        source_channels=1,
        num_source_samples=num_samples,
        config=processor,
    )


def video_plan(
    frames_shape: tuple[int, ...], facts: Facts, sound: AudioPlan | None, processor: ProcessorConfig
) -> VideoPlan:
    """Plan of a stored clip, whose frames are those that the processor takes."""
    return plan_video(
        stream_index=0,
        height=frames_shape[1],
        width=frames_shape[2],
        orientation=1,
        num_frames=facts["num_frames"],
        frame_rate=facts["rate"],
        sound=replace(sound, stream_index=1) if sound else None,
        options=MediaOptions(),
        config=processor,
    )


@dataclass(frozen=True, slots=True)
class Patches:
    """An item as the tower takes it. values: [P, patch dim], grid: (t, h, w)."""

    values: Tensor
    grid: tuple[int, int, int]


class Patcher:
    """Pixels to patches, as the vision service makes them."""

    def __init__(self, config: VisionTowerConfig) -> None:
        self._preprocessor = Preprocessor(config, "cpu")

    def __call__(self, frames: Frames, plan: ImagePlan | VideoPlan) -> Patches:
        frames = frames[None] if frames.ndim == 3 else frames
        pixels = torch.from_numpy(frames.copy())  # the mapped file is not writable
        sizes = VisionPlan(
            num_frames=len(frames),
            source_height=plan.source_height,
            source_width=plan.source_width,
            target_height=plan.target_height,
            target_width=plan.target_width,
            grid_thw=plan.grid_thw,
        )
        return Patches(self._preprocessor(pixels, sizes), plan.grid_thw)


def waveform(samples: NDArray[np.int16]) -> Tensor:
    """Samples as the gateway decodes a 16-bit wave file. -> [samples] float32."""
    return torch.from_numpy(samples.astype(np.float32) / 32_768)
