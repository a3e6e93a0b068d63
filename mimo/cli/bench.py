"""`mimo bench`: load on a running system, and what it did to the answers' times."""

import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mimo.checkpoint.directory import model_directory
from mimo.cli.client import TIMEOUT_S, ChatClient, GrpcClient, RestClient
from mimo.cli.console import console, errors, fail_with_one_line, say
from mimo.cli.load.progress import LoadProgress
from mimo.cli.load.report import parse_limits, summarise
from mimo.cli.load.run import (
    DEFAULT_CONCURRENCY,
    DEFAULT_REQUESTS,
    Schedule,
    num_distinct_media,
    send,
    warm_up,
)
from mimo.cli.load.tables import tables
from mimo.cli.load.workload import Workload, WorkloadName
from mimo.cli.stack import Stack, StackConfig, parse_replicas
from mimo.cli.stopping import run_until_signal
from mimo.errors import ConfigError

_EXAMPLES = {
    "--grpc 127.0.0.1:50050 --concurrency 8 --requests 200": (
        "Eight askers, each with its next question when it has its answer: the most the system can "
        "do with so many at once."
    ),
    "--grpc 127.0.0.1:50050 --rate 5 --duration 60 --slo ttft=500,tpot=50": (
        "Five requests a second at random moments, whatever becomes of them: what users wait for. "
        "Times count from the moment a request was due."
    ),
    "--workload image --distinct-media 4": (
        "Four pictures in turn, so that the embedding cache serves all but four requests. Without "
        "the option every picture is new."
    ),
    "--input-tokens 512 --prefix-tokens 384": (
        "Prompts with a common beginning, as of a system prompt: what the prefix cache saves."
    ),
    "--rest http://127.0.0.1:8080 --requests 16 --json -": (
        "Figures for another program, on the last line of the standard output."
    ),
}
EXAMPLES = "Examples:\n\n" + "\n\n".join(
    f"[bold]mimo bench {words}[/bold]: {why}" for words, why in _EXAMPLES.items()
)


@dataclass(frozen=True)
class Target:
    """What is measured: a running system, or with neither address one that is started for it."""

    grpc: str
    rest: str
    model: Path | None
    replicas: str
    timeout_s: float

    def __post_init__(self) -> None:
        if self.grpc and self.rest:
            raise ConfigError("--rest and --grpc exclude each other")
        if (self.grpc or self.rest) and (self.model or self.replicas):
            raise ConfigError("--model and --replicas are for a system started here")

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[ChatClient]:
        """A client of it. Raises StartupError when a system cannot be started."""
        async with contextlib.AsyncExitStack() as resources:
            address = self.grpc
            if not address and not self.rest:
                config = StackConfig(
                    model=model_directory(str(self.model or "")),
                    replicas=parse_replicas(self.replicas),
                )
                stack = await resources.enter_async_context(Stack.running(config, _note))
                address = stack.grpc_address
            client: ChatClient = (
                RestClient(self.rest, self.timeout_s)
                if self.rest
                else GrpcClient(address, self.timeout_s)
            )
            resources.push_async_callback(client.close)
            yield client


SYSTEM, WHEN, WHAT, FIGURES = "System", "When to ask", "What to ask", "Figures"


@fail_with_one_line
def bench(
    grpc: Annotated[
        str, typer.Option(help="gRPC host:port of a running system.", rich_help_panel=SYSTEM)
    ] = "",
    rest: Annotated[
        str,
        typer.Option(
            help="REST URL instead. Tokens count when their text appears.", rich_help_panel=SYSTEM
        ),
    ] = "",
    model: Annotated[
        Path | None,
        typer.Option(
            help="Without an address: start a system with this model.", rich_help_panel=SYSTEM
        ),
    ] = None,
    replicas: Annotated[
        str,
        typer.Option(
            help="Of that system, as gateway=1,vision=2,audio=1,llm=1.", rich_help_panel=SYSTEM
        ),
    ] = "",
    concurrency: Annotated[
        int | None,
        typer.Option(
            help=f"Closed loop: askers at once. Default: {DEFAULT_CONCURRENCY}.",
            min=1,
            rich_help_panel=WHEN,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Open loop: requests a second, a Poisson process.", min=0, rich_help_panel=WHEN
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help=f"Requests to send. Default: {DEFAULT_REQUESTS}, or what --duration has room for.",
            min=1,
            rich_help_panel=WHEN,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds in which requests are sent.", min=0, rich_help_panel=WHEN),
    ] = None,
    warmup: Annotated[
        int, typer.Option(help="Requests before the clock starts.", min=0, rich_help_panel=WHEN)
    ] = 2,
    deadline: Annotated[
        float, typer.Option(help="Seconds a request may take.", min=0.001, rich_help_panel=WHEN)
    ] = TIMEOUT_S,
    workload: Annotated[
        WorkloadName, typer.Option(help="mixed: all kinds in turn.", rich_help_panel=WHAT)
    ] = "text",
    input_tokens: Annotated[
        int,
        typer.Option(
            help="Words of a prompt, a token each; template and media come on top.",
            min=1,
            rich_help_panel=WHAT,
        ),
    ] = 128,
    prefix_tokens: Annotated[
        int, typer.Option(help="Of these, the same in all prompts.", min=0, rich_help_panel=WHAT)
    ] = 0,
    output_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of an answer, whatever the model would like.", min=1, rich_help_panel=WHAT
        ),
    ] = 64,
    distinct_media: Annotated[
        int,
        typer.Option(
            help="Media of each kind, in turn. 0: each request has its own.",
            min=0,
            rich_help_panel=WHAT,
        ),
    ] = 0,
    image_side: Annotated[
        int, typer.Option(help="Pixels, of pictures and videos.", min=28, rich_help_panel=WHAT)
    ] = 224,
    audio_seconds: Annotated[
        float, typer.Option(help="Length of a sound.", min=0.1, rich_help_panel=WHAT)
    ] = 2.0,
    video_seconds: Annotated[
        float, typer.Option(help="Length of a video.", min=0.25, rich_help_panel=WHAT)
    ] = 2.0,
    drafts: Annotated[
        int | None,
        typer.Option(
            help="Draft tokens at most; 0 turns speculation off.", min=0, rich_help_panel=WHAT
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of prompts, media and arrivals.", min=0, rich_help_panel=WHAT)
    ] = 0,
    salt: Annotated[
        str,
        typer.Option(
            help="Runs with the same one share caches. Default: nobody else's.",
            rich_help_panel=WHAT,
        ),
    ] = "",
    slo: Annotated[
        str,
        typer.Option(
            help="Limits in ms, as ttft=500,tpot=50,e2e=3000: how many answers a second keep them.",
            rich_help_panel=FIGURES,
        ),
    ] = "",
    as_json: Annotated[
        str,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write all figures there; - is the standard output.",
            rich_help_panel=FIGURES,
        ),
    ] = "",
) -> None:
    """Put load on a running system: TTFT, ITL, throughput, cache hits, acceptance of drafts.

    Without an address a system is started as `mimo up` would, measured and stopped.

    Latencies are those of complete answers. ITL is the time between two deliveries; accepted drafts arrive together. TPOT is the time per token after the first delivery, which some tools call ITL.
    """  # noqa: E501 (a paragraph of the help is one line)
    schedule = Schedule(
        concurrency=concurrency, rate=rate, requests=requests, duration_s=duration, seed=seed
    )
    asked = Workload(
        name=workload,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix_tokens=prefix_tokens,
        distinct_media=distinct_media,
        image_side=image_side,
        audio_seconds=audio_seconds,
        video_seconds=video_seconds,
        max_draft_tokens=drafts,
        seed=seed,
        salt=salt or f"bench {secrets.token_hex(8)}",
    )
    asked = replace(asked, distinct_media=num_distinct_media(asked, schedule))
    target = Target(grpc, rest, model, replicas, deadline)
    limits = parse_limits(slo)
    outcome: dict[str, Any] = {}

    async def measure() -> None:
        outcome.update(await _measure(target, asked, schedule, warmup, limits))

    run_until_signal(measure)
    _show(outcome, as_json)
    if outcome["requests"]["failed"] or not outcome["requests"]["ok"]:
        raise typer.Exit(1)


async def _measure(
    target: Target, workload: Workload, schedule: Schedule, warmup: int, limits: dict[str, float]
) -> dict[str, Any]:
    media = workload.make_media()
    async with target.client() as client:
        await warm_up(client, workload, media, warmup)
        load_before = os.getloadavg()[0]
        with LoadProgress(
            errors, requests=schedule.num_requests, duration_s=schedule.duration_s or 0.0
        ) as progress:
            samples = await send(client, workload, media, schedule, progress)
    if not samples:
        raise ConfigError("no request was due within --duration")
    config = {
        "face": "rest" if target.rest else "grpc",
        "loop": "open" if schedule.rate else "closed",
        **asdict(schedule),
        "concurrency": None if schedule.rate else schedule.workers,
        "requests": schedule.num_requests,
        "workload": asdict(workload),
        "deadline_s": target.timeout_s,
        "limits_ms": limits,
    }
    machine = {"load_average_before": load_before, "load_average_after": os.getloadavg()[0]}
    return {"config": config, "machine": machine, **summarise(samples, limits)}


def _show(figures: dict[str, Any], as_json: str) -> None:
    """The table, and the JSON where it was asked for: alone on the standard output for ``-``."""
    (errors if as_json == "-" else console).print(tables(figures))
    if as_json == "-":
        say(json.dumps(figures))
    elif as_json:
        Path(as_json).write_text(json.dumps(figures, indent=1) + "\n")


def _note(line: str) -> None:
    errors.print(line, markup=False)
