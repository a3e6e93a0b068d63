"""One child process of a local stack: its command, its log tail, its restarts."""

import asyncio
import collections
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TAIL_LINES = 20
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0)
STEADY_S = 30.0
_PR_SET_PDEATHSIG = 1

# Large buffers come and go with every picture; without these glibc maps and unmaps them each time,
# which costs more than moving the bytes does. Idle OpenMP threads must not spin on two cores.
CHILD_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "536870912",
    "OMP_WAIT_POLICY": "passive",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class ChildSpec:
    """What to run and where it answers. Addresses are ``host:port`` or a store URL."""

    role: str
    index: int
    argv: Sequence[str]
    address: str
    ops: str = ""
    metrics: str = ""
    rest: str = ""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass
class Child:
    """A running process. ``tail`` holds its last log lines."""

    spec: ChildSpec
    log_file: Path
    process: asyncio.subprocess.Process | None = None
    started: float = 0.0
    failures: int = 0
    tail: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=TAIL_LINES)
    )
    _pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    async def start(self) -> None:
        self.tail.clear()
        self.started = time.monotonic()
        self.process = await asyncio.create_subprocess_exec(
            *self.spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(os.environ),
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then drains
            preexec_fn=_die_with_parent(),
        )
        self._pump = asyncio.create_task(self._read_output(self.process))

    async def wait(self) -> int:
        """Exit status, once the process has ended and its output has been read."""
        assert self.process is not None and self._pump is not None
        status = await self.process.wait()
        await asyncio.shield(self._pump)  # a caller that gives up must not cut the log short
        return status

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after ``grace_s``."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.process.kill()
            await self.wait()

    def restart_delay(self) -> float:
        """Pause before the next start: none at first, longer when it keeps dying young."""
        if time.monotonic() - self.started > STEADY_S:
            self.failures = 0
        delay = RESTART_DELAYS_S[min(self.failures, len(RESTART_DELAYS_S) - 1)]
        self.failures += 1
        return delay

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with self.log_file.open("ab", buffering=0) as log:
            while True:
                try:
                    line = await process.stdout.readline()
                except ValueError:  # longer than the reader holds, which drops what it has of it
                    continue
                if not line:
                    return
                text = line.decode("utf-8", "replace").rstrip()
                self.tail.append(text)
                with contextlib.suppress(OSError):  # a full disk ends no process
                    log.write(f"{text}\n".encode())


def child_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment without our own variables: children take flags only."""
    kept = {name: value for name, value in parent.items() if not name.startswith("MIMO_")}
    return {**CHILD_ENVIRONMENT, **kept}


def python_module(module: str, *flags: str) -> list[str]:
    """Command that runs a leaf as a module of this interpreter."""
    return [sys.executable, "-m", module, *flags]


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux a child gets SIGTERM when the supervisor is killed, so that nothing stays behind."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return set_death_signal
