"""An engine in a process of its own that stands still while it is not its turn."""

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.engines.environments import Unavailable

RUNNERS = Path(__file__).parent
ROOT = RUNNERS.parents[2]
START_S = 1800.0  # vLLM compiles
ROUND_S = 900.0


class EngineProcess:
    """Starts a runner and waits until its model is loaded; then frozen but for its rounds, so that
    nothing of it, idle threads included, disturbs the others. Use as a context manager."""

    def __init__(
        self,
        runner: str,
        python: Path,
        config: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self._log = log
        reading, writing = os.pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), str(RUNNERS / runner), json.dumps({**config, "fd": writing})],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        try:
            self._answer(START_S)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and whatever it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # an order that it never read
                self._process.stdin.close()

    def run(self, ids: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds of one batch, and its new tokens. Raises Unavailable when it fails, and then
        the engine has ended."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        order = json.dumps({"ids": ids, "num_tokens": num_tokens}) + "\n"
        try:
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
            answer = self._answer(ROUND_S)
        except BrokenPipeError:
            self.close()
            raise Unavailable(self._last_words()) from None
        except Unavailable:
            self.close()
            raise
        self._signal(signal.SIGSTOP)
        return answer["seconds"], answer["tokens"]

    def _answer(self, patience_s: float) -> dict[str, Any]:
        readable, _, _ = select.select([self._answers], [], [], patience_s)
        line = self._answers.readline() if readable else ""
        if not readable:
            raise Unavailable(f"no answer in {patience_s:.0f} s")
        if not line:
            raise Unavailable(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
        return lines[-1][:300] if lines else "it ended without a word"

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
