"""A pool of media workers: processes that decode for the gateway and may die doing so.

A job that takes its worker down is not tried again, and its file is refused for a while. The pool
replaces what it loses; nothing a worker does reaches another request.
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import gateway
from gateway.media import sandbox
from gateway.media.channel import HEADER, STOP, Kind, decode_header, encode_json
from gateway.media.limits import Limits
from mimo.errors import Internal, InvalidRequest, MimoError, Overloaded, Reason, Unavailable

T = TypeVar("T")

_START_TIMEOUT_S = 60.0
_SETTLE_TIMEOUT_S = 5.0
_POISON_S = 600.0
_MAX_POISONED = 4096
_NEWEST = 0.1  # weight of the newest job in the mean


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker shall do with a file. ``operation`` names a method of the worker's ``Job``."""

    operation: str
    format: str
    parameters: dict[str, Any]
    cpu_s: int
    memory_bytes: int
    limits: Limits

    @property
    def wall_s(self) -> float:
        """How long the gateway waits for the worker in all; time it spends elsewhere is free."""
        return 2.0 * self.cpu_s


class WorkerPool:
    """At most ``size`` workers and ``max_waiting`` jobs in line for them, as long as a newcomer
    would wait no more than ``max_wait_s``."""

    def __init__(
        self,
        size: int,
        *,
        max_waiting: int = 1024,
        max_wait_s: float = 30.0,
        recycle_after: int = 500,
        module: str = "gateway.media.worker",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = size
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._mean_job_s = 0.0  # that a worker is taken; recent jobs count most
        self._recycle_after = recycle_after
        self._module = module
        self._clock = clock
        self._slots = asyncio.Semaphore(size)
        self._num_waiting = 0
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._poisoned: dict[str, float] = {}  # source digest -> when it is forgotten
        self._tasks: set[asyncio.Task[None]] = set()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._is_closed = False

    @property
    def wait_s(self) -> float:
        """How long a job would wait now and then take."""
        return (self._num_waiting / self._size + 1) * self._mean_job_s

    async def start(self) -> None:
        """Start every worker, so that no request waits for one to import its libraries."""
        self._directory = tempfile.TemporaryDirectory(prefix="mimo-media-")
        spawns = (self._spawn() for _ in range(self._size))
        for outcome in await asyncio.gather(*spawns, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            self._idle.append(outcome)

    async def close(self) -> None:
        """Kill every worker, whatever it is doing."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._workers.clear()
        self._idle.clear()
        if self._directory is not None:
            self._directory.cleanup()

    async def run(
        self, job: Job, source: bytes, source_digest: str
    ) -> AsyncGenerator[tuple[Kind, bytearray], None]:
        """Run a job and give its FACTS and DATA messages as they come.

        The worker waits while the caller does not ask for more. Close the generator to stop early.
        Raises InvalidRequest with the worker's reason, or MEDIA_DECODE_FAILED when the job crashed
        its worker or used up its time; Overloaded when too many jobs wait.
        """
        self._refuse_poison(source_digest)
        worker = await self._acquire()
        began = self._clock()
        state = _State.BROKEN
        try:
            try:
                await worker.submit(job, source)
                while True:
                    kind, payload = await worker.receive()
                    if kind is Kind.DONE:
                        state = _State.IDLE
                        return
                    if kind is Kind.FAILED:
                        failure = _failure(payload)
                        state = _State.IDLE
                        raise failure
                    state = _State.STREAMING
                    yield kind, payload
                    state = _State.BROKEN
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                self._refuse_when_closed()
                self._poison(source_digest)
                raise _crash() from error
        finally:
            taken_s = self._clock() - began
            self._mean_job_s += _NEWEST * (taken_s - self._mean_job_s)
            self._give_back(worker, state)

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise Unavailable("media workers are shutting down", reason=Reason.DRAINING)

    def _refuse_poison(self, source_digest: str) -> None:
        if self._poisoned.get(source_digest, 0.0) > self._clock():
            raise _crash()

    def _poison(self, source_digest: str) -> None:
        now = self._clock()
        if len(self._poisoned) >= _MAX_POISONED:
            self._poisoned = {key: end for key, end in self._poisoned.items() if end > now}
        if len(self._poisoned) < _MAX_POISONED:
            self._poisoned[source_digest] = now + _POISON_S

    async def _acquire(self) -> "Worker":
        self._refuse_when_closed()
        wait_s = self.wait_s
        if self._slots.locked() and (
            self._num_waiting >= self._max_waiting or wait_s > self._max_wait_s
        ):
            raise Overloaded(
                "too many media are waiting to be decoded", retry_after_s=max(1.0, wait_s)
            )
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                await self._discard(worker)
            return await self._spawn()
        except BaseException:
            self._slots.release()
            raise

    def _give_back(self, worker: "Worker", state: "_State") -> None:
        """Return a worker and its slot: at once when it is idle, else after settling it."""
        if state is _State.IDLE and worker.num_jobs < self._recycle_after:
            self._idle.append(worker)
            self._slots.release()
        else:
            self._background(self._settle(worker, state))

    async def _settle(self, worker: "Worker", state: "_State") -> None:
        """Make a worker idle again, or replace it. Its slot stays taken meanwhile."""
        try:
            if state is not _State.STREAMING or not await worker.stop():
                await self._discard(worker)
                worker = await self._spawn()
            self._idle.append(worker)
        except MimoError:
            pass  # the next job starts a worker and reports why it cannot
        finally:
            self._slots.release()

    async def _spawn(self) -> "Worker":
        assert self._directory is not None, "start() was not called"
        worker = await Worker.start(self._module, self._directory.name)
        self._workers.add(worker)
        return worker

    async def _discard(self, worker: "Worker") -> None:
        self._workers.discard(worker)
        await worker.kill()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _State(Enum):
    """Where a job left its worker."""

    IDLE = "idle"  # finished
    STREAMING = "streaming"  # between two messages
    BROKEN = "broken"  # dead, or in the middle of a message


class Worker:
    """One process and the socket to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
        self._process = process
        self._connection = connection
        self._patience_s = 0.0
        self.num_jobs = 0

    @classmethod
    async def start(cls, module: str, directory: str) -> "Worker":
        """Run ``module`` in ``directory`` and wait until it is ready. Raises Internal."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            # Blocks the loop for a millisecond; in a thread, cancelling could lose the child.
            worker = cls(_launch(module, theirs, directory), ours)
        worker._patience_s = _START_TIMEOUT_S
        try:
            await worker.receive()
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            await worker.kill()
            raise Internal("a media worker did not start") from error
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def submit(self, job: Job, source: bytes) -> None:
        self.num_jobs += 1
        self._patience_s = job.wall_s
        header = encode_json(Kind.JOB, dataclasses.asdict(job))
        await self._patiently(self._send(header + HEADER.pack(Kind.SOURCE, len(source))))
        await self._patiently(self._send(source))

    async def receive(self) -> tuple[Kind, bytearray]:
        """The next message. Raises EOFError when the process is gone, ValueError when it babbles,
        TimeoutError when the job has used up its time."""
        return await self._patiently(self._receive())

    async def stop(self) -> bool:
        """End a streaming job and throw the rest of its messages away. False if that fails."""
        self._patience_s = _SETTLE_TIMEOUT_S
        try:
            await self._patiently(self._send(STOP))
            while True:
                kind, _ = await self.receive()
                if kind in (Kind.DONE, Kind.FAILED):
                    return True
        except (OSError, EOFError, ValueError, TimeoutError):
            return False

    async def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a reader; closing would not
        self._process.kill()
        await asyncio.shield(asyncio.to_thread(self._process.wait))
        self._connection.close()

    async def _patiently(self, step: Coroutine[Any, Any, T]) -> T:
        """Wait for the worker on the job's time."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout(max(0.0, self._patience_s)):
                return await step
        finally:
            self._patience_s -= loop.time() - start

    async def _send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, data)

    async def _receive(self) -> tuple[Kind, bytearray]:
        kind, size = decode_header(await self._read(HEADER.size))
        if kind in (Kind.JOB, Kind.SOURCE):
            raise ValueError(f"a worker sent {kind.name}")
        return kind, await self._read(size)

    async def _read(self, size: int) -> bytearray:
        loop = asyncio.get_running_loop()
        buffer = bytearray(size)
        with memoryview(buffer) as view:
            done = 0
            while done < size:
                count = await loop.sock_recv_into(self._connection, view[done:])
                if count == 0:
                    raise EOFError("media worker is gone")
                done += count
        return buffer


def _launch(module: str, connection: socket.socket, directory: str) -> "subprocess.Popen[bytes]":
    root = str(Path(gateway.__file__).parents[1])
    descriptor = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-m", module, str(descriptor)],
        cwd=directory,
        env=sandbox.environment(root),
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C at the terminal is for the gateway, which closes us
    )


def _failure(payload: bytearray) -> InvalidRequest:
    """The worker's own verdict. It may name only reasons that concern media."""
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        fields = json.loads(payload)
        reason = Reason(fields["reason"])
        metadata = {str(name): str(value) for name, value in fields["metadata"].items()}
        if reason.startswith("MEDIA_"):
            error = InvalidRequest(str(fields["message"])[:500], reason=reason)
            error.metadata = metadata
            return error
    raise ValueError("malformed failure")


def _crash() -> InvalidRequest:
    return InvalidRequest(
        "media could not be decoded within the limits of time and memory",
        reason=Reason.MEDIA_DECODE_FAILED,
    )
