"""Commands leave whole and in order; replies are understood however they arrive."""

import asyncio
import contextlib
import socket
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from mimo.store.resp import Refused, Resp, accepted, accepted_all

LARGE = bytes(range(256)) * 40


@dataclass
class Ends:
    """A connection, and the socket of the server that plays its part by hand."""

    link: Resp
    server: socket.socket

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.server, data)

    async def hear(self, count: int) -> bytes:
        heard = b""
        while len(heard) < count:
            heard += await asyncio.get_running_loop().sock_recv(self.server, count - len(heard))
        return heard


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, writer = await asyncio.open_connection(sock=ours)

    async def disconnect(nowait: bool) -> None:
        writer.close()

    link = Resp(SimpleNamespace(_writer=writer, disconnect=disconnect))
    with contextlib.closing(theirs):
        yield Ends(link, theirs)
        await link.close()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000, 1 << 20])
async def test_replies_are_understood_however_they_are_cut(ends: Ends, piece: int) -> None:
    place = memoryview(bytearray(len(LARGE)))
    replies = [ends.link.send("GET", f"k{index}") for index in range(6)]
    replies.append(ends.link.send("GET", "large", into=place))
    replies.append(ends.link.send("GET", "last"))
    said = b"+OK\r\n:-42\r\n$-1\r\n$7\r\na\r\nb\r\nc\r\n*3\r\n$1\r\nx\r\n:1\r\n*0\r\n$0\r\n\r\n"
    said += b"$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(LARGE), LARGE, len(LARGE), LARGE)
    for start in range(0, len(said), piece):
        await ends.say(said[start : start + piece])
    assert [await reply for reply in replies[:6]] == [
        *(b"OK", -42, None, b"a\r\nb\r\nc"),
        *([b"x", 1, []], b""),
    ]
    assert await replies[6] is place
    assert place == LARGE
    assert await replies[7] == LARGE
    assert ends.link.is_idle


async def test_a_value_of_another_size_does_not_touch_the_place(ends: Ends) -> None:
    place = memoryview(bytearray(4))
    short, long = ends.link.send("GET", "a", into=place), ends.link.send("GET", "b", into=place)
    await ends.say(b"$3\r\nabc\r\n$5\r\nabcde\r\n")
    assert [await short, await long] == [b"abc", b"abcde"]
    assert place == bytes(4)


async def test_an_idle_connection_holds_no_value(ends: Ends) -> None:
    place = memoryview(bytearray(len(LARGE)))
    held = weakref.ref(place)
    reply = ends.link.send("GET", "k", into=place)
    await ends.say(b"$%d\r\n%s\r\n" % (len(LARGE), LARGE))
    assert await reply is place
    del place, reply
    async with asyncio.timeout(60):
        while held() is not None:  # asyncio itself lets go of it a little later
            await asyncio.sleep(0)


async def test_commands_arrive_whole_and_in_order(ends: Ends) -> None:
    ends.link.send("SET", "k", LARGE, "EX", 5)
    ends.link.send("SET", "k", memoryview(LARGE))
    large = b"$%d\r\n%s\r\n" % (len(LARGE), LARGE)
    expected = b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n" + large + b"$2\r\nEX\r\n$1\r\n5\r\n"
    expected += b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n" + large
    assert await ends.hear(len(expected)) == expected


async def test_no_more_is_sent_than_the_server_takes(ends: Ends) -> None:
    """A server that does not read makes the sender wait, and not its memory grow."""
    huge = bytes(8 << 20)
    ends.link.send("SET", "k", huge)
    waiting = asyncio.create_task(ends.link.sent())
    await asyncio.sleep(0)
    assert not waiting.done()
    await ends.hear(len(huge))
    await waiting


async def test_errors_are_values_until_they_are_looked_at(ends: Ends) -> None:
    refused, fine = ends.link.send("A"), ends.link.send("B")
    aborted, partly = ends.link.send("EXEC"), ends.link.send("EXEC")
    await ends.say(b"-ERR no\r\n+OK\r\n*-1\r\n*2\r\n+OK\r\n-OOM\r\n")
    with pytest.raises(Refused, match="ERR no"):
        accepted(await refused)
    assert accepted(await fine) == b"OK"
    for transaction in (aborted, partly):
        with pytest.raises(Refused):
            accepted_all(await transaction)


@pytest.mark.parametrize("said", [b"?\r\n", b"$x\r\n", b"$1\r\nab\r\n", b"*1\r\n!\r\n", b"\r\n"])
async def test_what_is_not_resp_ends_the_connection(ends: Ends, said: bytes) -> None:
    reply = ends.link.send("GET", "k")
    await ends.say(said)
    with pytest.raises(OSError, match="not RESP"):
        await reply
    assert not ends.link.is_idle


async def test_a_lost_connection_fails_all_that_is_unanswered_and_all_that_follows(
    ends: Ends,
) -> None:
    replies = [ends.link.send("GET", "k") for _ in range(3)]
    await ends.hear(3 * len(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"))
    await ends.say(b"+OK\r\n")
    ends.server.shutdown(socket.SHUT_RDWR)
    assert await replies[0] == b"OK"
    for reply in (*replies[1:], ends.link.send("GET", "k")):
        with pytest.raises(OSError):
            await reply
    await ends.link.sent()
    assert not ends.link.is_idle


async def test_an_answer_nobody_asked_for_ends_the_connection(ends: Ends) -> None:
    await ends.say(b"+OK\r\n")
    while ends.link.is_idle:
        await asyncio.sleep(0)
