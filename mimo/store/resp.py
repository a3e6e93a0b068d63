"""One connection that speaks RESP2: commands out in a row, large values straight into place.

redis-py opens connections (it knows addresses, TLS, users and databases) and this module talks on
them. Its own reader copies a value several times before the caller has it; here the kernel writes a
value into the buffer that was meant for it, and what is sent is not joined to anything first.
"""

import asyncio
from collections import deque
from collections.abc import Generator
from typing import Any

from mimo.tensor import new_buffer

Word = str | int | bytes | memoryview
# An error among the replies is a value, so that those of other commands are not lost.
Reply = bytes | memoryview | int | None | list["Reply"] | Exception

_SMALL_BYTES = 1 << 12  # what is not larger is copied: that is cheaper than a call of the system
_END = b"\r\n"


class Refused(Exception):
    """The server answered a command with an error. The message is the server's."""


class Resp(asyncio.BufferedProtocol):
    """A connection with any number of unanswered commands, which are answered in order.

    Whoever leaves before all answers have come must close it: the next user would get them.
    """

    def __init__(self, opened: Any) -> None:
        """``opened`` is a connected connection of redis-py that nobody reads from."""
        self._loop = asyncio.get_running_loop()
        self._opened = opened
        # redis-py has no public name for what it reads from and writes to.
        self._transport: asyncio.Transport = opened._writer.transport
        self._former = self._transport.get_protocol()
        self._expected: deque[tuple[asyncio.Future[Reply], memoryview | None]] = deque()
        self._outgoing = bytearray()
        self._will_flush = False
        self._room = asyncio.Event()  # nothing is left to be sent
        self._room.set()
        self._scratch = memoryview(bytearray(_SMALL_BYTES))
        self._unread = b""  # received and not yet understood
        self._parser = self._parse()
        self._place = next(self._parser)
        self._is_lost = False
        self._transport.set_write_buffer_limits(high=0)
        self._transport.set_protocol(self)

    @property
    def is_idle(self) -> bool:
        """Whether it can be handed to the next user."""
        return not self._is_lost and not self._expected and not self._transport.is_closing()

    def send(self, *words: Word, into: memoryview | None = None) -> asyncio.Future[Reply]:
        """Send a command. The future is its reply, and ``into`` itself if a value filled that.

        A value of another size than ``into`` comes as bytes. The future fails with OSError when
        the connection is lost.
        """
        reply: asyncio.Future[Reply] = self._loop.create_future()
        if self._is_lost:
            reply.set_exception(ConnectionResetError("the connection is lost"))
            return reply
        self._expected.append((reply, into))
        self._outgoing += b"*%d\r\n" % len(words)
        for word in words:
            data = word if isinstance(word, bytes | memoryview) else str(word).encode()
            self._outgoing += b"$%d\r\n" % len(data)
            if len(data) > _SMALL_BYTES:
                self._flush()
                self._transport.write(data)
            else:
                self._outgoing += data
            self._outgoing += b"\r\n"
        if not self._will_flush:  # what is sent until the loop comes round leaves as one
            self._will_flush = True
            self._loop.call_soon(self._flush)
        return reply

    async def sent(self) -> None:
        """Wait until all commands are with the system, so that no more than one is held here."""
        await self._room.wait()

    async def close(self) -> None:
        self._transport.abort()
        await self._opened.disconnect(nowait=True)

    # ── what asyncio calls ──

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._place

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._place = self._parser.send(nbytes)
        except ValueError as error:
            self._fail(ConnectionResetError(f"this is not RESP: {error}"))
            self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error if isinstance(error, OSError) else ConnectionResetError("closed"))
        self._former.connection_lost(error)

    def _flush(self) -> None:
        self._will_flush = False
        if self._outgoing:
            self._transport.write(self._outgoing)
            self._outgoing = bytearray()

    def _fail(self, error: OSError) -> None:
        self._is_lost = True
        self._outgoing.clear()
        self._room.set()
        while self._expected:
            reply, _ = self._expected.popleft()
            if not reply.done():
                reply.set_exception(error)
                reply.exception()  # its owner may have left; asyncio would complain

    # ── the grammar: a generator that yields where it wants bytes and is sent how many came ──

    def _parse(self) -> Generator[memoryview, int, None]:
        while True:
            yield from self._answer()

    def _answer(self) -> Generator[memoryview, int, None]:
        """Understand one reply. Its own frame, so that no value is held until the next one."""
        line = yield from self._line()
        if not self._expected:
            raise ValueError("an answer without a question")
        _, into = self._expected[0]
        value = yield from self._reply(line, into)
        reply, _ = self._expected.popleft()
        if not reply.done():
            reply.set_result(value)

    def _reply(self, line: bytes, into: memoryview | None) -> Generator[memoryview, int, Reply]:
        """The reply that begins with ``line``. Raises ValueError for what is not RESP2."""
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refused(rest.decode(errors="replace"))
        if kind == b":":
            return int(rest)
        size = int(rest)
        if size < 0:
            return None
        if kind == b"$":
            return (yield from self._value(size, into))
        if kind != b"*":
            raise ValueError(f"a reply that begins with {kind!r}")
        replies: list[Reply] = []
        for _ in range(size):
            line = yield from self._line()
            replies.append((yield from self._reply(line, None)))
        return replies

    def _value(self, size: int, into: memoryview | None) -> Generator[memoryview, int, Reply]:
        fits = into is not None and len(into) == size
        place = into if into is not None and fits else new_buffer(size)
        filled = min(size, len(self._unread))
        place[:filled] = self._unread[:filled]
        self._unread = self._unread[filled:]
        while filled < size:
            filled += yield place[filled:]
        if (yield from self._line()):
            raise ValueError("a value that does not end where it should")
        return place if fits else bytes(place)

    def _line(self) -> Generator[memoryview, int, bytes]:
        while _END not in self._unread:
            count = yield self._scratch
            self._unread += self._scratch[:count]
        line, _, self._unread = self._unread.partition(_END)
        return line


def accepted(reply: Reply) -> Reply:
    """The reply, unless it is an error. Raises Refused."""
    if isinstance(reply, Exception):
        raise reply
    return reply


def accepted_all(reply: Reply) -> list[Reply]:
    """The replies of a transaction. Raises Refused if it, or anything in it, failed."""
    replies = accepted(reply)
    if not isinstance(replies, list):
        raise Refused("the transaction was given up")
    return [accepted(each) for each in replies]
