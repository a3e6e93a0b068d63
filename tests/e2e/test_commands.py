"""The `mimo` command as people use it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mimo.cli.demo import QUESTIONS
from tests.support import samples
from tests.support.live import PATIENCE_S, ROOT, Rest, Stack, image


def mimo(*words: str, timeout_s: float = PATIENCE_S) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mimo.cli", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    path.write_bytes(samples.png(51))
    return path


def test_chat_answers_alike_by_rest_and_grpc(stack: Stack, rest: Rest, picture: Path) -> None:
    question = ["--image", str(picture), "--max-tokens", "12", "--json", "what is it?"]
    answers = []
    for face in (["--rest", stack.rest_url], ["--grpc", stack.grpc_address]):
        ended = mimo("chat", *face, *question)
        assert ended.returncode == 0, ended.stderr
        answers.append(json.loads(ended.stdout.splitlines()[-1]))
    expected = rest.ask(image(samples.png(51)), "what is it?", max_tokens=12)
    for answer in answers:
        assert answer["text"] == expected.text
        assert answer["finish_reason"] == expected.choices[0].finish_reason
        assert answer["usage"]["completion_tokens"] == expected.completion_tokens
        assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens["all"]
        assert answer["mimo"]["timings_ms"]["total"] > 0
        assert [item["tokens"] for item in answer["mimo"]["items"]] == [6]


@pytest.mark.parametrize(
    "face", [("--rest", "http://127.0.0.1:1"), ("--grpc", "127.0.0.1:1")], ids=["rest", "grpc"]
)
def test_chat_without_a_stack_says_how_to_start_one(face: tuple[str, str]) -> None:
    ended = mimo("chat", *face, "hello")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "mimo up" in ended.stderr


def test_chat_names_a_file_that_is_not_there(stack: Stack) -> None:
    ended = mimo("chat", "--rest", stack.rest_url, "--image", "nowhere.png", "what is it?")
    assert ended.returncode == 1
    assert "nowhere.png" in ended.stderr


def test_chat_reports_an_error_of_the_system_in_one_line(stack: Stack, picture: Path) -> None:
    picture.write_bytes(b"no picture")
    for face in (["--rest", stack.rest_url], ["--grpc", stack.grpc_address]):
        ended = mimo("chat", *face, "--image", str(picture), "what is it?")
        assert ended.returncode == 1
        assert len(ended.stderr.splitlines()) == 1
        assert "not a supported media format" in ended.stderr


@pytest.mark.check
def test_demo_shows_everything_and_stops() -> None:
    ended = mimo("demo", timeout_s=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for words in (
        *("picture.png", "sound.wav", "clip.mp4"),
        "encode store prefill first total",  # nothing of the table is cut off
        "encoded 0 items",
        *(f"expected: {question.answer}" for question in QUESTIONS),
    ):
        assert words in ended.stdout
    lines = ended.stdout.splitlines()
    right = sum(line.startswith("right, expected:") for line in lines)
    verdict = next(line for line in lines if " answers are right" in line)
    assert verdict.startswith(f"{right} of {len(QUESTIONS)} answers are right")
    assert ("random" in verdict) == (right == 0)  # a model that knows nothing is called that
    assert ended.stdout.splitlines()[-1].startswith("done")
