"""`mimo demo`: the whole system, six questions, where the time went."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mimo.checkpoint.directory import model_directory
from mimo.cli.chat import stream_answer
from mimo.cli.client import Answer, Attachment, RestClient, Turn
from mimo.cli.console import console, fail_with_one_line, say
from mimo.cli.stack import Stack, StackConfig, parse_replicas
from mimo.cli.stopping import run_until_signal
from mimo.errors import Internal

SAMPLES = Path(__file__).parent / "samples"
MAX_TOKENS = 24


@dataclass(frozen=True)
class Question:
    """One question of the demo. ``files`` are names in the samples folder, by kind."""

    label: str
    text: str
    files: tuple[tuple[str, str], ...] = ()


PICTURE, SOUND, VIDEO = ("image", "picture.png"), ("audio", "sound.wav"), ("video", "clip.mp4")

QUESTIONS = (
    Question("text", "hello"),
    Question("picture", "what is in the picture?", (PICTURE,)),
    Question("sound", "how many beeps do you hear?", (SOUND,)),
    Question("video", "where does the shape move?", (VIDEO,)),
    Question("all three", "what do you see and hear?", (PICTURE, SOUND, VIDEO)),
    Question("picture again", "what colour is the circle?", (PICTURE,)),
)

# Heading and name of each stage, in the order a request passes them.
STAGES = (
    ("fetch", "fetch"),
    ("media", "decode_media"),
    ("encode", "encode"),
    ("store", "store"),
    ("prefill", "prefill"),
    ("first", "first_token"),
    ("total", "total"),
)
FOUND = ("hit", "joined")


@fail_with_one_line
def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="Model directory. Default: the bundled mimo-tiny.", envvar="MIMO_MODEL"),
    ] = None,
) -> None:
    """Start everything, ask about a picture, a sound and a video, show timings, stop."""
    config = StackConfig(model=model_directory(str(model or "")), replicas=parse_replicas(""))
    run_until_signal(lambda: _demo(config))


async def _demo(config: StackConfig) -> None:
    say(f"starting mimo with {config.model.name}")
    async with Stack.running(config, say) as stack:
        client = RestClient(stack.rest_url)
        try:
            answers = [(question, await _ask(client, question)) for question in QUESTIONS]
        finally:
            await client.close()
        say("\nmilliseconds per stage; tokens in and out; embeddings made and found")
        console.print(_timings(answers))
        encoded = _encoded(answers[-1][1])
        say(f"the second question about the picture encoded {encoded} items")
        if encoded:
            raise Internal("the picture was encoded twice: the embedding store did not serve it")
        say("stopping")
    say("done; `make up` keeps it running, `mimo chat` talks to it")


async def _ask(client: RestClient, question: Question) -> Answer:
    attachments = tuple(Attachment.read(kind, SAMPLES / name) for kind, name in question.files)
    names = " ".join(attachment.name for attachment in attachments)
    console.print(f"\n[bold]{question.label}[/bold] {names}\n> {question.text}")
    turns = [Turn("user", question.text, attachments)]
    _, answer = await stream_answer(client, turns, {"max_tokens": MAX_TOKENS})
    return answer


def _timings(answers: Sequence[tuple[Question, Answer]]) -> Table:
    # Narrow enough for 80 columns.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("question", no_wrap=True)
    for heading, _ in STAGES:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("in", justify="right", no_wrap=True)
    table.add_column("out", justify="right", no_wrap=True)
    table.add_column("made", justify="right", no_wrap=True)
    table.add_column("found", justify="right", no_wrap=True)
    for question, answer in answers:
        timings = answer.report.get("timings_ms", {})
        table.add_row(
            question.label,
            *(f"{timings.get(name, 0.0):.0f}" for _, name in STAGES),
            str(answer.usage.get("prompt_tokens", 0)),
            str(answer.usage.get("completion_tokens", 0)),
            str(_encoded(answer)),
            str(len(answer.report.get("items", ())) - _encoded(answer)),
        )
    return table


def _encoded(answer: Answer) -> int:
    return sum(item["cache"] not in FOUND for item in answer.report.get("items", ()))
