"""The request stream of a call is read to its end, but not for ever."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from mimo.rpc import incoming
from mimo.rpc.incoming import Incoming


class Stream(AsyncIterator[int]):
    """Counts up; waits for ``release`` before the message ``held``."""

    def __init__(self, end: float, held: int | None = None) -> None:
        self.num_read = 0
        self.release = asyncio.Event()
        self._end = end
        self._held = held

    async def __anext__(self) -> int:
        await asyncio.sleep(0)
        if self.num_read == self._held:
            await self.release.wait()
        if self.num_read >= self._end:
            raise StopAsyncIteration
        self.num_read += 1
        return self.num_read


async def test_what_nobody_read_is_read_at_the_end() -> None:
    stream = Stream(5)
    async with Incoming(stream) as messages:
        assert await anext(messages) == 1
    assert stream.num_read == 5


async def test_a_failed_handler_still_reads_to_the_end() -> None:
    stream = Stream(5)
    with pytest.raises(ZeroDivisionError):
        async with Incoming(stream):
            raise ZeroDivisionError
    assert stream.num_read == 5


async def test_a_caller_that_is_gone_is_not_listened_to() -> None:
    stream = Stream(5)
    with pytest.raises(asyncio.CancelledError):
        async with Incoming(stream):
            raise asyncio.CancelledError
    assert stream.num_read == 0


async def test_a_read_that_was_given_up_is_left_to_the_next_reader() -> None:
    stream = Stream(2, held=0)
    async with Incoming(stream) as messages:
        reader = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait({reader})
        stream.release.set()
        assert [message async for message in messages] == [1, 2]


async def test_a_quiet_caller_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "QUIET_S", 0.01)
    stream = Stream(5, held=2)
    async with Incoming(stream):
        pass
    assert stream.num_read == 2


async def test_an_endless_caller_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "PATIENCE_S", 0.01)
    stream = Stream(float("inf"))
    async with Incoming(stream):
        pass
    assert stream.num_read > 0
