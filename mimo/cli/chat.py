"""`mimo chat`: ask one question, or talk."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mimo.cli.client import Answer, Attachment, ChatClient, GrpcClient, Piece, RestClient, Turn
from mimo.cli.console import console, errors, fail_with_one_line, say
from mimo.errors import ConfigError, MimoError

DEFAULT_REST = "http://127.0.0.1:8080"
HELP = "/image F, /audio F, /video F attach a file; /reset forgets; /stats shows the last call"


@fail_with_one_line
def chat(
    question: Annotated[str | None, typer.Argument(help="Without one: a conversation.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Picture to attach.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="Sound to attach.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="Video to attach.")] = None,
    rest: Annotated[str, typer.Option(help=f"REST URL. Default: {DEFAULT_REST}.")] = "",
    grpc: Annotated[str, typer.Option(help="gRPC host:port instead of REST.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, usage, mimo.")
    ] = False,
) -> None:
    """Ask about pictures, sounds and videos. Needs a running system (see `mimo up`)."""
    if rest and grpc:
        raise ConfigError("--rest and --grpc exclude each other")
    if as_json and question is None:
        raise ConfigError("--json needs a question")
    attachments = [
        Attachment.read(kind, path)
        for kind, paths in (("image", image), ("audio", audio), ("video", video))
        for path in paths or ()
    ]
    asyncio.run(_chat(question, attachments, rest, grpc, max_tokens, as_json))


async def _chat(
    question: str | None,
    attachments: Sequence[Attachment],
    rest: str,
    grpc: str,
    max_tokens: int | None,
    as_json: bool,
) -> None:
    client: ChatClient = GrpcClient(grpc) if grpc else RestClient(rest or DEFAULT_REST)
    options = {} if max_tokens is None else {"max_tokens": max_tokens}
    try:
        if question is None:
            await _converse(client, list(attachments), options)
            return
        turns = [Turn("user", question, tuple(attachments))]
        text, answer = await stream_answer(client, turns, options, quiet=as_json)
        if as_json:
            result = {
                "text": text,
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
                "mimo": answer.report,
            }
            say(json.dumps(result, ensure_ascii=False))
    finally:
        await client.close()


async def stream_answer(
    client: ChatClient, turns: Sequence[Turn], options: dict[str, int], *, quiet: bool = False
) -> tuple[str, Answer]:
    """Print the answer as it comes; returns its text and the report. Raises MimoError."""
    text, answer = "", Answer("")
    async for event in client.ask(turns, **options):
        if isinstance(event, Answer):
            answer = event
        else:
            text += "" if event.reasoning else event.text
            if not quiet:
                _print_piece(event)
    if not quiet:
        say("")
    return text, answer


async def _converse(
    client: ChatClient, attachments: list[Attachment], options: dict[str, int]
) -> None:
    say(f"{HELP}; Ctrl-D ends.")
    turns: list[Turn] = []
    last = Answer("")
    while True:
        try:
            line = (await asyncio.to_thread(console.input, "[bold]> [/bold]")).strip()
        except EOFError:
            return
        command, _, argument = line.partition(" ")
        if command in ("/image", "/audio", "/video"):
            _attach(attachments, command[1:], argument.strip())
        elif command == "/reset":
            turns, attachments = [], []
        elif command == "/stats":
            say(json.dumps({"usage": last.usage, "mimo": last.report}, indent=2))
        elif command.startswith("/"):
            say(HELP)
        elif line:
            asked = [*turns, Turn("user", line, tuple(attachments))]
            try:
                text, last = await stream_answer(client, asked, options)
            except MimoError as error:
                errors.print(str(error), markup=False)
                continue
            turns, attachments = [*asked, Turn("assistant", text)], []


def _attach(attachments: list[Attachment], kind: str, path: str) -> None:
    try:
        attachments.append(Attachment.read(kind, Path(path).expanduser()))
    except MimoError as error:
        errors.print(str(error), markup=False)


def _print_piece(piece: Piece) -> None:
    console.print(piece.text, end="", markup=False, style="dim" if piece.reasoning else None)
