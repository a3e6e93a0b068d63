"""What the C library does with the memory of buffers that were freed."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 256 << 20
_MAPPED_FROM = 32 << 20  # the most that glibc accepts


def keep_freed_buffers(max_bytes: int = _KEPT_BYTES) -> None:
    """Let this process keep so much freed memory for the next buffers.

    By default glibc hands buffers of some megabytes back to the system when they are freed, and a
    forward pass that takes as many again a moment later pays a page fault for every 4 KiB of them.
    Does nothing with a C library that has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        mallopt(_M_TRIM_THRESHOLD, max_bytes)
