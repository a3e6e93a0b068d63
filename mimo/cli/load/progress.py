"""How a running load looks: a bar, counts and the rate of tokens, on standard error."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mimo.cli.load.sample import Sample


class LoadProgress:
    """A bar over the requests, or over the duration when their number is open. Use as a context
    manager; shows nothing where there is no terminal."""

    def __init__(self, console: Console, *, requests: int | None, duration_s: float) -> None:
        self._requests = requests
        self._ok = self._refused = self._failed = self._tokens = 0
        self._began = time.monotonic()
        self._bar = Progress(
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=duration_s if requests is None else requests)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add_tokens(self, count: int) -> None:
        self._tokens += count
        self._show()

    def add(self, sample: Sample) -> None:
        self._ok += sample.is_ok
        self._refused += sample.is_refused
        self._failed += not sample.is_ok and not sample.is_refused
        self._show()

    def _show(self) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        num_ended = self._ok + self._refused + self._failed
        text = (
            f"{self._ok} ok, {self._refused} refused, {self._failed} failed, "
            f"{self._tokens / seconds:.0f} tokens/s"
        )
        completed = seconds if self._requests is None else num_ended
        self._bar.update(self._task, completed=completed, description=text)
