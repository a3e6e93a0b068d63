"""Kernels in C++ that are compiled for the CPU at hand when a process first asks for them.

A source takes about a second; the result is kept in the user's cache directory under a name made of
everything it depends on. Whoever calls a kernel has loaded torch, and has a twin in torch for
machines that cannot have it.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# No -ffast-math: a NaN of one request must stay a NaN.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-Wno-psabi",
)
_HEADERS = Path(__file__).parent  # lanes.h and what rests on it
_TIMEOUT_S = 120


class KernelUnavailable(Exception):
    """This machine cannot have the kernel; the message says why."""


@lru_cache
def load_kernel(source: Path) -> ctypes.CDLL:
    """The library of one C++ source, compiled unless it is cached. Raises KernelUnavailable.

    Its OpenMP threads are torch's: the library does not name an OpenMP runtime and finds the one
    that torch has loaded.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        raise KernelUnavailable(
            "no C++ compiler is installed (c++, for example of the package g++)"
        )
    try:
        name = f"{source.stem}-{_fingerprint(source, compiler)}.so"
        directory = _cache_directory()
        if directory is not None:
            return _load(compiler, source, directory / name)
        with tempfile.TemporaryDirectory(prefix="mimo-kernels-") as passing:
            return _load(compiler, source, Path(passing, name))
    except subprocess.CalledProcessError as error:
        raise KernelUnavailable(f"{source.name} does not compile: {_first_line(error)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{source.name}: {error}") from error


def load_function(
    source: Path, name: str, argument_types: Sequence[Any]
) -> "ctypes._NamedFuncPointer":
    """A function of a kernel, which returns nothing. Raises KernelUnavailable."""
    function = load_kernel(source)[name]
    function.argtypes, function.restype = argument_types, None
    return function


def _load(compiler: str, source: Path, library: Path) -> ctypes.CDLL:
    if not library.exists():
        _compile(compiler, source, library)
    return ctypes.CDLL(str(library))


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Appears under its name only when it is whole, whoever else compiles the same."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        compiled, linked = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
        _run(compiler, *_FLAGS, f"-I{_HEADERS}", "-c", str(source), "-o", str(compiled))
        _run(compiler, "-shared", str(compiled), "-o", str(linked))
        linked.replace(library)
    logger.info("compiled %s in %.1f s", source.name, time.perf_counter() - start)


def _run(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout


def _fingerprint(source: Path, compiler: str) -> str:
    """Names everything that a compiled kernel depends on, the instructions of this CPU included."""
    texts = [path.read_text() for path in (source, *sorted(_HEADERS.glob("*.h")))]
    facts = [*texts, *_FLAGS, _run(compiler, "--version"), _cpu()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Model and instructions: what the compiler makes of -march=native."""
    known = ("model name", "flags", "Features", "CPU part")
    with open("/proc/cpuinfo") as lines:
        first = {line.split(":")[0].strip(): line for line in reversed(lines.readlines())}
    return platform.machine() + "".join(first.get(name, "") for name in known)


def _cache_directory() -> Path | None:
    """Of this user alone, because what lies there is executed. None where home is read-only."""
    try:
        directory = Path.home() / ".cache" / "mimo-serve" / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK | os.X_OK):
            return directory
    except (OSError, RuntimeError):  # the latter: a user without a home
        pass
    return None


def _first_line(error: subprocess.CalledProcessError) -> str:
    lines = (line for line in str(error.stderr).splitlines() if "error" in line)
    return next(lines, str(error))
