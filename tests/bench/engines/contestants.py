"""Every engine: what it runs on, in which form of the model, with which settings."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.engines import environments
from tests.bench.engines.checkpoints import Forms
from tests.bench.engines.environments import Environment, Unavailable
from tests.bench.engines.process import RUNNERS, EngineProcess

TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True)
class Contestant:
    """``environment`` None: this interpreter. ``form``: the model as this engine reads it."""

    name: str
    runner: str
    environment: Environment | None
    form: Callable[[Forms], Path]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def start(
        self, forms: Forms, cache: Path, config: Mapping[str, Any]
    ) -> AbstractContextManager[EngineProcess]:
        """Raises Unavailable when it cannot run here."""
        python = Path(sys.executable)
        if self.environment is not None:
            python = self.environment.python(cache)
        path = self.form(forms)
        if path == forms.gguf and not path.exists():
            _write_gguf(python, forms)
        environment = {"OMP_NUM_THREADS": str(config["threads"])}
        if self.environment is environments.VLLM:
            environment["LD_PRELOAD"] = _vllm_preload(python)
        return EngineProcess(
            self.runner,
            python,
            {**config, **self.settings, "model": str(path)},
            environment,
            cache / f"{self.name}.log",
        )


CONTESTANTS = {
    each.name: each
    for each in (
        Contestant("mimo", "run_mimo.py", None, lambda forms: forms.ours, {"drafts": 0}),
        Contestant("mimo-mtp", "run_mimo.py", None, lambda forms: forms.ours, {"drafts": 3}),
        Contestant(
            "transformers",
            "run_transformers.py",
            environments.TRANSFORMERS,
            lambda forms: forms.transformers,
        ),
        Contestant(
            "vllm",
            "run_vllm.py",
            environments.VLLM,
            lambda forms: forms.square,
            {"compiled": False},
        ),
        Contestant(
            "vllm-compiled",
            "run_vllm.py",
            environments.VLLM,
            lambda forms: forms.square,
            {"compiled": True},
        ),
        Contestant("llama", "run_llama.py", environments.LLAMA, lambda forms: forms.gguf),
    )
}


def _write_gguf(python: Path, forms: Forms) -> None:
    partial = forms.gguf.with_suffix(".partial")
    converter, kind = RUNNERS / "to_gguf.py", {"bfloat16": "bf16", "float32": "f32"}[forms.dtype]
    command = [str(python), str(converter), str(forms.float32), str(partial), kind]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise Unavailable(f"no GGUF: {(ended.stderr.strip().splitlines() or ['?'])[-1]}")
    partial.rename(forms.gguf)


def _vllm_preload(python: Path) -> str:
    """Its documented allocator and OpenMP runtime, as far as they are installed."""
    libraries = [python.parents[1] / "lib" / "libiomp5.so", TCMALLOC]
    return ":".join(str(library) for library in libraries if library.exists())
