"""The worker pool: what a worker cannot do, and what the pool does when one misbehaves."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from gateway.media.channel import Kind
from gateway.media.limits import Limits
from gateway.media.workers import Job, WorkerPool
from mimo.errors import Internal, InvalidRequest, Overloaded, Reason, Unavailable

MIB = 1 << 20


def job(behaviour: str, *, cpu_s: float = 20, memory_mib: int = 1024, **parameters: Any) -> Job:
    return Job(
        operation=behaviour,
        format="png",
        parameters=parameters,
        cpu_s=cpu_s,  # type: ignore[arg-type]
        memory_bytes=memory_mib * MIB,
        limits=Limits(),
    )


@asynccontextmanager
async def hostile_pool(size: int = 1, **options: Any) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(size, module="tests.support.hostile_worker", **options)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def run(pool: WorkerPool, job: Job, source: bytes = b"x", digest: str = "d") -> list[Any]:
    """All messages of a job: reports parsed, data as bytes."""
    messages = []
    async with aclosing(pool.run(job, source, digest)) as stream:
        async for kind, payload in stream:
            messages.append(json.loads(payload) if kind is Kind.FACTS else bytes(payload))
    return messages


async def pid_of(pool: WorkerPool) -> int:
    report, _ = await run(pool, job("echo"))
    return int(report["pid"])


async def refused(pool: WorkerPool, job: Job, digest: str = "bad") -> Reason:
    with pytest.raises(InvalidRequest) as caught:
        await run(pool, job, digest=digest)
    return caught.value.reason


async def test_a_worker_sees_nothing_and_can_do_nothing() -> None:
    async with hostile_pool() as pool:
        listener = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        async with listener:
            address = listener.sockets[0].getsockname()
            (report,) = await run(pool, job("look_around", listener=address), b"the file")
    assert report["source"] == "the file"
    assert report["files"] == []
    assert report["core"] == 0
    assert not report["wrote"]
    if os.geteuid() == 0:
        assert not report["connected"]
    assert set(report["environment"]) <= {
        *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LC_CTYPE"),
    }


async def test_large_files_go_through_whole() -> None:
    source = bytes(range(256)) * 20_000
    async with hostile_pool() as pool:
        _, echoed = await run(pool, job("echo"), source)
    assert echoed == source


@pytest.mark.parametrize("behaviour", ["die", "babble", "lie"])
async def test_a_job_that_breaks_its_worker_is_refused_from_then_on(behaviour: str) -> None:
    now = 0.0
    async with hostile_pool(clock=lambda: now) as pool:
        assert await refused(pool, job(behaviour)) == Reason.MEDIA_DECODE_FAILED
        first = await pid_of(pool)  # the next request is fine
        assert await refused(pool, job("echo")) == Reason.MEDIA_DECODE_FAILED  # same digest
        assert await pid_of(pool) == first  # and the refusal cost no worker
        now = 601.0
        await run(pool, job("echo"), digest="bad")  # forgotten


async def test_time_limits_kill() -> None:
    async with hostile_pool() as pool:
        assert await refused(pool, job("sleep", cpu_s=0.05), "a") == Reason.MEDIA_DECODE_FAILED
        assert await refused(pool, job("spin", cpu_s=0), "b") == Reason.MEDIA_DECODE_FAILED
        await pid_of(pool)


async def test_memory_is_bounded() -> None:
    async with hostile_pool() as pool:
        assert await run(pool, job("hoard", memory_mib=300)) == [{"refused": True}]


async def test_a_worker_killed_from_outside_is_replaced() -> None:
    async with hostile_pool() as pool:
        first = await pid_of(pool)
        os.kill(first, 9)
        with contextlib.suppress(InvalidRequest):  # if the job reached the dying worker
            await run(pool, job("echo"), digest="unlucky")
        assert await pid_of(pool) != first


async def test_stopping_early_keeps_the_worker() -> None:
    async with hostile_pool() as pool:
        first = await pid_of(pool)
        async with aclosing(pool.run(job("stream"), b"x", "d")) as stream:
            async for _, payload in stream:
                if payload[7] == 2:
                    break
        assert await pid_of(pool) == first


async def test_cancelling_a_job_frees_its_slot() -> None:
    async with hostile_pool() as pool:
        waiting = asyncio.create_task(run(pool, job("sleep")))
        while not pool._slots.locked():
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pid_of(pool)


async def test_the_line_is_bounded() -> None:
    async with hostile_pool(max_waiting=1) as pool:
        async with aclosing(pool.run(job("stream"), b"x", "d")) as stream:
            await anext(stream)
            second = asyncio.create_task(run(pool, job("echo")))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded) as caught:
                await run(pool, job("echo"))
            assert caught.value.retry_after_s
        assert len(await second) == 2


async def test_a_line_that_takes_too_long_is_closed() -> None:
    async with hostile_pool(max_wait_s=5.0) as pool:
        async with aclosing(pool.run(job("stream"), b"x", "d")) as stream:
            await anext(stream)
            pool._mean_job_s = 5.0
            second = asyncio.create_task(run(pool, job("echo")))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded) as caught:
                await run(pool, job("echo"))
            assert caught.value.retry_after_s == 10.0
        assert len(await second) == 2
        assert pool._mean_job_s < 5.0


async def test_workers_are_recycled() -> None:
    async with hostile_pool(recycle_after=2) as pool:
        pids = [await pid_of(pool) for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_closing_ends_running_jobs_and_processes() -> None:
    async with hostile_pool(size=2) as pool:
        pid = await pid_of(pool)
        running = asyncio.create_task(run(pool, job("sleep")))
        while len(pool._idle) == 2:
            await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await running
    with pytest.raises(Unavailable):
        await run(pool, job("echo"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_worker_that_cannot_start_is_said_so() -> None:
    pool = WorkerPool(1, module="tests.support.no_such_worker")
    with pytest.raises(Internal):
        await pool.start()
    await pool.close()
