"""Freed buffers are there for the next ones, counted in page faults of a process of its own."""

import platform
import subprocess
import sys

import pytest

PAGES = 4 * (6 << 20) // 4096

ROUNDS = """
import resource
from mimo.nn.heap import keep_freed_buffers

keep_freed_buffers()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def buffers():
    return [bytearray(6 << 20) for _ in range(4)]  # all at once, then all are freed

buffers(), buffers()
before = faults()
for _ in range(5):
    buffers()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_buffers_of_the_same_size_fault_only_once() -> None:
    child = subprocess.run([sys.executable, "-c", ROUNDS], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < PAGES
