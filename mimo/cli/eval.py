"""`mimo eval`: questions with known answers, asked of the running services."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mimo.checkpoint.directory import model_directory
from mimo.cli import score
from mimo.cli.client import ChatClient, GrpcClient, RestClient
from mimo.cli.console import console, errors, fail_with_one_line
from mimo.cli.measure import Outcome, ask_all
from mimo.cli.options import Attention, Dtype, Model, Threads
from mimo.cli.prompts import Prompt, read_goals, read_prompts
from mimo.cli.stack import Stack, StackConfig, parse_replicas
from mimo.cli.stopping import run_until_signal
from mimo.errors import ConfigError

_SHOWN_FAILURES = 3


@fail_with_one_line
def evaluate(
    prompts: Annotated[
        Path, typer.Option(help="Folder that `python -m models.training prompts` writes.")
    ],
    target: Annotated[
        str, typer.Option(help="REST URL or gRPC host:port of a system. Default: start one.")
    ] = "",
    skills: Annotated[str, typer.Option(help="Only these, such as shapes,copy.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Prompts per skill at most; 0: all.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions asked at once.")] = 16,
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - is stdout.")
    ] = "",
    gates: Annotated[
        bool, typer.Option("--gates", help="Status 1 when a goal of the folder is missed.")
    ] = False,
    model: Model = None,
    attention: Attention = "",
    dtype: Dtype = "",
    threads: Threads = 0,
) -> None:
    """Measure accuracy per skill and how far drafts reach, through the running services.

    The last four options are for the system that this command starts when it gets no --target.
    """
    asked = read_prompts(prompts, [name.strip() for name in skills.split(",") if name], limit)
    goals = read_goals(prompts)
    if gates and not goals:
        raise ConfigError(f"--gates: {prompts} has no goals.json")
    if target and (attention or dtype or threads):
        raise ConfigError("--attention, --dtype and --threads exclude --target")
    if json_file not in ("", "-") and not Path(json_file).absolute().parent.is_dir():
        raise ConfigError(f"--json: {json_file} is in no directory")
    config = None
    if not target:
        directory = model_directory(str(model or ""))
        replicas = parse_replicas("")
        config = StackConfig(directory, replicas, attention=attention, dtype=dtype, threads=threads)

    async def run() -> None:
        outcome = await _measure(asked, target, config, concurrency)
        is_good = _show(outcome, goals, json_file, concurrency)
        if outcome.failures or (gates and not is_good):
            raise typer.Exit(1)

    run_until_signal(run)


async def _measure(
    prompts: Sequence[Prompt], target: str, config: StackConfig | None, concurrency: int
) -> Outcome:
    """Ask a system that is there or, with a ``config``, one that lives as long as this takes."""
    if config is None:
        return await _ask_with_progress(prompts, target, concurrency)
    _note(f"starting mimo with {config.model.name}")
    async with Stack.running(config, _note) as stack:
        outcome = await _ask_with_progress(prompts, stack.rest_url, concurrency)
        _note("stopping")
    return outcome


async def _ask_with_progress(prompts: Sequence[Prompt], target: str, concurrency: int) -> Outcome:
    is_rest = target.startswith(("http://", "https://"))
    client: ChatClient = RestClient(target) if is_rest else GrpcClient(target)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=errors) as progress:
            bar = progress.add_task("asking", total=len(prompts))
            return await ask_all(client, prompts, concurrency, lambda: progress.advance(bar))
    finally:
        await client.close()


def _show(outcome: Outcome, goals: dict[str, float], json_file: str, concurrency: int) -> bool:
    """Print and write the figures. -> whether they reach the goals for what was measured."""
    report: dict[str, Any] = score.report(outcome.scores)
    failed = len(outcome.failures)
    conditions = {"failed": failed, "seconds": round(outcome.seconds, 1)}
    report |= conditions | {"concurrency": concurrency}
    out = errors if json_file == "-" else console
    out.print(score.table(report, goals))
    out.print(score.acceptance(report, goals), markup=False)
    answered = sum(result["n"] for result in report["skills"].values())
    out.print(f"{answered} answers in {outcome.seconds:.0f} s, {concurrency} at a time")
    for prompt, error in outcome.failures[:_SHOWN_FAILURES]:
        errors.print(f"failed: {prompt.skill}: {prompt.question}: {error}", markup=False)
    if failed:
        errors.print(f"{failed} requests failed", markup=False)
    if json_file == "-":
        print(json.dumps(report))
    elif json_file:
        Path(json_file).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    figures = score.skill_figures(report) | score.draft_figures(report)
    measured = {name: goal for name, goal in goals.items() if name in figures}
    return not score.missed(measured, figures)


def _note(text: str) -> None:
    """What is no result goes to the error stream, so that --json - stays one object."""
    errors.print(text, markup=False)
