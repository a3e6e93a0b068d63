"""A manifest that is read is the manifest that was written, or it is refused."""

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.store.keys import EmbeddingKey
from mimo.store.manifest import CHUNK_BYTES, Damaged, Manifest, seal, unseal
from mimo.tensor import RawTensor, crc32c

KEY = EmbeddingKey("ab" * 32)
OTHER = EmbeddingKey("cd" * 32)


def manifest_of(num_tokens: int = 3, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    tensor = RawTensor("bfloat16", (num_tokens, 4), bytes(range(8)) * num_tokens)
    return Manifest.describe(
        KEY, tensor, encoder_fingerprint="e0", encode_ms=12.3456, chunk_bytes=chunk_bytes
    )


def test_a_manifest_survives_the_store() -> None:
    manifest = manifest_of()
    again = Manifest.decode(KEY, manifest.encoded)
    assert again == manifest
    assert again.digest == manifest.digest == hashlib.sha256(manifest.encoded).digest()
    assert (again.num_tokens, again.num_bytes, again.encode_ms) == (3, 24, 12.346)


def test_chunks_are_described_in_order() -> None:
    manifest = manifest_of(num_tokens=3, chunk_bytes=10)
    data = bytes(range(8)) * 3
    assert manifest.checksums == (crc32c(data[:10]), crc32c(data[10:20]), crc32c(data[20:]))


def test_an_embedding_without_tokens_has_one_empty_chunk() -> None:
    assert manifest_of(num_tokens=0).num_chunks == 1


def test_two_writers_never_share_a_name() -> None:
    assert manifest_of().writer != manifest_of().writer


def test_every_flipped_bit_is_detected() -> None:
    encoded = manifest_of().encoded
    for position in range(len(encoded)):
        for bit in range(8):
            damaged = bytearray(encoded)
            damaged[position] ^= 1 << bit
            with pytest.raises(Damaged):
                Manifest.decode(KEY, bytes(damaged))


def test_every_truncation_is_detected() -> None:
    encoded = manifest_of().encoded
    for length in range(len(encoded)):
        with pytest.raises(Damaged):
            Manifest.decode(KEY, encoded[:length])


def test_a_manifest_under_another_key_is_refused() -> None:
    with pytest.raises(Damaged, match="another key"):
        Manifest.decode(OTHER, manifest_of().encoded)


def test_any_field_changes_the_digest() -> None:
    manifest = manifest_of()
    others = [
        dataclasses.replace(manifest, **change)
        for change in (
            {"key": OTHER},
            {"dtype": "float16"},
            {"shape": (4, 3)},
            {"chunk_bytes": 7},
            {"checksums": (1,)},
            {"encoder_fingerprint": "e1"},
            {"writer": "w"},
            {"encode_ms": 1.0},
        )
    ]
    assert len({each.digest for each in (manifest, *others)}) == 9


@given(st.binary(max_size=64))
def test_sealing_is_undone_by_unsealing(body: bytes) -> None:
    assert unseal(seal(body)) == body
