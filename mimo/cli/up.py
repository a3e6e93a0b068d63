"""`mimo up`: the whole system on this machine, in the foreground."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from mimo.checkpoint.directory import model_directory
from mimo.cli.console import console, fail_with_one_line, say
from mimo.cli.options import Attention, Dtype, Model, Threads
from mimo.cli.stack import Stack, StackConfig, parse_replicas
from mimo.cli.stopping import run_until_signal

READY_BLOCK = """
[bold]ready[/bold]
  REST        {rest}/v1
  gRPC        {grpc}
  playground  {rest}/playground

Try:
  curl {rest}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Hello!"}}]}}'

  mimo chat --rest {rest} "Hello!"
  mimo chat --rest {rest} --image mimo/cli/samples/picture.png "What is in the picture?"
  mimo chat --rest {rest} --audio mimo/cli/samples/sound.wav "What does the voice say?"

Ctrl-C stops everything."""


@fail_with_one_line
def up(
    model: Model = None,
    replicas: Annotated[
        str, typer.Option(help="Processes per role, such as gateway=1,vision=2,audio=1,llm=1.")
    ] = "",
    store: Annotated[
        str, typer.Option(help="Store URL (redis://, unix://). Default: start one.")
    ] = "",
    rest_port: Annotated[
        int, typer.Option(min=0, max=65535, help="REST port; 0 takes a free one.")
    ] = 8080,
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")
    ] = 50050,
    ready_file: Annotated[
        Path | None, typer.Option(help="JSON file written once everything answers.")
    ] = None,
    attention: Attention = "",
    dtype: Dtype = "",
    threads: Threads = 0,
) -> None:
    """Run gateway, encoders, decoder and store together until Ctrl-C."""
    config = StackConfig(
        model=model_directory(str(model or "")),
        replicas=parse_replicas(replicas),
        store=store,
        rest_port=rest_port,
        grpc_port=grpc_port,
        ready_file=ready_file,
        attention=attention,
        dtype=dtype,
        threads=threads,
    )
    with contextlib.suppress(typer.Exit):  # a signal is how this command ends
        run_until_signal(lambda: _serve(config))


async def _serve(config: StackConfig) -> None:
    say(f"starting mimo with {config.model.name}")
    async with Stack.running(config, say) as stack:
        console.print(READY_BLOCK.format(rest=stack.rest_url, grpc=stack.grpc_address))
        try:
            await asyncio.Event().wait()
        finally:
            say("stopping")
