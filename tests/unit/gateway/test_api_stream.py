"""A streamed answer on the wire: when it begins, what keeps it alive, how it ends."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.api.sse import DONE, KEEP_ALIVE, Patience
from gateway.generation import ItemReady
from mimo.errors import InvalidRequest, Overloaded, Reason, Unavailable
from tests.support.faces import (
    PICTURE,
    SCRIPT,
    STARTED,
    SUMMARY,
    Exchange,
    RestFace,
    Step,
    said,
    sse_chunks,
    stopped,
)

FOREVER = Patience(hold_s=3600, keep_alive_s=3600)


def stream(script: Sequence[Step], patience: Patience = FOREVER) -> tuple[RestFace, Exchange]:
    face = RestFace(script, patience=patience)
    return face, face.chat(stream=True)


async def test_a_stream_in_full() -> None:
    _, exchange = stream(SCRIPT)
    assert await exchange.start() == 200
    assert exchange.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert exchange.headers["cache-control"] == "no-cache, no-transform"
    assert exchange.headers["x-accel-buffering"] == "no"
    assert "content-length" not in exchange.headers
    sent = sse_chunks(await exchange.finish())
    assert [chunk["choices"][0]["finish_reason"] for chunk in sent] == [None, None, None, "stop"]
    assert not any("error" in chunk for chunk in sent)


async def test_every_chunk_is_sent_when_it_is_made() -> None:
    more = asyncio.Event()
    _, exchange = stream([STARTED, said("one"), more, said("two"), stopped(), SUMMARY])
    await exchange.start()
    piece = await exchange.piece()
    assert piece.index(b'"role":"assistant"') < piece.index(b'"content":"one"')
    more.set()
    assert b'"content":"two"' in await exchange.piece()
    assert (await exchange.finish()).endswith(DONE)


@pytest.mark.parametrize("before", [[], [STARTED], [STARTED, ItemReady(PICTURE)]])
async def test_what_fails_before_the_decoder_works_is_a_real_http_error(before: list[Step]) -> None:
    _, exchange = stream([*before, Overloaded("full", retry_after_s=3)])
    assert await exchange.start() == 503
    assert exchange.headers["retry-after"] == "3"
    assert exchange.headers["content-type"] == "application/json"
    assert (await exchange.json())["error"]["code"] == "overloaded"


async def test_a_bad_request_is_an_http_error_though_it_asked_for_a_stream() -> None:
    face = RestFace()
    exchange = face.chat(stream=True, temperature=3)
    assert await exchange.start() == 400
    assert (await exchange.json())["error"]["param"] == "temperature"


async def test_a_status_line_is_not_held_back_for_ever() -> None:
    works = asyncio.Event()
    patience = Patience(hold_s=0, keep_alive_s=3600)
    _, exchange = stream([STARTED, works, said("x"), stopped(), SUMMARY], patience)
    assert await exchange.start() == 200
    assert await exchange.piece() == KEEP_ALIVE
    works.set()
    assert b'"role":"assistant"' in await exchange.piece()
    sse_chunks(KEEP_ALIVE + b"data: {}\n\n" + await exchange.finish())


async def test_silence_is_filled_with_comments_of_one_line_feed() -> None:
    works = asyncio.Event()
    patience = Patience(hold_s=3600, keep_alive_s=0)
    _, exchange = stream([STARTED, said("x"), works, stopped(), SUMMARY], patience)
    await exchange.start()
    pieces = [await exchange.piece() for _ in range(6)]
    assert pieces.count(b": ka\n") >= 2
    works.set()
    body = b"".join(pieces) + await exchange.finish()
    assert [chunk["choices"][0]["finish_reason"] for chunk in sse_chunks(body)][-1] == "stop"


async def test_a_failure_after_the_beginning_is_an_error_event_and_no_finish() -> None:
    face, exchange = stream([STARTED, said("x"), Unavailable("lost"), stopped(), SUMMARY])
    assert await exchange.start() == 200
    *before, last = sse_chunks(await exchange.finish())
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in before)
    assert last == {
        "error": {
            "message": "lost",
            "type": "server_error",
            "param": None,
            "code": "upstream_unavailable",
            "request_id": exchange.headers["x-request-id"],
        }
    }
    assert face.metrics.value(
        "mimo_gateway_requests_total", api="rest", method="generate", code="UNAVAILABLE"
    )


async def test_a_bug_in_the_middle_keeps_its_secrets() -> None:
    _, exchange = stream([STARTED, said("x"), ZeroDivisionError("secret")])
    body = await exchange.finish()
    assert b"secret" not in body
    assert sse_chunks(body)[-1]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("script", [[STARTED], [STARTED, said("x")]])
async def test_a_client_that_leaves_ends_the_work(script: list[Step]) -> None:
    face, exchange = stream([*script, asyncio.Event()])
    await face.pipeline.entered.wait()
    if len(script) > 1:
        await exchange.start()
    exchange.leave()
    await exchange.finish()
    assert face.pipeline.cancelled.is_set()
    assert face.gate.in_flight == 0
    labels = {"api": "rest", "method": "generate", "code": "CANCELLED"}
    assert face.metrics.value("mimo_gateway_requests_total", **labels) == 1
    assert face.metrics.value("mimo_gateway_requests_in_flight", api="rest") == 0


async def test_a_client_that_leaves_ends_the_work_of_a_whole_answer_too() -> None:
    face = RestFace([STARTED, asyncio.Event()])
    exchange = face.chat()
    await face.pipeline.entered.wait()
    exchange.leave()
    await exchange.finish()
    assert face.pipeline.cancelled.is_set()


async def test_a_reader_that_does_not_read_is_broken_off() -> None:
    face = RestFace([STARTED, said("x"), asyncio.Event()], patience=Patience(reader_s=0))
    sent = []

    async def stuck(message: dict[str, object]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    exchange = face.chat(stream=True)
    exchange._send = stuck  # type: ignore[method-assign, assignment]
    await exchange.task
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert face.pipeline.cancelled.is_set()


async def test_errors_of_the_request_keep_their_param() -> None:
    error = InvalidRequest("bad", reason=Reason.MEDIA_CORRUPT, field="messages[0].content[1]")
    _, exchange = stream([error])
    assert (await exchange.json())["error"]["param"] == "messages[0].content[1]"
