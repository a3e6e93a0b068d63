"""Events between the tasks of a request and its reader."""

import asyncio

from gateway.mailbox import Mailbox


async def test_the_reader_gets_all_there_is_in_order() -> None:
    box: Mailbox[int] = Mailbox(8)
    for number in range(3):
        await box.put(number)
    assert await box.take() == [0, 1, 2]


async def test_a_reader_waits_for_the_first_event() -> None:
    box: Mailbox[int] = Mailbox(8)
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    await box.put(7)
    assert await taking == [7]


async def test_writers_wait_while_the_box_is_full_and_keep_their_order() -> None:
    box: Mailbox[int] = Mailbox(2)

    async def write(first: int) -> None:
        for number in range(first, first + 5):
            await box.put(number)

    writers = [asyncio.create_task(write(first)) for first in (0, 100)]
    seen: list[int] = []
    while len(seen) < 10:
        taken = await box.take()
        assert len(taken) <= 2
        seen += taken
    await asyncio.gather(*writers)
    assert [number for number in seen if number < 100] == [0, 1, 2, 3, 4]
    assert [number for number in seen if number >= 100] == [100, 101, 102, 103, 104]


async def test_a_writer_that_gave_up_leaves_its_room_to_others() -> None:
    box: Mailbox[int] = Mailbox(1)
    await box.put(1)
    hasty, patient = (asyncio.create_task(box.put(number)) for number in (2, 3))
    await asyncio.sleep(0)
    hasty.cancel()
    await asyncio.gather(hasty, return_exceptions=True)
    assert await box.take() == [1]
    await patient
    assert await box.take() == [3]


async def test_the_end_is_an_empty_batch_after_everything_else() -> None:
    box: Mailbox[int] = Mailbox(8)
    await box.put(1)
    box.end()
    assert await box.take() == [1]
    assert await box.take() == []
    waiting: Mailbox[int] = Mailbox(8)
    taking = asyncio.create_task(waiting.take())
    await asyncio.sleep(0)
    waiting.end()
    assert await taking == []
