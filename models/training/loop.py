"""The loop that every stage runs in: steps, a bar, a log and state to resume from."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import Tensor

from models.training.parallel import ALONE, Ranks
from models.training.state import SUFFIX, read_state, write_state

LOG_EVERY = 20  # steps
_SHOWN_EVERY_S = 60.0  # without a terminal


class Stage(Protocol):
    """A part of training. Step i does the same whether or not the run was interrupted before."""

    name: str
    steps: int

    def step(self, index: int) -> dict[str, float]:
        """Learn once; figures for the log."""

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's state."""

    def load(self, state: Mapping[str, Tensor]) -> None: ...


def bars() -> Progress:
    """Progress bars as all commands show them."""
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TextColumn("{task.completed:>6}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        _Figures(),
    )


class _Figures(ProgressColumn):
    """Losses beside the bar of a stage."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("figures", ""))


def run(
    stage: Stage,
    root: Path,
    progress: Progress,
    *,
    save_every_s: float,
    ranks: Ranks = ALONE,
) -> None:
    """Run the steps that are left; returns at once when there are none.

    State lies in ``root/state``, figures in ``root/logs``. Only rank 0 writes.
    """
    path = root / "state" / f"{stage.name}{SUFFIX}"
    done = 0
    if path.exists():
        state, done = read_state(path)
        stage.load(state)
    writes = ranks.rank == 0
    bar = progress.add_task(stage.name, total=stage.steps, completed=done, visible=writes)
    saved = shown = began = time.monotonic()
    first = done
    while done < stage.steps:
        figures = stage.step(done)
        done += 1
        if not writes:
            continue
        now = time.monotonic()
        progress.update(bar, completed=done, figures=_short(figures))
        if done % LOG_EVERY == 0 or done == stage.steps:
            _log(root, stage.name, {"step": done, "seconds": round(now - began, 1)} | figures)
        if not progress.console.is_terminal and now - shown > _SHOWN_EVERY_S:
            shown = now
            pace = (now - began) / (done - first)
            left = (stage.steps - done) * pace / 60
            print(f"{stage.name} {done}/{stage.steps} {pace:.2f} s/step, {left:.0f} min left,"
                  f" {_short(figures)}", flush=True)  # fmt: skip
        if now - saved > save_every_s or done == stage.steps:
            saved = now
            write_state(path, stage.state(), done)


def _short(figures: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.3g}" for name, value in figures.items())


def _log(root: Path, name: str, entry: Mapping[str, float]) -> None:
    folder = root / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")
