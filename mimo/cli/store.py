"""`mimo store`: look into the embedding store, check it, empty it."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from mimo.cli.console import errors, fail_with_one_line, say
from mimo.store.inventory import Inventory, Stats, Verdict

DEFAULT_URL = "redis://127.0.0.1:6379"
_MIB = 1 << 20

ResultT = TypeVar("ResultT")

app = typer.Typer(help="Look into the embedding store.", no_args_is_help=True)

StoreUrl = Annotated[
    str,
    typer.Option("--store", envvar="MIMO_STORE", help="Store URL; `mimo up` prints its own."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
@fail_with_one_line
def stats(store: StoreUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Count what is stored."""
    found = _with(store, lambda inventory: inventory.stats())
    say(json.dumps(dataclasses.asdict(found)) if as_json else _table(found))


@app.command()
@fail_with_one_line
def purge(
    store: StoreUrl = DEFAULT_URL,
    encoder: Annotated[
        str, typer.Option(help="Only entries of this encoder fingerprint, as `stats` lists them.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove embeddings and media plans. Safe at any time: what is needed is made again."""
    what = f"the entries of encoder {encoder}" if encoder else "all entries and plans"
    if not yes and not typer.confirm(f"Remove {what}?"):
        raise typer.Exit(1)
    removed = _with(store, lambda inventory: inventory.purge(encoder))
    say(f"removed {removed} names")


@app.command()
@fail_with_one_line
def verify(store: StoreUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Read every byte; remove what is damaged. Status 1 when anything was."""
    with errors.status("reading") as status:

        def report(verdict: Verdict) -> None:
            status.update(f"{verdict.whole} whole, {len(verdict.damaged_keys)} damaged")

        verdict = _with(store, lambda inventory: inventory.verify(report))
    if as_json:
        say(json.dumps(dataclasses.asdict(verdict)))
    else:
        say(f"{verdict.whole} whole, {verdict.torn} torn, {verdict.corrupt} corrupt")
        for key in verdict.damaged_keys:
            say(f"removed {key}")
    if verdict.damaged_keys:
        raise typer.Exit(1)


def _with(url: str, work: Callable[[Inventory], Awaitable[ResultT]]) -> ResultT:
    async def run() -> ResultT:
        async with Inventory.open(url) as inventory:
            return await work(inventory)

    return asyncio.run(run())


def _table(stats: Stats) -> str:
    server = stats.server
    most = int(str(server["maxmemory"]))
    limit = f"{most / _MIB:.0f} MiB, {server['maxmemory_policy']}" if most else "none"
    rows = [
        ("entries", f"{stats.entries} ({stats.embedding_bytes / _MIB:.1f} MiB of embeddings)"),
        ("chunks", f"{stats.chunks} ({stats.orphaned_chunks} without an entry)"),
        ("leases", str(stats.leases)),
        ("media plans", str(stats.plans)),
        ("server", f"{server['version']}, {server['nodes']} node(s)"),
        ("memory", f"{int(str(server['used_memory'])) / _MIB:.1f} MiB; limit {limit}"),
        ("evicted", str(server["evicted_keys"])),
    ]
    rows += [(f"encoder {name[:12]}", f"{count}") for name, count in stats.by_encoder.items()]
    return "\n".join(f"{name:<22}{value}" for name, value in rows)
