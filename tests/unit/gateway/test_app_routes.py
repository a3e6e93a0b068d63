"""Around every REST call: routes, methods, ids, hosts, origins, draining, the playground."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from gateway.api import models as media_api
from gateway.api.guard import Guard
from gateway.api.listener import listening
from gateway.held import HeldBytes
from mimo.errors import Cancelled, Overloaded
from mimo.rpc.interceptors import DrainGate
from tests.support.faces import PROMPT, SCRIPT, STARTED, RestFace
from tests.support.media import gradient, image_file

JSON = {"content-type": "application/json"}
PICTURE = image_file(gradient(8, 8))


async def get(face: RestFace, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    exchange = face.open("GET", path, headers=given)
    status = await exchange.start()
    body = await exchange.finish()
    is_json = exchange.headers.get("content-type") == "application/json"
    return status, json.loads(body) if is_json else body, exchange.headers


async def error(
    face: RestFace,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    exchange = face.open(method, path, body, headers)
    status = await exchange.start()
    inner = (await exchange.json())["error"]
    assert inner.keys() == {"message", "type", "param", "code"}
    return status, inner["code"]


# ── routing ──


@pytest.mark.parametrize(
    "path, hint",
    [
        ("/v1/v1/chat/completions", "already ends in /v1"),
        ("/chat/completions", "below /v1"),
        ("/v1/completions", "use /v1/chat/completions"),
        ("/v1/embeddings", "use /v1/chat/completions"),
        ("/v1/nothing", "POST /v1/nothing"),
    ],
)
async def test_an_unknown_url_says_what_to_do(path: str, hint: str) -> None:
    exchange = RestFace().open("POST", path)
    assert await exchange.start() == 404
    inner = (await exchange.json())["error"]
    assert inner["code"] == "unknown_url" and hint in inner["message"]


async def test_a_wrong_method_is_told_the_right_one() -> None:
    exchange = RestFace().open("GET", "/v1/chat/completions")
    assert await exchange.start() == 405
    assert exchange.headers["allow"] == "POST"
    assert (await exchange.json())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/v1/models/tiny", "/healthz"])
async def test_reading_works_with_head_and_with_a_trailing_slash(path: str) -> None:
    face = RestFace()
    assert (await get(face, path))[0] == 200
    assert await face.open("HEAD", path).start() == 200


async def test_a_trailing_slash_is_no_redirect() -> None:
    face = RestFace()
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    exchange = face.open("POST", "/v1/chat/completions/", body, JSON)
    assert await exchange.start() == 200


@pytest.mark.parametrize(
    "headers, code",
    [
        ({"content-type": "text/plain"}, "unsupported_content_type"),
        ({"content-encoding": "br", **JSON}, "unsupported_encoding"),
    ],
)
async def test_bodies_of_other_types_are_415(headers: dict[str, str], code: str) -> None:
    face = RestFace()
    assert await error(face, "POST", "/v1/chat/completions", b"{}", headers) == (415, code)
    labels = {"api": "rest", "method": "generate", "code": "INVALID_ARGUMENT"}
    assert face.metrics.value("mimo_gateway_requests_total", **labels) == 1


async def test_a_body_that_is_too_large_is_refused_while_it_comes() -> None:
    face = RestFace()
    pieces = [b"x" * (8 << 20)] * 20
    exchange = face.open("POST", "/v1/chat/completions", pieces, JSON)
    assert await exchange.start() == 413
    assert exchange.headers["connection"] == "close"
    assert (await exchange.json())["error"]["code"] == "request_too_large"
    assert exchange.num_received == 9


async def test_what_is_no_json_is_400_and_never_500() -> None:
    for body in (b"", b"[", b"{}x", b"\xff", b'{"a": NaN}', b"[" * 100_000):
        got = await error(RestFace(), "POST", "/v1/chat/completions", body, JSON)
        assert got == (400, "invalid_json")


async def test_an_unknown_model_is_404() -> None:
    face = RestFace()
    exchange = face.chat(model="gpt-9")
    assert await exchange.start() == 404
    assert (await exchange.json())["error"]["code"] == "model_not_found"
    assert face.pipeline.requests == []
    assert await face.chat(model="openai/tiny").start() == 200


async def test_an_unexpected_exception_is_a_500_that_is_not_retried() -> None:
    face = RestFace([ZeroDivisionError("secret")])
    exchange = face.chat()
    assert await exchange.start() == 500
    assert exchange.headers["x-should-retry"] == "false"
    inner = (await exchange.json())["error"]
    assert inner["message"] == f"internal error, request id {exchange.headers['x-request-id']}"


# ── headers ──


async def test_ids_are_echoed_when_they_are_ids_and_made_up_when_not() -> None:
    face = RestFace()
    assert (await get(face, "/v1/models", x_request_id="abc-1"))[2]["x-request-id"] == "abc-1"
    for odd in ("a b", "x" * 129, "", "é"):
        made_up = (await get(face, "/v1/models", x_request_id=odd))[2]["x-request-id"]
        assert made_up.startswith("req_") and len(made_up) == 30
    assert "x-request-id" in (await get(face, "/v1/nothing"))[2]


async def test_the_id_of_the_header_is_the_id_of_the_request() -> None:
    face = RestFace()
    exchange = face.chat(headers={"x-request-id": "abc-1"})
    answer = await exchange.json()
    assert answer["mimo"]["request_id"] == face.pipeline.requests[0].request_id == "abc-1"


async def test_every_answer_is_careful_with_browsers() -> None:
    for path in ("/v1/models", "/v1/nothing", "/healthz"):
        headers = (await get(RestFace(), path))[2]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["x-mimo-version"]


async def test_ignored_fields_are_listed_in_a_header() -> None:
    exchange = RestFace().chat(foo=1, store=True)
    await exchange.start()
    assert exchange.headers["x-ignored-params"] == "foo,store"


@pytest.mark.parametrize(
    "headers, stream, timeout_s",
    [
        ({}, False, float("inf")),
        ({"x-request-timeout-ms": "1500"}, False, 1.5),
        ({"x-stainless-read-timeout": "600"}, False, 599.5),
        ({"x-stainless-timeout": "20.5", "x-request-timeout-ms": "30000"}, False, 20.0),
        ({"x-stainless-read-timeout": "600"}, True, float("inf")),
        ({"x-stainless-read-timeout": "NaN"}, False, float("inf")),
    ],
)
async def test_clients_say_how_long_they_wait(
    headers: dict[str, str], stream: bool, timeout_s: float
) -> None:
    face = RestFace()
    await face.chat(headers=headers, stream=stream).start()
    assert face.pipeline.requests[0].timeout_s == timeout_s


@pytest.mark.parametrize("value", ["0", "-1", "soon", "²", "1" * 30])
async def test_a_deadline_that_is_none_is_refused(value: str) -> None:
    exchange = RestFace().chat(headers={"x-request-timeout-ms": value})
    assert await exchange.start() == 400
    assert (await exchange.json())["error"]["param"] == "x-request-timeout-ms"


# ── who may come in ──


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:8080"},
        {"host": "127.0.0.1"},
        {"host": "[::1]:9"},
        {"host": "LOCALHOST"},
        {"host": "localhost", "origin": "http://localhost:8080"},
    ],
)
async def test_local_hosts_and_origins_may_come_in(headers: dict[str, str]) -> None:
    assert (await get(RestFace(), "/v1/models", **headers))[0] == 200


@pytest.mark.parametrize(
    "headers, option",
    [
        ({"host": "evil.example"}, "--hosts"),
        ({"host": "localhost.evil.example"}, "--hosts"),
        ({"host": ""}, "--hosts"),
        ({"host": "localhost", "origin": "https://evil.example"}, "--cors-origins"),
        ({"host": "localhost", "origin": "null"}, "--cors-origins"),
    ],
)
async def test_foreign_hosts_and_origins_may_not(headers: dict[str, str], option: str) -> None:
    """The operator who meets this is told which option it is about."""
    status, body, _ = await get(RestFace(), "/v1/models", **headers)
    assert status == 403
    assert body["error"]["type"] == "permission_error"
    assert option in body["error"]["message"]


async def test_more_hosts_can_be_named() -> None:
    face = RestFace(hosts=frozenset({"mimo.internal"}))
    assert (await get(face, "/v1/models", host="mimo.internal:80"))[0] == 200
    assert (await get(face, "/v1/models", host="localhost"))[0] == 403
    assert (await get(RestFace(hosts=frozenset({"*"})), "/v1/models", host="any"))[0] == 200


async def test_health_is_told_to_everybody() -> None:
    assert (await get(RestFace(), "/healthz", host="10.0.0.7"))[0] == 200
    assert (await get(RestFace(), "/readyz", host="10.0.0.7"))[0] == 200


async def test_all_bodies_in_memory_together_are_bounded() -> None:
    face = RestFace([STARTED, asyncio.Event()])
    face.app = Guard(face.app, DrainGate(), memory=HeldBytes(60))  # one request and a half
    first = face.chat()
    await face.pipeline.entered.wait()
    second = face.chat()
    assert await second.start() == 503
    assert (await second.json())["error"]["code"] == "overloaded"
    first.leave()
    await first.finish()
    face.pipeline.script = SCRIPT
    assert await face.chat().start() == 200


async def test_who_has_no_room_is_told_so_before_the_body_is_read() -> None:
    face = RestFace()
    face.pipeline.refusal = Overloaded("full", retry_after_s=7.0)
    exchange = face.chat()
    assert await exchange.start() == 503
    assert exchange.headers["retry-after"] == "7"
    assert (await exchange.json())["error"]["code"] == "overloaded"
    assert (exchange.num_received, face.pipeline.requests) == (0, [])
    labels = {"api": "rest", "method": "generate", "code": "RESOURCE_EXHAUSTED"}
    assert face.metrics.value("mimo_gateway_requests_total", **labels) == 1
    assert await face.open("POST", "/v1/tokenize", b"", JSON).start() == 400  # is not answered


async def test_a_connection_outlives_a_refusal_whose_body_nobody_read() -> None:
    face = RestFace()
    body = {"messages": [{"role": "user", "content": "x" * (4 << 20)}]}
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(listening(face.app, "127.0.0.1:0", "--rest"))
        one = httpx.Limits(max_connections=1)
        client = httpx.AsyncClient(base_url=f"http://{address}", limits=one, timeout=60)
        http = await stack.enter_async_context(client)
        ports = set()
        for refusal, status in ((Overloaded("full"), 503), (None, 200)):
            face.pipeline.refusal = refusal
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
                assert response.status_code == status
                await response.aread()
        assert len(ports) == 1


async def test_draining_refuses_new_work_and_says_so_to_probes() -> None:
    face = RestFace()
    await face.gate.close_and_wait(0)
    exchange = face.chat()
    assert await exchange.start() == 503
    assert exchange.headers["retry-after"] == "2"
    assert exchange.headers["connection"] == "close"
    assert (await exchange.json())["error"]["code"] == "service_unavailable"
    assert (await get(face, "/readyz"))[0] == 503
    assert (await get(face, "/healthz"))[0] == 200


async def test_calls_count_as_in_flight_until_they_are_answered() -> None:
    more = asyncio.Event()
    face = RestFace([more, Cancelled("x")])
    exchange = face.chat()
    await face.pipeline.entered.wait()
    assert face.gate.in_flight == 1
    more.set()
    await exchange.finish()
    assert face.gate.in_flight == 0


# ── other origins ──

PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, x-stainless-os, cookie",
}


async def test_no_origin_is_listed_by_default() -> None:
    exchange = RestFace().open("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert await exchange.start() == 403
    assert not any(name.startswith("access-control") for name in exchange.headers)


async def test_a_listed_origin_may_ask_and_read() -> None:
    face = RestFace(origins=frozenset({PAGE}))
    exchange = face.open("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert await exchange.start() == 204
    assert exchange.headers["access-control-allow-origin"] == PAGE
    assert exchange.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    status, _, headers = await get(face, "/v1/models", origin=PAGE)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-request-id" in headers["access-control-expose-headers"]
    assert headers["vary"] == "origin"
    assert (await get(face, "/v1/models", origin="https://other.example"))[0] == 403


# ── models, tokens, media ──


async def test_the_list_of_models() -> None:
    _, body, _ = await get(RestFace(), "/v1/models")
    card = {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "mimo",
        "max_model_len": 4096,
        "capabilities": {"input": ["text", "image", "audio", "video"], "output": ["text"]},
    }
    assert body == {"object": "list", "data": [card]}
    assert (await get(RestFace(), "/v1/models/tiny"))[1] == card
    assert (await get(RestFace(), "/v1/models/a/b"))[0] == 404


async def test_tokens_are_counted_without_generating() -> None:
    face = RestFace()
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    answer = await face.open("POST", "/v1/tokenize", body, JSON).json()
    assert answer["count"] == PROMPT.prompt_tokens == 9
    assert answer["prompt_tokens_details"]["image_tokens"] == 2
    assert answer["max_model_len"] == 4096
    assert answer["items"][0]["modality"] == "image"
    assert answer["items"][0]["cache"] is None


async def test_an_upload_gives_a_reference() -> None:
    face = RestFace()
    answer = await face.open("POST", "/v1/media", [PICTURE[:50], PICTURE[50:]]).json()
    assert answer["modality"] == "image" and answer["bytes"] == len(PICTURE)
    assert answer["expires_at"] > 1_700_000_000
    assert await face.uploads.get(f"media:{answer['media_ref']}", b"") == PICTURE


async def test_an_upload_under_a_salt_is_found_under_it_alone() -> None:
    face = RestFace()
    answer = await face.open("POST", "/v1/media?cache_salt=mine", PICTURE).json()
    assert await face.uploads.get(f"media:{answer['media_ref']}", b"") is None


@pytest.mark.parametrize(
    "body, status, code",
    [(b"", 400, "empty_media"), (b"%PDF-1.7 xxxxxxxxxxxx", 400, "unsupported_media_type")],
)
async def test_an_upload_must_be_a_medium(body: bytes, status: int, code: str) -> None:
    assert await error(RestFace(), "POST", "/v1/media", body) == (status, code)


async def test_uploads_are_bounded_and_no_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_api, "MAX_UPLOAD_BYTES", 10)
    assert (await error(RestFace(), "POST", "/v1/media", PICTURE))[0] == 413
    form = {"content-type": "multipart/form-data; boundary=x"}
    assert (await error(RestFace(), "POST", "/v1/media", b"x", form))[0] == 415


# ── playground ──


async def test_the_playground_is_self_contained() -> None:
    face = RestFace()
    status, page, headers = await get(face, "/playground")
    assert status == 200 and page.startswith(b"<!doctype html>")
    assert headers["content-type"] == "text/html; charset=utf-8"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and "http" not in policy
    for name, kind in (("playground.js", "text/javascript"), ("playground.css", "text/css")):
        assert f"/playground/{name}".encode() in page
        status, _, headers = await get(face, f"/playground/{name}")
        assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8")


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "../app.py", "__init__.py", ".."])
async def test_the_playground_serves_nothing_else(name: str) -> None:
    assert (await get(RestFace(), f"/playground/{name}"))[0] == 404


async def test_the_root_leads_to_the_playground() -> None:
    status, _, headers = await get(RestFace(), "/")
    assert (status, headers["location"]) == (307, "/playground")
