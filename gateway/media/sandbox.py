"""What a media worker gives up before it touches a file.

The process starts with an empty environment in an empty directory; here it loses the network, core
dumps, file writing, standard error and new privileges, and each job gets its own bounds on memory
and CPU time. Defence in depth: whatever a platform lacks is skipped.
"""

import contextlib
import ctypes
import os
import resource
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_NO_NEW_PRIVS = 38
_MAX_OPEN_FILES = 64


def enter() -> None:
    """Drop what decoding does not need, once, before the first job."""
    _silence()
    _bound(resource.RLIMIT_CORE, 0, for_good=True)
    _bound(resource.RLIMIT_FSIZE, 0, for_good=True)
    _bound(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES, for_good=True)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # A network namespace of its own has no way out; only root gets one without a user's.
        if libc.unshare(_CLONE_NEWNET) != 0:
            libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def limit_job(*, cpu_s: int, memory_bytes: int) -> None:
    """Bound the next job. Past the CPU bound the kernel kills the process with SIGXCPU; past the
    memory bound allocations raise MemoryError."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    _bound(resource.RLIMIT_CPU, used + cpu_s + 1)
    _bound(resource.RLIMIT_AS, memory_bytes)


def environment(package_root: str) -> dict[str, str]:
    """The whole environment of a worker: where its code is, and one thread for array code."""
    return {
        "PYTHONPATH": package_root,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Frames are large and short-lived; mapping each anew costs more than decoding it.
        "MALLOC_MMAP_THRESHOLD_": "268435456",
        "MALLOC_TRIM_THRESHOLD_": "536870912",
    }


def _silence() -> None:
    """Codec libraries print what they find odd about a file: that is for nobody's log."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _bound(kind: int, limit: int, *, for_good: bool = False) -> None:
    """Lower a limit; unless ``for_good``, the next job may raise it again."""
    with contextlib.suppress(OSError, ValueError):
        _, hardest = resource.getrlimit(kind)
        if hardest != resource.RLIM_INFINITY:
            limit = min(limit, hardest)
        resource.setrlimit(kind, (limit, limit if for_good else hardest))
