"""What a decoding worker reports about a file: the input of planning.

Reports come from a process that has read hostile bytes, so they are plain JSON and every field is
checked on arrival.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mimo.errors import Internal


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Size in pixels as stored; ``orientation`` (EXIF, 1..8) says how to turn it."""

    height: int
    width: int
    orientation: int


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """A sound track, counted by decoding it. Headers lie about lengths."""

    stream_index: int
    sample_rate: int
    channels: int
    num_samples: int  # per channel
    content_digest: str


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """A picture track, its frames counted by reading every packet. ``sound`` None is silence."""

    stream_index: int
    height: int
    width: int
    orientation: int
    num_frames: int
    frame_rate: float
    sound: AudioFacts | None


Facts = ImageFacts | AudioFacts | VideoFacts


def facts_from_json(fields: Mapping[str, Any]) -> Facts:
    """Rebuild facts from ``{"kind": ..., **fields}``. Raises Internal for anything unexpected."""
    try:
        return _READERS[fields["kind"]](fields)
    except (KeyError, TypeError, ValueError) as error:
        raise Internal("a media worker sent a malformed report") from error


def _image(fields: Mapping[str, Any]) -> ImageFacts:
    return ImageFacts(
        height=_positive(fields["height"]),
        width=_positive(fields["width"]),
        orientation=_orientation(fields["orientation"]),
    )


def _audio(fields: Mapping[str, Any]) -> AudioFacts:
    digest = fields["content_digest"]
    if not isinstance(digest, str) or len(bytes.fromhex(digest)) != 32:
        raise ValueError(digest)
    return AudioFacts(
        stream_index=_natural(fields["stream_index"]),
        sample_rate=_positive(fields["sample_rate"]),
        channels=_positive(fields["channels"]),
        num_samples=_positive(fields["num_samples"]),
        content_digest=digest,
    )


def _video(fields: Mapping[str, Any]) -> VideoFacts:
    frame_rate = float(fields["frame_rate"])
    if not 0 < frame_rate < 1e6:
        raise ValueError(frame_rate)
    sound = fields["sound"]
    return VideoFacts(
        stream_index=_natural(fields["stream_index"]),
        height=_positive(fields["height"]),
        width=_positive(fields["width"]),
        orientation=_orientation(fields["orientation"]),
        num_frames=_positive(fields["num_frames"]),
        frame_rate=frame_rate,
        sound=None if sound is None else _audio(sound),
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], Facts]] = {
    "image": _image,
    "audio": _audio,
    "video": _video,
}


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _positive(value: Any) -> int:
    if _natural(value) == 0:
        raise ValueError(value)
    return int(value)


def _orientation(value: Any) -> int:
    if not 1 <= _natural(value) <= 8:
        raise ValueError(value)
    return int(value)
