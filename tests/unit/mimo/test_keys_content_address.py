"""Nothing that changes an embedding may leave its key as it was."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.errors import InvalidRequest
from mimo.store import keys
from mimo.store.keys import AudioDigest, Modality

FIELDS: dict[str, Any] = {
    "modality": Modality.IMAGE,
    "content_digest": "c0" * 32,
    "preprocessing_fingerprint": "f0" * 32,
    "encoder_fingerprint": "e0" * 32,
    "tenant_salt": b"tenant",
}
KNOWN_KEY = "00883d1d26e5da9529f8b8fc74644f15e267d7d6f0be6e8362a752f8a1e7660a"
VIDEO: dict[str, Any] = {
    "source_digest": "5c" * 32,
    "stream_index": 0,
    "frame_indices": (0, 5, 10),
    "timestamps": (0.0, 0.5, 1.0),
    "rotation": 0,
    "decoder_version": "av-17",
}


def audio_digest(samples: np.ndarray, rate: int = 16_000) -> str:
    digest = AudioDigest(rate, samples.shape[1], samples.dtype.name)
    digest.update(samples)
    return digest.hexdigest()


def test_the_key_of_known_fields_never_changes() -> None:
    # sha256 over 8-byte little-endian lengths and bytes: "ek1" and the five fields.
    assert keys.embedding_key(**FIELDS) == KNOWN_KEY


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("modality", Modality.VIDEO),
        ("content_digest", "c1" + "c0" * 31),
        ("preprocessing_fingerprint", "f1" + "f0" * 31),
        ("encoder_fingerprint", "e1" + "e0" * 31),
        ("tenant_salt", b"other"),
    ],
)
def test_each_field_alone_changes_the_key(field: str, other: object) -> None:
    assert keys.embedding_key(**FIELDS) != keys.embedding_key(**{**FIELDS, field: other})


def test_a_byte_may_not_wander_from_one_field_to_the_next() -> None:
    moved = {**FIELDS, "encoder_fingerprint": "e0" * 32 + "t", "tenant_salt": b"enant"}
    assert keys.embedding_key(**FIELDS) != keys.embedding_key(**moved)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("source_digest", "5d" * 32),
        ("stream_index", 1),
        ("frame_indices", (0, 5, 11)),
        ("frame_indices", (5, 0, 10)),
        ("timestamps", (0.0, 0.5, 1.0000001)),
        ("rotation", 90),
        ("decoder_version", "av-18"),
    ],
)
def test_each_choice_alone_changes_the_digest_of_a_video(field: str, other: object) -> None:
    assert keys.content_digest_video(**VIDEO) != keys.content_digest_video(
        **{**VIDEO, field: other}
    )


def test_a_number_may_not_wander_between_the_lists_of_a_video() -> None:
    short = {**VIDEO, "frame_indices": (0, 5), "timestamps": (np.int64(10).view(float), 0.0, 0.5)}
    assert keys.content_digest_video(**VIDEO) != keys.content_digest_video(**short)


def test_equal_bytes_of_another_kind_never_share_a_digest() -> None:
    """The same 48 bytes as pictures of every shape, turned pictures, and sounds of every form."""
    values = np.arange(48, dtype=np.uint8)
    images = [values.reshape(height, 16 // height, 3) for height in (1, 2, 4, 8, 16)]
    turned = [np.rot90(image, turns) for image in images for turns in (1, 2, 3)]
    sounds = [
        (values.view(dtype).reshape(-1, channels), rate)
        for dtype in ("uint8", "int16", "float32")
        for channels in (1, 2, 3)
        for rate in (16_000, 24_000)
    ]
    digests = [keys.content_digest_image(image) for image in images + turned]
    digests += [audio_digest(samples, rate) for samples, rate in sounds]
    contents = {(image.shape, image.tobytes()) for image in images + turned}
    assert len(set(digests)) == len(contents) + len(sounds)


def test_equal_pixels_share_a_digest_however_they_lie_in_memory() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert keys.content_digest_image(np.asfortranarray(image)) == keys.content_digest_image(image)


def test_a_picture_must_be_eight_bit_rgb() -> None:
    for wrong in (np.zeros((2, 2, 4), np.uint8), np.zeros((2, 2, 3), np.float32)):
        with pytest.raises(ValueError, match="expected uint8"):
            keys.content_digest_image(wrong)


def test_pieces_of_a_sound_may_be_cut_anywhere() -> None:
    samples = np.linspace(-1, 1, 60, dtype=np.float32).reshape(30, 2)
    pieces = AudioDigest(16_000, 2)
    for piece in np.split(samples, [1, 7, 7, 29]):
        pieces.update(piece)
    assert pieces.hexdigest() == audio_digest(samples)


def test_samples_must_be_what_the_digest_was_made_for() -> None:
    for wrong in (
        np.zeros((4, 1), np.float32),
        np.zeros((4, 2), np.float64),
        np.zeros(8, np.float32),
    ):
        with pytest.raises(ValueError, match="unexpected samples"):
            AudioDigest(16_000, 2).update(wrong)


def test_parameters_that_differ_in_anything_have_fingerprints_of_their_own() -> None:
    parameters: list[dict[str, object]] = [
        {"max_pixels": 1024},
        {"max_pixels": "1024"},
        {"max_pixels": 1024.0},
        {"max_pixels": True},
        {"max_pixels": None},
        {"max_pixels": [1024]},
        {"max_pixels": [[1024], []]},
        {"max_pixels": [[], [1024]]},
        {"max_pixels": 1024, "exif": True},
        {"max_pixels": 1024, "exif": False},
        {"max_pixel": 1024},
        {},
    ]
    assert len({keys.preprocessing_fingerprint(each) for each in parameters}) == len(parameters)


def test_the_order_of_parameters_means_nothing() -> None:
    forwards = keys.preprocessing_fingerprint({"a": 1, "b": {"x": 1, "y": 2}})
    assert forwards == keys.preprocessing_fingerprint({"b": {"y": 2, "x": 1}, "a": 1})


@pytest.mark.parametrize("value", [{1: "a"}, {"a": [{True: 1}]}, {"a": b"bytes"}])
def test_what_json_would_quietly_change_is_refused(value: dict[Any, object]) -> None:
    with pytest.raises(TypeError):
        keys.canonical_json(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_without_json_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        keys.canonical_json({"a": value})


def test_each_field_alone_changes_an_alias() -> None:
    fields: tuple[Any, ...] = (b"salt", "5c" * 32, {"fps": 2}, "planner-1", "av-17")
    others: tuple[Any, ...] = (b"other", "5d" * 32, {"fps": 2.0}, "planner-2", "av-18")
    aliases = {keys.alias_key(*fields)}
    for index in range(len(fields)):
        aliases.add(keys.alias_key(*fields[:index], others[index], *fields[index + 1 :]))
    assert len(aliases) == 6


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.text("ab", max_size=3)), max_size=8))
def test_pairs_of_fields_collide_only_when_they_are_equal(pairs: list[tuple[str, str]]) -> None:
    for one, other in itertools.pairwise(pairs):
        same = keys.embedding_key(Modality.IMAGE, *one, "") == keys.embedding_key(
            Modality.IMAGE, *other, ""
        )
        assert same == (one == other)


@pytest.mark.parametrize(
    "text", ["", "AB" * 32, "ab" * 31, "ab" * 33, "ab" * 31 + "g0", "ab" * 31 + "a\n"]
)
def test_a_key_from_the_wire_is_64_hex_digits(text: str) -> None:
    assert keys.parse_key("ab" * 32) == "ab" * 32
    with pytest.raises(InvalidRequest):
        keys.parse_key(text)
