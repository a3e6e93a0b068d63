"""Rank 0's side of its children: what they are told, and what becomes of them."""

import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from mimo.errors import StartupError
from services.llm import channel
from services.llm.ranks import Ranks, device_of
from services.llm.settings import LlmSettings
from tests.support import tiny


def test_messages_arrive_whole_and_in_order_until_the_other_end_closes() -> None:
    ours, theirs = socket.socketpair()
    sent = [b"first", b"", b"x" * 100_000]
    with theirs:
        with ours:
            messages = channel.messages(theirs)
            channel.send(ours, sent[0])
            assert next(messages) == sent[0]
            channel.send(ours, sent[1])
            channel.send(ours, sent[2])
        assert list(messages) == sent[1:]


@pytest.mark.parametrize(
    ("device", "rank", "expected"),
    [("cpu", 3, "cpu"), ("cuda", 0, "cuda:0"), ("cuda", 1, "cuda:1"), ("cuda:4", 3, "cuda:7")],
)
def test_every_rank_has_a_gpu_of_its_own(device: str, rank: int, expected: str) -> None:
    assert device_of(device, rank) == expected


@pytest.mark.timeout(300)
def test_a_rank_that_cannot_start_is_a_reason_not_to_start(tmp_path: Path) -> None:
    settings = asdict(LlmSettings(model=str(tiny.write_decoder(tmp_path)), dtype="float16"))
    ranks = Ranks(2, settings, "cpu", 1 << 20)
    try:
        with pytest.raises(StartupError, match="rank 1 of 2 ended; the log says why"):
            ranks.wait_until_ready("cpu")
        assert ranks.explain(OSError("broken pipe")).startswith("rank 1 of 2 ended")
    finally:
        ranks.stop()
