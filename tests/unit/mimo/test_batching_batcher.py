"""Batches form while the device is busy; what cannot be done in time is refused at once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from mimo.batching import Batch, Batcher
from mimo.errors import DeadlineExceeded, Internal, Overloaded, Unavailable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Device:
    """Doubles numbers, one batch at a time, when the test opens the gate. -1 breaks a batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.entered.release()
        self.gate.acquire()
        self.batches.append(list(items))
        self.threads.add(threading.current_thread().name)
        if -1 in items:
            raise ZeroDivisionError("bad item")
        return [2 * item for item in items]

    async def is_busy(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.entered.acquire)


Make = Callable[..., Batcher[int, int]]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
async def make(device: Device) -> AsyncIterator[Make]:
    made: list[Batcher[int, int]] = []

    def make(**options: object) -> Batcher[int, int]:
        settings = {"max_cost": 10.0, "max_items": 4, "max_queued_cost": 100.0, **options}
        made.append(Batcher(device, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    device.gate.release(1000)
    for batcher in made:
        await batcher.close()


async def submit(batcher: Batcher[int, int], item: int, cost: float = 1.0) -> int:
    with batcher.admit(cost) as slot:
        return (await slot.run(item)).value


async def fill(batcher: Batcher[int, int], *items: tuple[int, float]) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(submit(batcher, item, cost)) for item, cost in items]
    await asyncio.sleep(0)
    return tasks


async def test_what_arrives_while_the_device_is_busy_is_the_next_batch(
    make: Make, device: Device
) -> None:
    batcher = make()
    first = await fill(batcher, (1, 1))
    await device.is_busy()
    rest = await fill(batcher, (2, 1), (3, 1), (4, 1))
    device.gate.release(2)
    assert await asyncio.gather(*first, *rest) == [2, 4, 6, 8]
    assert device.batches == [[1], [2, 3, 4]]


async def test_a_batch_is_bounded_by_cost_and_by_items(make: Make, device: Device) -> None:
    device.gate.release(100)
    batcher = make(max_cost=10.0, max_items=3)
    costs = [6, 4, 1, 1, 1, 1, 11, 2]
    tasks = await fill(batcher, *enumerate(map(float, costs)))
    await asyncio.gather(*tasks)
    assert device.batches == [[0, 1], [2, 3, 4], [5], [6], [7]]


async def test_the_device_has_one_thread_of_its_own(make: Make, device: Device) -> None:
    device.gate.release(100)
    batcher = make(max_items=1, thread_name="vision-device")
    await asyncio.gather(*await fill(batcher, *((item, 1.0) for item in range(8))))
    assert device.threads == {"vision-device_0"}


async def test_a_bad_item_fails_alone(make: Make, device: Device) -> None:
    device.gate.release(100)
    tasks = await fill(make(), (1, 1), (-1, 1), (3, 1))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [results[0], results[2]] == [2, 6]
    assert isinstance(results[1], ZeroDivisionError)


async def test_a_broken_device_sends_everyone_elsewhere(make: Make, device: Device) -> None:
    reasons: list[str] = []
    batcher = make(fatal=(ZeroDivisionError,), on_failure=reasons.append)
    first = await fill(batcher, (1, 1))
    await device.is_busy()
    rest = await fill(batcher, (-1, 6), (2, 4), (3, 10))  # two batches
    device.gate.release(1000)
    assert await first[0] == 2
    for task in rest:
        with pytest.raises(Unavailable):
            await task
    assert device.batches == [[1], [-1, 2]]  # and not once more, one by one
    assert len(reasons) == 1
    with pytest.raises(Unavailable), batcher.admit(1.0):
        pass


async def test_a_device_that_loses_results_is_a_bug() -> None:
    batcher: Batcher[int, int] = Batcher(
        lambda items: [], max_cost=1, max_items=1, max_queued_cost=1
    )
    with pytest.raises(Internal, match="0 results for a batch of 1"):
        await submit(batcher, 1)
    await batcher.close()


async def test_a_cancelled_item_never_reaches_the_device(make: Make, device: Device) -> None:
    batcher = make()
    first = await fill(batcher, (1, 1))
    await device.is_busy()
    doomed, kept = await fill(batcher, (2, 1), (3, 1))
    doomed.cancel()
    device.gate.release(2)
    assert await kept == 6
    await asyncio.gather(*first)
    assert device.batches == [[1], [3]]
    assert batcher.load.queued_work == 0


async def test_cancelling_an_item_on_the_device_disturbs_nobody(make: Make, device: Device) -> None:
    batcher = make(max_wait_s=3600.0, max_items=2)
    doomed, kept = await fill(batcher, (1, 1), (2, 1))
    await device.is_busy()
    doomed.cancel()
    device.gate.release()
    assert await kept == 4


async def test_a_full_queue_refuses_and_says_when_to_come_back(make: Make, device: Device) -> None:
    batcher = make(max_queued_cost=5.0, work_per_second=2.0, clock=Clock())
    await fill(batcher, (1, 4))
    await device.is_busy()
    await fill(batcher, (2, 3))
    with pytest.raises(Overloaded) as refused, batcher.admit(3.0):
        pass
    assert refused.value.retry_after_s == (4 + 3) / 2
    with batcher.admit(2.0):
        assert batcher.load.queued_work == 5


@pytest.mark.parametrize("limit", [{"max_queued_items": 2}, {"max_queued_bytes": 300}])
async def test_a_queue_may_be_full_of_items_or_bytes_that_are_little_work(
    make: Make, limit: dict[str, int]
) -> None:
    batcher = make(**limit)
    with batcher.admit(0.001, num_bytes=300), batcher.admit(0.001):
        with pytest.raises(Overloaded, match="full"), batcher.admit(0.001, num_bytes=1):
            pass
        assert batcher.load.queued_work == pytest.approx(0.002)
    with batcher.admit(0.001, num_bytes=301):  # larger than the queue, which is empty
        pass


async def test_an_empty_queue_takes_an_item_of_any_size(make: Make) -> None:
    with make(max_queued_cost=5.0).admit(1000.0):
        pass


async def test_room_is_given_back_however_the_block_ends(make: Make) -> None:
    batcher = make()
    with pytest.raises(ZeroDivisionError), batcher.admit(3.0):
        assert batcher.load.queued_work == 3
        raise ZeroDivisionError
    assert batcher.load.queued_work == 0


async def test_work_that_cannot_be_done_in_time_is_refused(make: Make, device: Device) -> None:
    clock = Clock()
    batcher = make(work_per_second=2.0, clock=clock)
    await fill(batcher, (1, 4))
    await device.is_busy()
    with pytest.raises(Overloaded, match="deadline"), batcher.admit(1.0, deadline=101.5):
        pass
    with batcher.admit(1.0, deadline=102.5):
        pass


async def test_expired_work_never_reaches_the_device(make: Make, device: Device) -> None:
    clock = Clock()
    batcher = make(clock=clock)
    await fill(batcher, (1, 1))
    await device.is_busy()

    async def late() -> int:
        with batcher.admit(1.0, deadline=110.0) as slot:
            return (await slot.run(2)).value

    task = asyncio.create_task(late())
    (patient,) = await fill(batcher, (3, 1))
    clock.now = 110.0
    device.gate.release(2)
    with pytest.raises(DeadlineExceeded):
        await task
    await patient
    assert device.batches == [[1], [3]]


async def test_a_deadline_may_be_moved_while_the_item_waits(make: Make, device: Device) -> None:
    clock = Clock()
    batcher = make(clock=clock)
    await fill(batcher, (1, 1))
    await device.is_busy()
    with batcher.admit(1.0, deadline=110.0) as slot:
        task = asyncio.create_task(slot.run(2))
        await asyncio.sleep(0)
        slot.deadline = 120.0
        clock.now = 115.0
        device.gate.release(2)
        assert (await task).value == 4


async def test_an_idle_device_may_wait_for_company(make: Make, device: Device) -> None:
    device.gate.release(100)
    batcher = make(max_wait_s=3600.0, max_items=2)
    first = await fill(batcher, (1, 1))
    await asyncio.gather(*first, *await fill(batcher, (2, 1)))
    assert device.batches == [[1, 2]]


async def test_waiting_for_company_ends(make: Make, device: Device) -> None:
    device.gate.release(100)
    assert await submit(make(max_wait_s=0.001), 1) == 2


async def test_load_and_prediction_follow_the_work(make: Make, device: Device) -> None:
    clock = Clock()
    batcher = make(work_per_second=2.0, clock=clock)
    assert batcher.load.predicted_wait_s == 0
    (first,) = await fill(batcher, (1, 4))
    await device.is_busy()
    await fill(batcher, (2, 6))
    load = batcher.load
    assert (load.queued_work, load.running_work, load.predicted_wait_s) == (6, 4, 5.0)
    clock.now += 1.5
    assert batcher.load.predicted_wait_s == 3.5
    clock.now += 100  # a batch that takes longer than it should ends any moment
    assert batcher.load.predicted_wait_s == 3.0


async def test_an_item_learns_its_wait_and_its_share_of_the_device(
    make: Make, device: Device
) -> None:
    clock = Clock()
    batches: list[Batch] = []
    batcher = make(clock=clock, on_batch=batches.append)
    await fill(batcher, (1, 1))
    await device.is_busy()
    with batcher.admit(2.0) as one, batcher.admit(6.0) as other:
        tasks = [asyncio.create_task(one.run(2)), asyncio.create_task(other.run(3))]
        await asyncio.sleep(0)
        clock.now += 1
        device.gate.release()
        await device.is_busy()
        clock.now += 4
        device.gate.release()
        small, large = await asyncio.gather(*tasks)
    assert (small.queue_s, small.device_s) == (1, 1)
    assert (large.queue_s, large.device_s) == (1, 3)
    assert batches[1] == Batch(num_items=2, work=8, fill=0.8, busy_s=4)


async def measured(batcher: Batcher[int, int], clock: Clock, device: Device, cost: float) -> None:
    """Run one item of that cost for one second."""
    task = asyncio.create_task(submit(batcher, 1, cost))
    await device.is_busy()
    clock.now += 1
    device.gate.release()
    await task


async def test_a_rate_is_measured_while_busy(make: Make, device: Device) -> None:
    clock = Clock()
    batcher = make(clock=clock)
    assert batcher.load.work_per_second is None
    await measured(batcher, clock, device, 4.0)
    clock.now += 1000
    await measured(batcher, clock, device, 8.0)
    assert batcher.load.work_per_second == 6.0


async def test_a_calibrated_rate_is_refined_by_full_batches_within_bounds(
    make: Make, device: Device
) -> None:
    clock = Clock()
    batcher = make(clock=clock, work_per_second=4.0)
    await measured(batcher, clock, device, 5.0)
    assert batcher.load.work_per_second == 4.0
    await measured(batcher, clock, device, 8.0)
    assert batcher.load.work_per_second == pytest.approx(4.2)
    for _ in range(60):
        await measured(batcher, clock, device, 10.0)
    assert batcher.load.work_per_second == 6.0


async def test_closing_ends_the_running_batch_and_refuses_the_rest(
    make: Make, device: Device
) -> None:
    batcher = make()
    (running,) = await fill(batcher, (1, 1))
    await device.is_busy()
    (waiting,) = await fill(batcher, (2, 1))
    closing = asyncio.create_task(batcher.close())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable), batcher.admit(1.0):
        pass
    device.gate.release()
    await closing
    assert await running == 2
    with pytest.raises(Unavailable):
        await waiting
