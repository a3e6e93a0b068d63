"""The one definition of what names an embedding: the content address ``ek1``.

A key is the SHA-256 of everything that can change a bit of the embedding, plus the tenant's salt.
Fields are framed by their length, so no two different lists of fields share bytes; digests are
never truncated. Content is what a decoder produced, not the file: two files with equal pixels
share a key, and the same file under two plans does not.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

from mimo.errors import InvalidRequest

EmbeddingKey = NewType("EmbeddingKey", str)  # 64 lower-case hex digits

_KEY = re.compile(r"[0-9a-f]{64}")


class Modality(StrEnum):
    """Part of every key: the sound track of a video is AUDIO, its frames are VIDEO."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


def parse_key(text: str) -> EmbeddingKey:
    """Check a key that came over the wire. Raises InvalidRequest."""
    if not _KEY.fullmatch(text):
        raise InvalidRequest("an embedding key is 64 lower-case hex digits", field="key")
    return EmbeddingKey(text)


def embedding_key(
    modality: Modality,
    content_digest: str,
    preprocessing_fingerprint: str,
    encoder_fingerprint: str,
    tenant_salt: bytes = b"",
) -> EmbeddingKey:
    """The content address of one embedding.

    ``encoder_fingerprint`` covers weights, configuration, numeric profile, numerics version,
    compute dtype and device type. Tenants with different salts never share an entry.
    """
    fields = (
        modality.encode(),
        content_digest.encode(),
        preprocessing_fingerprint.encode(),
        encoder_fingerprint.encode(),
        tenant_salt,
    )
    return EmbeddingKey(_framed("ek1", *fields).hexdigest())


def preprocessing_fingerprint(parameters: Mapping[str, object]) -> str:
    """SHA-256 of the canonical JSON of every parameter and numeric switch of preprocessing."""
    return hashlib.sha256(canonical_json(parameters)).hexdigest()


def content_digest_image(rgb: npt.NDArray[np.uint8]) -> str:
    """Digest of an oriented, composited picture. rgb: [height, width, 3] uint8."""
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
        raise ValueError(f"expected uint8 [height, width, 3], got {rgb.dtype} {list(rgb.shape)}")
    digest = _framed("image", _integers(rgb.shape))
    digest.update(np.ascontiguousarray(rgb).data)
    return digest.hexdigest()


class AudioDigest:
    """Digest of a sound as decoded, before mixing and resampling, fed piece by piece.

    How the samples are cut into pieces does not matter; rate, channels and sample type do.
    """

    def __init__(self, sample_rate: int, channels: int, dtype: str = "float32") -> None:
        self._channels = channels
        self._dtype = np.dtype(dtype).newbyteorder("<")
        header = (_integers((sample_rate, channels)), self._dtype.str.encode())
        self._digest = _framed("audio", *header)

    def update(self, samples: npt.NDArray[np.generic]) -> None:
        """Take the next samples: [N, channels]."""
        if samples.dtype != self._dtype or samples.shape != (len(samples), self._channels):
            raise ValueError(f"unexpected samples: {samples.dtype} {list(samples.shape)}")
        self._digest.update(np.ascontiguousarray(samples).data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def content_digest_video(
    source_digest: str,
    stream_index: int,
    frame_indices: Sequence[int],
    timestamps: Sequence[float],
    rotation: int,
    decoder_version: str,
) -> str:
    """Digest of frames, or of a sound track, that are chosen but not yet decoded.

    It names the source and the choice instead of the pixels, so that planning needs no decoding
    and memory stays bounded by a frame. ``source_digest`` is the SHA-256 of the file.
    """
    if not all(math.isfinite(time) for time in timestamps):
        raise ValueError("timestamps must be finite")
    fields = (
        source_digest.encode(),
        _integers((stream_index, rotation)),
        _integers(frame_indices),
        struct.pack(f"<{len(timestamps)}d", *timestamps),
        decoder_version.encode(),
    )
    return _framed("video", *fields).hexdigest()


def alias_key(
    tenant_salt: bytes,
    source_digest: str,
    planning_options: Mapping[str, object],
    planner_version: str,
    decoder_version: str,
) -> str:
    """Name of the cached media plan of a file: 64 hex digits, in a namespace of its own.

    It holds no encoder fingerprint, so a plan outlives the roll-out of another encoder.
    """
    fields = (
        tenant_salt,
        source_digest.encode(),
        canonical_json(planning_options),
        planner_version.encode(),
        decoder_version.encode(),
    )
    return _framed("alias", *fields).hexdigest()


def canonical_json(value: object) -> bytes:
    """The only JSON text of a value: sorted keys, no spaces, ASCII. Raises TypeError, ValueError.

    JSON would quietly turn the key 1 into "1" and has no word for NaN; both are refused.
    """
    _require_string_keys(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _require_string_keys(value: object) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise TypeError(f"canonical JSON needs string keys, got {name!r}")
            _require_string_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_string_keys(inner)


def _framed(domain: str, *fields: bytes) -> "hashlib._Hash":
    """SHA-256 over the domain and the fields, each preceded by its length in 8 bytes.

    A caller may append one more field of any length without a frame: the last one needs none.
    """
    digest = hashlib.sha256()
    for field in (domain.encode(), *fields):
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest


def _integers(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
