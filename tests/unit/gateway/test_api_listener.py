"""Connections of clients that take their time with the head of a request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest

from gateway.api.listener import listening
from mimo.errors import Cancelled
from tests.support.faces import RestFace

ASK = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
)
BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def served(face: RestFace | None = None) -> AbstractAsyncContextManager[str]:
    return listening((face or RestFace()).app, "127.0.0.1:0", "--rest-address")


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Streams]:
    host, port = address.split(":")
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The status line of an answer after which the connection stays open."""
    writer.write(ASK + b"\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    return head.partition(b"\r\n")[0]


@pytest.mark.parametrize("sent", [b"", ASK])
async def test_a_head_that_does_not_end_ends_the_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.listener.HEAD_S", 0.05)
    async with served() as address, connected(address) as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


async def test_a_byte_now_and_then_gains_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as address, connected(address) as other:
        assert b"200" in await asked(*other)
        monkeypatch.setattr("gateway.api.listener.HEAD_S", 0.05)
        async with connected(address) as (reader, writer):
            while not reader.at_eof():
                writer.write(b"a")
                assert b"200" in await asked(*other)


async def test_the_head_of_a_later_request_has_no_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as address, connected(address) as (reader, writer):
        assert b"200" in await asked(reader, writer)
        monkeypatch.setattr("gateway.api.listener.HEAD_S", 0.05)
        writer.write(ASK)
        assert await reader.read() == b""


async def test_answers_and_the_pauses_between_them_take_as_long_as_they_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.api.listener.HEAD_S", 2.0)
    more = asyncio.Event()
    face = RestFace([more, Cancelled("x")])
    async with (
        served(face) as address,
        connected(address) as idle,
        connected(address) as (reader, writer),
    ):
        assert b"200" in await asked(*idle)
        writer.write(CHAT % (len(BODY), BODY))
        await face.pipeline.entered.wait()
        async with connected(address) as (silent, _):  # whose time begins after theirs
            assert await silent.read() == b""
        assert b"200" in await asked(*idle)
        more.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
