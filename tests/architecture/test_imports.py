"""Importing does nothing; heavy packages stay where they belong; the environment has one reader."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mimo", "services", "gateway")

# Imports every module in a process where sockets, subprocesses, threads and file writes raise.
BARE_PROCESS = """
import builtins, importlib, io, os, pathlib, socket, subprocess, sys, threading
import {preload}

def refuse(what):
    def raiser(*args, **kwargs):
        raise AssertionError(f"importing {{sys.argv[-1]}} {{what}}")
    return raiser

real_open = builtins.open
def guarded_open(file, mode="r", *args, **kwargs):
    if set(mode) & set("wax+"):
        raise AssertionError(f"importing opened {{file}} for writing")
    return real_open(file, mode, *args, **kwargs)

sys.dont_write_bytecode = True
builtins.open = io.open = guarded_open
socket.socket.connect = refuse("connected")
socket.socket.bind = refuse("bound a socket")
subprocess.Popen.__init__ = refuse("started a process")
threading.Thread.start = refuse("started a thread")
os.fork = refuse("forked")
for name in {modules!r}:
    importlib.import_module(name)
print("imported")
"""

# Third parties that start a thread or probe the machine when first imported; not ours to judge.
PRELOAD = "torch, grpc, redis, numpy, av, PIL.Image, uvicorn, prometheus_client, tokenizers"


def module_names(*packages: str) -> list[str]:
    names = []
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )


def test_every_module_imports_in_a_bare_process() -> None:
    result = run_python(BARE_PROCESS.format(preload=PRELOAD, modules=module_names(*PACKAGES)))
    assert result.stdout.strip() == "imported", result.stderr


@pytest.mark.parametrize(
    "package", ["gateway", "mimo.rpc", "mimo.store", "mimo.encoder", "mimo.cli"]
)
def test_torch_free_packages_import_without_torch(package: str) -> None:
    modules = module_names(package.replace(".", "/"))
    code = f"""
import importlib, sys
sys.modules["torch"] = None
for name in {modules!r}:
    importlib.import_module(name)
print("imported")
"""
    result = run_python(code)
    assert result.stdout.strip() == "imported", result.stderr


def test_only_the_configuration_module_reads_the_environment() -> None:
    readers = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.relative_to(ROOT).parts[:2] == ("mimo", "v1"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                    readers.append(str(path.relative_to(ROOT)))
    # The supervisor hands its own environment on to its children, and a media worker empties its.
    allowed = {"mimo/config.py", "mimo/cli/child.py", "gateway/media/sandbox.py"}
    assert set(readers) <= allowed
