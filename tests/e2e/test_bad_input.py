"""Input that cannot be answered: refused by both faces with a typed error, at no cost."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mimo.errors import Reason
from tests.support import samples
from tests.support.live import Grpc, Part, Rest, Stack, audio, image, video
from tests.support.media import image_file

WHERE = "messages[0].content[0]"


@dataclass(frozen=True)
class Case:
    """A question whose first part is bad. ``code`` is REST's word for the reason."""

    name: str
    part: Part
    reason: Reason
    code: str
    field: str = WHERE
    extra: str = "what is it?"


def flipped(file: bytes) -> bytes:
    """A file with damage in its middle."""
    middle = len(file) // 2
    return file[:middle] + bytes(byte ^ 0xFF for byte in file[middle : middle + 64]) + file[-32:]


def giant_png() -> bytes:
    """A picture of 400 megapixels, as far as its header goes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    signature = b"\x89PNG\r\n\x1a\n"
    return (
        signature
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


JPEG = image_file(samples.picture(31, 128, 128), "JPEG", quality=95)

MEDIA = (
    Case("corrupt image", image(flipped(samples.png(32))), Reason.MEDIA_CORRUPT, "invalid_media"),
    Case("truncated PNG", image(samples.png(33)[:200]), Reason.MEDIA_CORRUPT, "invalid_media"),
    Case("truncated JPEG", image(JPEG[:700]), Reason.MEDIA_CORRUPT, "invalid_media"),
    Case("empty image", image(b""), Reason.MEDIA_EMPTY, "empty_media"),
    Case(
        "text named .png",
        image(b"This is a picture, believe me.\n"),
        Reason.MEDIA_UNSUPPORTED,
        "unsupported_media_type",
    ),
    Case("400 megapixels", image(giant_png()), Reason.MEDIA_LIMIT, "media_too_large"),
    Case(
        "sound as a picture",
        image(samples.wav(0.1)),
        Reason.MEDIA_MODALITY,
        "media_modality_mismatch",
    ),
    Case("truncated video", video(samples.mp4(8)[:900]), Reason.MEDIA_CORRUPT, "invalid_media"),
    Case("empty sound", audio(b""), Reason.MEDIA_EMPTY, "empty_media"),
    Case("soundless sound", audio(samples.wav(0.0)), Reason.MEDIA_EMPTY, "empty_media"),
    Case(
        "unknown upload",
        image("media_" + "0" * 64),
        Reason.MEDIA_NOT_FOUND,
        "media_not_found",
    ),
)

# The loopback, metadata and private addresses in every dress that some parser takes off.
FORBIDDEN_URLS = (
    *("https://127.0.0.1/a.png", "https://127.0.0.1:8443/a.png", "https://0.0.0.0/"),
    *("https://localhost/", "https://LOCALHOST./", "https://a.localhost/"),
    *("https://169.254.169.254/latest/meta-data/", "https://metadata.google.internal/"),
    *("https://168.63.129.16/", "https://100.100.100.200/"),
    *("https://10.0.0.1/", "https://172.16.0.1/", "https://192.168.1.1/", "https://[fd00::1]/"),
    *("https://[::1]/", "https://[::]/", "https://[fe80::1]/", "https://[::ffff:127.0.0.1]/"),
    *("https://[::ffff:a9fe:a9fe]/", "https://[64:ff9b::7f00:1]/", "https://[2002:7f00:1::]/"),
    *("https://127.1/", "https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/"),
    *("https://127.0.0.1.:443/", "https://①②⑦.⓪.⓪.①/", "https://127。0。0。1/"),
    *("https://user@127.0.0.1/", "https://example.com@127.0.0.1/", "https://127.0.0.1\\@a.com/"),
    *("https://127.0.0.1%00.example.com/", "https://[fe80::1%25eth0]/"),
    *("file:///etc/passwd", "ftp://127.0.0.1/a.png", "http://127.0.0.1/a.png"),
    *("https://kubernetes.default.svc/", "https://redis.cluster.local/", "https://intranet/"),
)

TOO_LONG = Case(
    "prompt over the context",
    "a word and " * 4000,
    Reason.CONTEXT_LENGTH_EXCEEDED,
    "context_length_exceeded",
    field="messages",
)

CASES = (*MEDIA, TOO_LONG)


@pytest.fixture(autouse=True)
def costs_nothing(stack: Stack) -> Iterator[None]:
    """No encoder sees anything and no prompt is computed."""
    before = stack.work()
    yield
    after = stack.work()
    for kind in ("items", "encodes", "prompt_tokens"):
        assert after[kind] == before[kind], kind


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_rest_refuses(rest: Rest, case: Case) -> None:
    response = rest.post(case.part, case.extra)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, case.code), error["message"]
    assert error["param"].startswith(case.field)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_grpc_refuses(rpc: Grpc, case: Case) -> None:
    error = rpc.refusal(case.part, case.extra)
    code = "NOT_FOUND" if case.reason is Reason.MEDIA_NOT_FOUND else "INVALID_ARGUMENT"
    assert (error.code, error.reason) == (code, case.reason), error.message
    assert error.field is not None and error.field.startswith("messages")
    assert error.metadata["request_id"]


@pytest.mark.parametrize("url", FORBIDDEN_URLS)
def test_urls_into_the_network_are_refused(rest: Rest, rpc: Grpc, url: str) -> None:
    response = rest.post(image(url), "what is it?")
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] in ("url_not_allowed", "invalid_url")
    assert error["param"].startswith(WHERE)
    refusal = rpc.refusal(image(url), "what is it?")
    assert refusal.code == "INVALID_ARGUMENT"
    assert refusal.reason in (Reason.URL_BLOCKED, Reason.URL_INVALID)


def test_the_second_of_two_parts_is_named(rest: Rest, rpc: Grpc) -> None:
    good, bad = image(samples.png(34)), image(samples.png(33)[:200])
    error = rest.post(good, bad, "what is it?").json()["error"]
    assert error["param"].startswith("messages[0].content[1]")
    field = rpc.refusal(good, bad, "what is it?").field
    assert field is not None and "[1]" in field


def test_an_unknown_part_is_named(rest: Rest) -> None:
    messages = [{"role": "user", "content": [{"type": "hologram", "hologram": {"url": "x"}}]}]
    response = rest.post(messages=messages)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == f"{WHERE}.type"
    assert "hologram" in error["message"]


def test_too_much_inline_names_the_way_around(rpc: Grpc) -> None:
    error = rpc.refusal(image(samples.png(35) + bytes(9 << 20)), "what is it?")
    assert error.code == "INVALID_ARGUMENT"
    assert error.reason is Reason.REQUEST_TOO_LARGE
    assert "UploadMedia" in error.message
