"""Everything between a medium's content and an encoder's input, as far as it decides a bit.

Part of every embedding's key, so that another size, sampling or place of resizing is another entry.
"""

import math
from collections.abc import Mapping

from gateway.items import AudioPlan, ImagePlan, Plan, ResizedBy, VideoPlan
from gateway.media.processor import MEL_HOP_LENGTH, ProcessorConfig
from mimo.store.keys import preprocessing_fingerprint


def fingerprint(plan: Plan, config: ProcessorConfig) -> str:
    """SHA-256 in hex of every parameter. The sound of a video has an ``AudioPlan`` of its own."""
    return preprocessing_fingerprint(_parameters(plan, config))


def work(plan: Plan) -> float:
    """What an encoder has to do, in its unit: patches, or seconds of sound."""
    if isinstance(plan, AudioPlan):
        return plan.duration_s
    return float(math.prod(plan.grid_thw))


def _parameters(plan: Plan, config: ProcessorConfig) -> Mapping[str, object]:
    match plan:
        case AudioPlan():
            return {
                "mix": "mean",
                "sample_rate": plan.sample_rate,
                "num_samples": plan.num_samples,
                "hop_length": MEL_HOP_LENGTH,
                "group_size": config.audio_group_size,
            }
        case ImagePlan():
            return {**_pixels(plan, config), "resized_by": ResizedBy.ENCODER.value}
        case VideoPlan():
            return {
                **_pixels(plan, config),
                "resized_by": plan.resized_by.value,
                "num_frames": len(plan.frame_indices),
            }


def _pixels(plan: ImagePlan | VideoPlan, config: ProcessorConfig) -> dict[str, object]:
    return {
        "target": [plan.target_height, plan.target_width],
        "grid_thw": list(plan.grid_thw),
        "patch_size": config.patch_size,
        "merge_size": config.merge_size,
        "temporal_patch_size": config.temporal_patch_size,
    }
