"""`mimo demo`: the whole system, six questions, which answers are right, where the time went."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from mimo.checkpoint.directory import model_directory
from mimo.cli.chat import stream_answer
from mimo.cli.client import Answer, Attachment, RestClient, Turn
from mimo.cli.console import console, fail_with_one_line, say
from mimo.cli.options import Model
from mimo.cli.stack import Stack, StackConfig, parse_replicas
from mimo.cli.stopping import run_until_signal
from mimo.errors import Internal

SAMPLES = Path(__file__).parent / "samples"
OPTIONS = {"max_tokens": 64, "temperature": 0}


@dataclass(frozen=True)
class Question:
    """One question of the demo and its right answer, in the words of the bundled model's training.
    ``files`` are names in the samples folder, by kind."""

    label: str
    text: str
    answer: str
    files: tuple[tuple[str, str], ...] = ()


PICTURE, SOUND, VIDEO = ("image", "picture.png"), ("audio", "sound.wav"), ("video", "clip.mp4")

SEEN, HEARD = "A red circle to the left of a blue square.", "The voice says: 4 7 1."

QUESTIONS = (
    Question("text", "Hello!", "Hello! How can I help you?"),
    Question("picture", "What is in the picture?", SEEN, (PICTURE,)),
    Question("sound", "What does the voice say?", HEARD, (SOUND,)),
    Question(
        "video", "Where does the shape move?", "The green square moves to the right.", (VIDEO,)
    ),
    Question(
        "all three",
        "What do you see and hear?",
        f"{SEEN} {HEARD} A green square moves to the right.",
        (PICTURE, SOUND, VIDEO),
    ),
    Question("picture again", "What colour is the circle?", "The circle is red.", (PICTURE,)),
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
    model: Model = None,
) -> None:
    """Start everything, ask about a picture, a sound and a video, say what is right, stop."""
    config = StackConfig(model=model_directory(str(model or "")), replicas=parse_replicas(""))
    run_until_signal(lambda: _demo(config))


async def _demo(config: StackConfig) -> None:
    say(f"starting mimo with {config.model.name}")
    async with Stack.running(config, say) as stack:
        client = RestClient(stack.rest_url)
        try:
            answered = [await _ask(client, question) for question in QUESTIONS]
        finally:
            await client.close()
        say(_verdict([is_right for is_right, _ in answered]))
        answers = [answer for _, answer in answered]
        say("\nmilliseconds per stage; tokens in and out; embeddings made and found")
        console.print(_timings(answers))
        encoded = _encoded(answers[-1])
        say(f"the second question about the picture encoded {encoded} items")
        if encoded:
            raise Internal("the picture was encoded twice: the embedding store did not serve it")
        say("stopping")
    say("done; `make up` keeps it running, `mimo chat` talks to it")


async def _ask(client: RestClient, question: Question) -> tuple[bool, Answer]:
    """Show question, answer and expected answer. -> whether they agree, and the report."""
    attachments = tuple(Attachment.read(kind, SAMPLES / name) for kind, name in question.files)
    names = " ".join(attachment.name for attachment in attachments)
    console.print(f"\n[bold]{question.label}[/bold] {names}\n> {question.text}")
    turns = [Turn("user", question.text, attachments)]
    text, answer = await stream_answer(client, turns, OPTIONS)
    is_right = text.strip() == question.answer
    mark = "[green]right[/green]" if is_right else "[red]wrong[/red]"
    console.print(f"{mark}, expected: {question.answer}", style="dim")
    return is_right, answer


def _verdict(results: Sequence[bool]) -> str:
    right = sum(results)
    verdict = f"\n{right} of {len(results)} answers are right"
    if right == 0:
        verdict += ": the weights are random, or of a model that was not trained on such questions"
    return verdict


def _timings(answers: Sequence[Answer]) -> Table:
    # Narrow enough for 80 columns.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("question", no_wrap=True)
    for heading, _ in STAGES:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("in", justify="right", no_wrap=True)
    table.add_column("out", justify="right", no_wrap=True)
    table.add_column("made", justify="right", no_wrap=True)
    table.add_column("found", justify="right", no_wrap=True)
    for question, answer in zip(QUESTIONS, answers, strict=True):
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
