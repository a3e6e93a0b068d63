"""What media, prompt and pipeline hand each other: parts as the client sent them, and their plans.

A plan is everything that can be known about a medium without its pixels or samples: sizes, frames,
times and token counts. It decides the prompt, and it is checked against what is decoded later.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mimo.store.keys import Modality as Modality
from mimo.tensor import RawTensor


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How a client wants its media to become tokens. None takes the model's default.

    ``fps`` and ``num_frames`` exclude each other. ``use_audio_track`` None uses a video's sound if
    there is any; True also makes a broken sound track an error.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    total_max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    use_audio_track: bool | None = None
    exif: bool = True  # turn pictures as their EXIF orientation says


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """An http, https, data or ``media:`` URL, as the client spelled it."""

    url: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A medium in a message. ``modality`` None leaves it to the content."""

    modality: Modality | None
    source: bytes | MediaUrl
    options: MediaOptions = MediaOptions()


@dataclass(frozen=True, slots=True)
class MediaTokenIds:
    """The control tokens around and under embeddings."""

    image_pad: int
    video_pad: int
    audio_pad: int
    vision_start: int
    vision_end: int
    video_start: int
    video_end: int
    audio_start: int
    audio_end: int


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """One picture. Source sizes are in pixels after turning it by ``orientation`` (EXIF, 1..8)."""

    source_height: int
    source_width: int
    target_height: int
    target_width: int
    orientation: int
    grid_thw: tuple[int, int, int]  # patches along time, height, width
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AudioPlan:
    """One clip, or the sound track of a video, as mono samples at ``sample_rate``."""

    stream_index: int
    source_rate: int
    source_channels: int
    sample_rate: int
    num_samples: int  # at sample_rate, the shortest clips zero-padded
    num_mel_frames: int
    num_tokens: int

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.sample_rate


class ResizedBy(StrEnum):
    """Who scales a video's frames to the target size; part of the preprocessing fingerprint."""

    ENCODER = "encoder"  # frames travel as uint8 at source size
    GATEWAY = "gateway"  # frames travel as float32 at target size


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """One video: ``frame_indices`` at ``timestamps`` become ``grid_thw`` patches.

    Two frames share a temporal grid; an odd last frame counts twice (``frame_indices`` does not
    repeat it). A grid has ``tokens_per_grid`` tokens and a label. Grids come in groups
    (first, stop): in the prompt a group is the label of its first grid, the tokens of all its
    grids, then the group's sound. ``sound_segments`` holds (first embedding, count) of ``sound``
    for each grid, counts may be 0; it is empty for a silent video.
    """

    stream_index: int
    source_height: int
    source_width: int
    target_height: int
    target_width: int
    orientation: int  # as in EXIF, 1..8; sizes are after turning
    num_source_frames: int
    frame_indices: tuple[int, ...]
    timestamps: tuple[float, ...]  # seconds, float32 values
    grid_thw: tuple[int, int, int]
    tokens_per_grid: int
    labels: tuple[str, ...]  # "MM:SS" of each grid
    groups: tuple[tuple[int, int], ...]
    resized_by: ResizedBy
    sound: AudioPlan | None
    sound_segments: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """Embeddings of the pictures, without the sound."""
        return self.grid_thw[0] * self.tokens_per_grid

    @property
    def num_sound_tokens(self) -> int:
        """Embeddings of the sound that the prompt uses."""
        return sum(count for _, count in self.sound_segments)

    @property
    def frame_dtype(self) -> str:
        return "float32" if self.resized_by is ResizedBy.GATEWAY else "uint8"

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """Shape of the frames on the wire."""
        if self.resized_by is ResizedBy.GATEWAY:
            return len(self.frame_indices), self.target_height, self.target_width, 3
        return len(self.frame_indices), self.source_height, self.source_width, 3


Plan = ImagePlan | AudioPlan | VideoPlan


@dataclass(frozen=True, slots=True)
class PlannedMedia:
    """A medium after planning. Digests are SHA-256 in hex.

    ``source_digest`` names the file, ``content_digest`` what it shows: for audio and video it is
    known at once, for an image only after decoding (``DecodedImage.content_digest``).
    """

    modality: Modality
    plan: Plan
    format: str
    num_source_bytes: int
    source_digest: str
    content_digest: str | None = None
    sound_digest: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "PlannedMedia":
        """Inverse of ``to_json``. Raises ValueError, TypeError or KeyError for anything else."""
        fields: dict[str, Any] = json.loads(text)
        modality = Modality(fields.pop("modality"))
        plan: dict[str, Any] = fields.pop("plan")
        return cls(modality=modality, plan=_PLAN_READERS[modality](plan), **fields)


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A picture's pixels: uint8 RGB [source_height, source_width, 3], turned, on white."""

    pixels: RawTensor
    content_digest: str


def _read_image(fields: dict[str, Any]) -> ImagePlan:
    return ImagePlan(**_tupled(fields))


def _read_audio(fields: dict[str, Any]) -> AudioPlan:
    return AudioPlan(**fields)


def _read_video(fields: dict[str, Any]) -> VideoPlan:
    sound = fields.pop("sound")
    resized_by = ResizedBy(fields.pop("resized_by"))
    return VideoPlan(
        **_tupled(fields), resized_by=resized_by, sound=_read_audio(sound) if sound else None
    )


_PLAN_READERS: dict[Modality, Callable[[dict[str, Any]], Plan]] = {
    Modality.IMAGE: _read_image,
    Modality.AUDIO: _read_audio,
    Modality.VIDEO: _read_video,
}


def _tupled(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where plans have tuples, at most two deep."""
    return {
        name: _tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }


def _tuple(values: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)
