"""A child process of a local stack."""

import sys
import time
from pathlib import Path

import pytest

from mimo.cli.child import RESTART_DELAYS_S, STEADY_S, Child, ChildSpec

FULL = Path("/dev/full")
LINE_LIMIT = 1 << 16  # of asyncio's reader


async def test_a_line_of_any_length_does_not_end_the_reading(tmp_path: Path) -> None:
    """Or else the pipe fills up, the process hangs on its next log line, and nobody restarts it."""
    script = f"for n in (10, {LINE_LIMIT * 4}, 20): print('x' * n, flush=True)"
    child = Child(ChildSpec("llm", 0, [sys.executable, "-c", script], "a:1"), tmp_path / "log")
    await child.start()
    assert await child.wait() == 0
    assert (child.tail[0], child.tail[-1]) == ("x" * 10, "x" * 20)
    assert all(len(line) < LINE_LIMIT * 4 for line in child.tail)


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
async def test_a_full_disk_ends_nobody() -> None:
    child = Child(
        ChildSpec("llm", 0, [sys.executable, "-c", "print('a'); print('b')"], "a:1"), FULL
    )
    await child.start()
    assert await child.wait() == 0
    assert list(child.tail) == ["a", "b"]


async def test_a_program_that_is_gone_is_not_tried_without_a_pause(tmp_path: Path) -> None:
    child = Child(ChildSpec("llm", 0, [str(tmp_path / "gone")], "a:1"), tmp_path / "log")
    child.started = time.monotonic() - 2 * STEADY_S
    delays = []
    for _ in range(3):
        delays.append(child.restart_delay())
        with pytest.raises(FileNotFoundError):
            await child.start()
    assert delays == list(RESTART_DELAYS_S[:3])
