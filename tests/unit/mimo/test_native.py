"""Kernels compiled on the spot: kept, told apart, and done without."""

import ctypes
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from mimo.nn import native
from mimo.nn.native import KernelUnavailable

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler is installed"
)

SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "mimo-serve" / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cpp"
    path.write_text(SOURCE)
    return path


def load(source: Path) -> ctypes.CDLL:
    """As another process would."""
    native.load_kernel.cache_clear()
    return native.load_kernel(source)


@needs_compiler
def test_a_kernel_is_compiled_once(source: Path, cache: Path) -> None:
    assert load(source).answer() == 42
    (library,) = cache.iterdir()
    compiled = library.stat().st_mtime_ns
    assert load(source).answer() == 42
    assert [library] == list(cache.iterdir()) and library.stat().st_mtime_ns == compiled


@needs_compiler
def test_another_source_or_compiler_is_another_kernel(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(source)
    source.write_text(SOURCE.replace("42", "43"))
    assert load(source).answer() == 43
    assert len(list(cache.iterdir())) == 2
    other = tmp_path / "c++"
    real = shutil.which("c++")
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo another || exec {real} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert load(source).answer() == 43
    assert len(list(cache.iterdir())) == 3


@needs_compiler
def test_threads_are_those_of_torch(source: Path) -> None:
    """One OpenMP runtime: a second one would keep threads of its own spinning beside torch's."""
    source.write_text('#include <omp.h>\nextern "C" int most() { return omp_get_max_threads(); }')
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert load(source).most() == threads
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_it_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelUnavailable, match="no C.. compiler is installed"):
        load(source)


@needs_compiler
def test_a_source_that_does_not_compile_gives_the_first_error(source: Path, cache: Path) -> None:
    source.write_text("int answer() { return nothing; }")
    with pytest.raises(KernelUnavailable, match="kernel.cpp does not compile: .*nothing"):
        load(source)
    assert not list(cache.iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    assert load(source).answer() == 42
    assert set(tmp_path.iterdir()) == before  # nor is anything left elsewhere
