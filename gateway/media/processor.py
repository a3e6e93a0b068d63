"""How the served checkpoint wants media prepared: its ``processor_config`` with the defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.items import MediaTokenIds
from mimo.errors import CheckpointError

MEL_HOP_LENGTH = 240  # samples between mel frames
MEL_FRAMES_PER_CODE = 4  # two strides of 2: the convolution stem, then the pooler

_TOKEN_KEYS = {
    "image_pad": "image_token_id",
    "video_pad": "video_token_id",
    "audio_pad": "audio_token_id",
    "vision_start": "vision_start_token_id",
    "vision_end": "vision_end_token_id",
    "video_start": "video_start_token_id",
    "video_end": "video_end_token_id",
    "audio_start": "audio_start_token_id",
    "audio_end": "audio_end_token_id",
}


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """Field names are the checkpoint's. A missing, null or zero value takes its default."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    temporal_compression_ratio: int
    image_min_pixels: int
    image_max_pixels: int
    video_min_pixels: int
    video_max_pixels: int
    video_total_max_pixels: int
    fps: float
    num_frames: int | None
    min_frames: int
    max_frames: int
    video_audio_interleave_length: float
    audio_sampling_rate: int
    audio_group_size: int
    token_ids: MediaTokenIds

    @property
    def unit(self) -> int:
        """Side of the square of pixels behind one token."""
        return self.patch_size * self.merge_size

    @property
    def frames_per_grid(self) -> int:
        """Sampled frames that share a temporal grid."""
        return self.temporal_patch_size * self.temporal_compression_ratio

    @property
    def audio_tokens_per_second(self) -> float:
        """Embeddings per second of sound (6.25 for every known checkpoint)."""
        codes = self.audio_sampling_rate / MEL_HOP_LENGTH / MEL_FRAMES_PER_CODE
        return codes / self.audio_group_size

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> "ProcessorConfig":
        """Read the parsed ``config.json`` of a multimodal checkpoint.

        Raises CheckpointError when a media token id is missing or a setting is one that this
        version does not implement.
        """
        processor = config.get("processor_config")
        if not isinstance(processor, Mapping):
            raise CheckpointError("config.json has no processor_config: the model takes no media")

        def value(name: str, default: Any) -> Any:
            return processor.get(name) or default

        patch_size, merge_size = int(value("patch_size", 16)), int(value("merge_size", 2))
        unit_area = (patch_size * merge_size) ** 2
        parsed = cls(
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=int(value("temporal_patch_size", 2)),
            temporal_compression_ratio=int(value("temporal_compression_ratio", 1)),
            image_min_pixels=int(value("image_min_pixels", 4 * unit_area)),
            image_max_pixels=int(value("image_max_pixels", 4096 * unit_area)),
            video_min_pixels=int(value("video_min_pixels", 4 * unit_area)),
            video_max_pixels=int(value("video_max_pixels", 4096 * unit_area)),
            video_total_max_pixels=int(value("video_total_max_pixels", 16384 * unit_area)),
            fps=float(value("fps", 2.0)),
            num_frames=int(value("num_frames", 0)) or None,
            min_frames=int(value("min_frames", 8)),
            max_frames=int(value("max_frames", 256)),
            video_audio_interleave_length=float(value("video_audio_interleave_length", 0.0)),
            audio_sampling_rate=int(value("audio_sampling_rate", 24000)),
            audio_group_size=int(value("audio_group_size", 4)),
            token_ids=_token_ids(config, processor),
        )
        _refuse_unknown(parsed, processor)
        return parsed


def _token_ids(config: Mapping[str, Any], processor: Mapping[str, Any]) -> MediaTokenIds:
    """The ids stand in either object, depending on the checkpoint."""
    ids: dict[str, int] = {}
    for field, key in _TOKEN_KEYS.items():
        found = processor.get(key, config.get(key))
        if found is None:
            raise CheckpointError(f"config.json names no {key}, neither in processor_config")
        ids[field] = int(found)
    return MediaTokenIds(**ids)


def _refuse_unknown(parsed: ProcessorConfig, processor: Mapping[str, Any]) -> None:
    """Settings that would silently change prompts or lengths."""
    if processor.get("use_video_timestamps") is False:
        raise CheckpointError("processor_config.use_video_timestamps false is not supported")
    if processor.get("use_per_grid_t_timestamps"):
        raise CheckpointError("processor_config.use_per_grid_t_timestamps true is not supported")
    if processor.get("rope_type") not in (None, "rope"):
        raise CheckpointError(
            f"processor_config.rope_type {processor['rope_type']!r} is not supported; only 'rope'"
        )
    rate = processor.get("audio_input_id_per_second")
    codes = parsed.audio_sampling_rate / MEL_HOP_LENGTH / MEL_FRAMES_PER_CODE
    if rate and float(rate) != codes:
        raise CheckpointError(
            f"processor_config.audio_input_id_per_second is {rate}, "
            f"but {parsed.audio_sampling_rate} Hz gives {codes:g}"
        )
