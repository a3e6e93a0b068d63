"""What the store knows about an entry. It is committed last, so its presence means "complete".

Stored bytes are sealed: a CRC-32C over canonical JSON. A manifest names its key, so that one which
ended up under another key is refused as surely as one with a flipped bit.
"""

import hashlib
import json
import secrets
from dataclasses import dataclass
from functools import cached_property

from mimo.store.keys import EmbeddingKey, canonical_json
from mimo.tensor import RawTensor, crc32c, num_bytes, split

# 256 KiB would fall into the allocator's next size class and waste a quarter of the memory.
CHUNK_BYTES = 262_128

_VERSION = 1
_SEAL_BYTES = 4


class Damaged(ValueError):
    """Stored bytes do not carry the checksum they were sealed with, or belong elsewhere."""


@dataclass(frozen=True)
class Manifest:
    """Description of one embedding [num_tokens, D] and of the chunks that hold it."""

    key: EmbeddingKey
    dtype: str
    shape: tuple[int, ...]
    chunk_bytes: int
    checksums: tuple[int, ...]  # CRC-32C of each chunk
    encoder_fingerprint: str
    writer: str  # part of the chunks' names: two writers never share a chunk
    encode_ms: float

    @classmethod
    def describe(
        cls,
        key: EmbeddingKey,
        tensor: RawTensor,
        *,
        encoder_fingerprint: str,
        encode_ms: float,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> "Manifest":
        """The manifest of a tensor that was just encoded, with a fresh writer."""
        return cls(
            key=key,
            dtype=tensor.dtype,
            shape=tensor.shape,
            chunk_bytes=chunk_bytes,
            checksums=tuple(chunk.crc32c for chunk in split(tensor, chunk_bytes)),
            encoder_fingerprint=encoder_fingerprint,
            writer=secrets.token_hex(8),
            encode_ms=round(encode_ms, 3),
        )

    @classmethod
    def decode(cls, key: EmbeddingKey, data: bytes) -> "Manifest":
        """Read the manifest stored under ``key``. Raises Damaged."""
        try:
            fields = json.loads(unseal(data))
        except ValueError as error:
            raise Damaged(f"manifest of {key} is damaged: {error}") from error
        if fields["version"] != _VERSION or fields["key"] != key:
            raise Damaged(f"manifest under {key} belongs to another key or version")
        return cls(
            key=key,
            dtype=fields["dtype"],
            shape=tuple(fields["shape"]),
            chunk_bytes=fields["chunk_bytes"],
            checksums=tuple(fields["crc32c"]),
            encoder_fingerprint=fields["encoder_fingerprint"],
            writer=fields["writer"],
            encode_ms=fields["encode_ms"],
        )

    @cached_property
    def encoded(self) -> bytes:
        """The bytes that are stored; ``decode`` reads them."""
        fields = {
            "version": _VERSION,
            "key": self.key,
            "dtype": self.dtype,
            "shape": self.shape,
            "chunk_bytes": self.chunk_bytes,
            "crc32c": self.checksums,
            "encoder_fingerprint": self.encoder_fingerprint,
            "writer": self.writer,
            "encode_ms": self.encode_ms,
        }
        return seal(canonical_json(fields))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the stored bytes: names this very entry, not just its key."""
        return hashlib.sha256(self.encoded).digest()

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)

    @property
    def num_chunks(self) -> int:
        return len(self.checksums)


def seal(body: bytes) -> bytes:
    """Prefix a body with its CRC-32C."""
    return crc32c(body).to_bytes(_SEAL_BYTES, "big") + body


def unseal(data: bytes) -> bytes:
    """The body of sealed bytes. Raises Damaged."""
    body = data[_SEAL_BYTES:]
    if len(data) < _SEAL_BYTES or crc32c(body) != int.from_bytes(data[:_SEAL_BYTES], "big"):
        raise Damaged("checksum differs")
    return body
