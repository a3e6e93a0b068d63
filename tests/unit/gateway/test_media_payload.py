"""Base64 and data URLs as clients write them; media options as JSON."""

import base64
from typing import Any

import pytest

from gateway.items import MediaOptions
from gateway.media.options import parse_options
from gateway.media.payload import decode_base64, decode_data_url, wav_from_pcm16
from gateway.media.sniff import WAV, sniff
from mimo.errors import InvalidRequest, Reason

DATA = bytes(range(256)) + b"\xfb\xff"
PLAIN = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.rstrip("="),
        "\r\n".join(PLAIN[i : i + 76] for i in range(0, len(PLAIN), 76)),
        base64.urlsafe_b64encode(DATA).decode(),
        PLAIN.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        f"data:image/png;base64,{PLAIN}",
        f"DATA:IMAGE/PNG;charset=utf-8;BASE64,{PLAIN}",
        f'data:audio/ogg; codecs="opus"; base64 ,{PLAIN}',
        f"data:;base64,{PLAIN}",
    ],
)
def test_every_common_spelling_gives_the_same_bytes(text: str) -> None:
    assert decode_base64(text) == DATA


@pytest.mark.parametrize(
    "text",
    [
        "AAA!",
        "A",
        "AAAAA",
        "AA=A",
        "é",
        "data:image/png;base64",
        "data:image/png,AAAA",
        "data:image/png;base64;x,AAAA",
        "data:;base64," * 2000 + "AAAA",
    ],
)
def test_malformed_payloads_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_base64(text)
    assert caught.value.reason == Reason.MEDIA_ENCODING


@pytest.mark.parametrize(
    "text, which",
    [("data:image/png;base64", "data_url"), ("data:image/png,AAAA", "data_url")]
    + [("data:;base64,!", None), ("!", None)],
)
def test_a_bad_url_and_bad_base64_are_told_apart(text: str, which: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_base64(text)
    assert caught.value.metadata.get("which") == which


def test_an_empty_payload_is_no_bytes() -> None:
    assert decode_data_url("data:image/png;base64,") == b""


def test_raw_samples_become_a_wav() -> None:
    assert sniff(wav_from_pcm16(b"\0\1" * 10, 16000)) is WAV


def test_options_are_read_over_the_requests() -> None:
    base = parse_options({"max_pixels": 4096, "num_frames": 8})
    assert parse_options({"fps": 2, "exif": "ignore", "min_pixels": None}, base) == MediaOptions(
        max_pixels=4096, fps=2, exif=False
    )
    assert parse_options({"max_frames": 16.0}) == MediaOptions(max_frames=16)


@pytest.mark.parametrize(
    "given",
    [
        {"brightness": 1},
        {"max_pixels": "many"},
        {"max_pixels": True},
        {"max_pixels": 0},
        {"num_frames": 2.5},
        {"num_frames": float("inf")},
        {"fps": 0},
        {"fps": "1"},
        {"fps": float("nan")},
        {"fps": 1, "num_frames": 8},
        {"min_frames": 9, "max_frames": 8},
        {"min_pixels": 9000, "max_pixels": 8000},
        {"use_audio_track": 1},
        {"exif": True},
    ],
)
def test_senseless_options_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse_options(given)
