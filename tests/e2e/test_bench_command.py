"""`mimo bench` against a running system: what it sends arrives, and its figures add up."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_commands import mimo
from tests.support.live import Stack

SMALL = ("--warmup", "1", "--input-tokens", "24", "--output-tokens", "6", "--image-side", "56")


def bench(*words: str) -> dict[str, Any]:
    """The figures on the last line of a run that must succeed."""
    ended = mimo("bench", *SMALL, *words, "--json", "-", timeout_s=110)
    assert ended.returncode == 0, ended.stderr
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


@pytest.mark.parametrize("face", ["rest", "grpc"])
def test_a_closed_loop_counts_every_request_and_token(stack: Stack, face: str) -> None:
    address = stack.rest_url if face == "rest" else stack.grpc_address
    figures = bench(f"--{face}", address, "--requests", "6", "--concurrency", "2")
    assert figures["requests"] == {"sent": 6, "ok": 6, "refused": 0, "failed": 0, "errors": {}}
    tokens = figures["tokens"]
    assert tokens["output"] == 36
    assert tokens["prompt"] == tokens["prompt_by_kind"]["text"] > 6 * 24  # and the template
    assert tokens["prefix_hits"] == 0
    latencies = figures["latency_ms"]
    assert 0 < latencies["ttft"]["p50"] <= latencies["e2e"]["p50"] <= latencies["e2e"]["max"]
    assert latencies["itl"]["p50"] > 0 and latencies["send_lag"]["max"] == 0
    assert figures["rates"]["output_tokens_per_s"] * figures["seconds"] == pytest.approx(36)
    assert figures["config"]["face"] == face and figures["config"]["loop"] == "closed"
    assert figures["speculation"]["drafted"], "the bundled model drafts"


def test_an_open_loop_of_all_kinds_finds_repeated_media_in_the_cache(stack: Stack) -> None:
    figures = bench(
        *("--grpc", stack.grpc_address, "--rate", "20", "--requests", "12", "--seed", "3"),
        *("--workload", "mixed", "--distinct-media", "1", "--audio-seconds", "0.5"),
        *("--video-seconds", "0.5", "--slo", "e2e=60000", "--drafts", "0"),
    )
    assert figures["requests"]["ok"] == 12
    assert {kind: row["ok"] for kind, row in figures["by_kind"].items()} == dict.fromkeys(
        ("audio", "image", "text", "video"), 3
    )
    for modality in ("audio", "image", "video"):
        outcomes = figures["embeddings"][modality]
        assert sum(outcomes.values()) == 3
        assert outcomes["miss"] == 1, outcomes  # the warm-up left nothing behind
    assert figures["speculation"] == {"drafted": [], "accepted": [], "acceptance_length": None}
    assert figures["rates"]["goodput_per_s"] == figures["rates"]["requests_per_s"]


def test_a_common_beginning_is_found_in_the_prefix_cache(stack: Stack) -> None:
    figures = bench(
        *("--grpc", stack.grpc_address, "--requests", "4", "--concurrency", "1"),
        *("--input-tokens", "96", "--prefix-tokens", "80"),
    )
    assert figures["tokens"]["prefix_hits"] == 3  # all but the first
    assert figures["tokens"]["prefix_saved"] >= 3 * 64


def test_people_get_a_table_and_programs_a_file(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    ended = mimo(
        *("bench", *SMALL, "--grpc", stack.grpc_address, "--requests", "2", "--json", str(path))
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 sent: 2 ok, 0 refused, 0 failed" in ended.stdout
    assert "first token (TTFT)" in ended.stdout
    assert json.loads(path.read_text())["requests"]["ok"] == 2


def test_requests_that_fail_are_counted_by_code_and_end_in_failure(stack: Stack) -> None:
    ended = mimo(
        *("bench", *SMALL, "--grpc", stack.grpc_address, "--warmup", "0", "--requests", "3"),
        *("--input-tokens", "20000", "--json", "-"),  # beyond the context of the bundled model
    )
    assert ended.returncode == 1
    requests = json.loads(ended.stdout.splitlines()[-1])["requests"]
    assert (requests["ok"], requests["failed"]) == (0, 3)
    assert requests["errors"] == {"INVALID_ARGUMENT CONTEXT_LENGTH_EXCEEDED": 3}


def test_without_a_system_it_says_how_to_start_one() -> None:
    ended = mimo("bench", "--grpc", "127.0.0.1:1")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "mimo up" in ended.stderr
