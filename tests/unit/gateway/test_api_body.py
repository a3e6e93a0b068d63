"""The body of a request: what is JSON to us, and how much of it we take."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn

import pytest
from starlette.requests import Request

from gateway.api.body import MAX_DEPTH, parse_json, read_json, read_limited
from gateway.api.errors import UnsupportedBody
from mimo.errors import Cancelled, DeadlineExceeded, InvalidRequest, Reason


def request(pieces: Sequence[bytes], stays: bool = True, **headers: str) -> Request:
    async def messages() -> AsyncIterator[dict[str, Any]]:
        for index, piece in enumerate(pieces):
            more = not stays or index + 1 < len(pieces)
            yield {"type": "http.request", "body": piece, "more_body": more}
        if not stays:
            yield {"type": "http.disconnect"}
        await asyncio.Event().wait()

    received = messages()
    names = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    scope = {"type": "http", "method": "POST", "path": "/", "headers": list(names.items())}
    return Request(scope, lambda: anext(received))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"{} {}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"7" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"a": "\xff"}',
        '{"a": 1}'.encode("utf-16"),
    ],
    ids=lambda body: str(body[:12]),
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json(body)
    assert caught.value.reason is Reason.INVALID_JSON
    assert len(caught.value.message) < 200


def test_nesting_up_to_the_limit_is_read() -> None:
    inner = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert "a" in parse_json(f'{{"a": {inner}}}'.encode())


def test_a_byte_order_mark_is_skipped_and_the_last_of_equal_keys_wins() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1, "a": 2}') == {"a": 2}


def test_null_is_absence_at_every_level_but_not_in_lists() -> None:
    body = b'{"stop": null, "o": {"x": null, "y": [null, {"z": null}]}}'
    assert parse_json(body) == {"o": {"y": [None, {}]}}


def test_lone_surrogates_become_replacement_characters() -> None:
    body = rb'{"a": "\ud800x", "\udfff": ["\ud83d\ude00"]}'
    assert parse_json(body) == {"a": "\ufffdx", "\ufffd": ["\U0001f600"]}


async def test_a_body_in_pieces_is_put_together() -> None:
    assert await read_json(request([b'{"a"', b": 1}"]), dict) == {"a": 1}


async def test_what_is_made_of_a_large_body_is_made_in_a_thread() -> None:
    """A picture in base64 or a schema takes long to understand, and others are waiting."""

    def parse(body: dict[str, Any]) -> tuple[int, bool]:
        return len(body["a"]), threading.current_thread() is threading.main_thread()

    for size, at_once in ((10, True), (2 << 20, False)):
        body = json.dumps({"a": "x" * size}).encode()
        assert await read_json(request([body]), parse) == (size, at_once)


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", "application/json; charset=UTF-8", "application/vnd.x+json"],
)
async def test_json_by_any_of_its_names_is_read(kind: str) -> None:
    headers = {"content_type": kind} if kind else {}
    assert await read_json(request([b"{}"], **headers), dict) == {}


@pytest.mark.parametrize(
    "headers, code",
    [
        ({"content_type": "text/plain"}, "unsupported_content_type"),
        ({"content_type": "application/x-www-form-urlencoded"}, "unsupported_content_type"),
        ({"content_type": "multipart/form-data; boundary=x"}, "unsupported_content_type"),
        ({"content_type": "application/json; charset=latin-1"}, "unsupported_content_type"),
        ({"content_encoding": "gzip"}, "unsupported_encoding"),
    ],
)
async def test_other_types_and_encodings_are_not_read(headers: dict[str, str], code: str) -> None:
    with pytest.raises(UnsupportedBody) as caught:
        await read_json(request([b"{}"], **headers), dict)
    assert caught.value.rest_code == code


async def test_a_body_is_refused_as_soon_as_it_is_too_large() -> None:
    endless = request([b"x" * 600, b"x" * 600], stays=False)
    with pytest.raises(InvalidRequest) as caught:
        await read_limited(endless, limit=1000)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


async def test_a_body_that_announces_too_much_is_refused_unread() -> None:
    def receive() -> NoReturn:
        pytest.fail("it was read")

    announced = request([], content_length="1001")
    announced._receive = receive
    with pytest.raises(InvalidRequest) as caught:
        await read_limited(announced, limit=1000)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


async def test_a_body_that_breaks_off_is_nobodys_request() -> None:
    with pytest.raises(Cancelled):
        await read_limited(request([b"x"], stays=False), limit=1000)


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        await read_limited(request([]), limit=1000, patience_s=0)
    assert caught.value.metadata == {"stage": "body"}
