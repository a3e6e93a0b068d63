"""`mimo eval` against a running system: its figures are those of an independent recount."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mimo.cli.measure import MAX_TOKENS
from tests.support import samples
from tests.support.live import PATIENCE_S, ROOT, Part, Rest, Stack, audio, image, video

FILES = {"image": samples.png(71), "audio": samples.wav(0.5, 710.0), "video": samples.mp4(4, 0.5)}
MEDIA = {"image": image, "audio": audio, "video": video}

# Skill, kinds of media, question, and whether the folder shall hold another answer than the system
# gives.
ASKED = (
    ("looking", ("image",), "What do you see?", False),
    ("looking", ("image", "audio"), "What do you see and hear?", True),
    ("looking", ("video",), "What happens?", False),
    ("talking", (), "Hello!", False),
    ("talking", (), "Who are you?", True),
    ("talking", (), "Count to five.", True),
)
ACCURACY = {"looking": 2 / 3, "talking": 1 / 3}


def evaluate(*words: str, timeout_s: float = PATIENCE_S) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mimo.cli", "eval", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def folder(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions whose answers are what this system says, apart from some that it does not say."""
    folder = tmp_path_factory.mktemp("prompts")
    rest = Rest(stack.rest_url)
    for kind, content in FILES.items():
        (folder / kind).write_bytes(content)
    lines: list[dict[str, Any]] = []
    for skill, kinds, question, is_other in ASKED:
        media: list[Part] = [MEDIA[kind](FILES[kind]) for kind in kinds]
        text = rest.ask(*media, question, temperature=0, max_tokens=MAX_TOKENS).text
        lines.append(
            {
                "skill": skill,
                "part": "wrong" if is_other else "right",
                "media": [{"kind": kind, "file": kind} for kind in kinds],
                "question": question,
                "answer": f"not {text}" if is_other else text,
            }
        )
    rest.close()
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "goals.json").write_text(json.dumps({"looking": 0.6, "talking": 0.6}))
    return folder


@pytest.mark.parametrize("face", ["rest", "grpc"])
def test_figures_are_those_of_a_recount(stack: Stack, folder: Path, face: str) -> None:
    target = stack.rest_url if face == "rest" else stack.grpc_address
    ended = evaluate("--prompts", str(folder), "--target", target, "--json", "-")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    found = {name: (result["accuracy"], result["n"]) for name, result in report["skills"].items()}
    assert found == {name: (round(share, 4), 3) for name, share in ACCURACY.items()}
    assert report["skills"]["looking"]["parts"] == {"right": "2/2", "wrong": "0/1"}
    # Tokens per round: at least the decoder's own, at most all drafts besides.
    assert 1 <= report["acceptance_length"] <= 4
    shares = report["acceptance_by_position"]
    assert 1 <= len(shares) <= 3 and all(0 <= share <= 1 for share in shares)
    assert (report["failed"], report["concurrency"]) == (0, 16)
    assert "missed" in ended.stderr  # the table, out of the way of the JSON


def test_a_quick_look_asks_less(stack: Stack, folder: Path) -> None:
    path = folder / "figures.json"
    words = ("--prompts", str(folder), "--target", stack.rest_url, "--skills", "talking")
    ended = evaluate(*words, "--limit", "1", "--concurrency", "1", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    report = json.loads(path.read_text())
    assert {name: result["n"] for name, result in report["skills"].items()} == {"talking": 1}
    assert report["skills"]["talking"]["accuracy"] == 1


def test_a_missed_goal_is_an_error_only_when_asked_for(stack: Stack, folder: Path) -> None:
    words = ("--prompts", str(folder), "--target", stack.rest_url, "--gates")
    assert evaluate(*words, "--skills", "looking").returncode == 0
    ended = evaluate(*words, "--skills", "talking")
    assert ended.returncode == 1
    assert "missed" in ended.stdout


def test_failed_requests_are_named_and_an_error(stack: Stack, folder: Path, tmp_path: Path) -> None:
    line = {"skill": "looking", "part": "", "question": "What is it?", "answer": "A lamp."}
    media = [{"kind": "image", "file": "broken"}]
    (tmp_path / "broken").write_bytes(b"no picture")
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line | {"media": media}) + "\n")
    ended = evaluate("--prompts", str(tmp_path), "--target", stack.rest_url)
    assert ended.returncode == 1
    assert "not a supported media format" in ended.stderr and "1 requests failed" in ended.stderr


def test_nothing_there_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    for words, said in (
        (("--prompts", str(tmp_path)), "prompts.jsonl"),
        (("--prompts", str(folder), "--skills", "juggling"), "juggling"),
        (("--prompts", str(folder), "--target", "x:1", "--threads", "2"), "exclude --target"),
    ):
        ended = evaluate(*words)
        assert ended.returncode == 1
        assert said in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.check
def test_without_a_target_a_system_is_started_and_stopped(folder: Path) -> None:
    """With the settings asked for; answers in bfloat16 need not be those of the other system."""
    words = ("--prompts", str(folder), "--threads", "2", "--dtype", "bfloat16", "--json", "-")
    ended = evaluate(*words, timeout_s=110)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert {result["n"] for result in report["skills"].values()} == {3}
    assert ended.stderr.index("ready in") < ended.stderr.index("stopping")
