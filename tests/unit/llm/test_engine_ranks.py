"""An engine whose runner is several ranks produces what one produces, and ends with any of them."""

import functools
import json
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import save_file

from mimo.checkpoint.index import CheckpointIndex
from mimo.errors import Internal
from mimo.nn.attention import AttentionSelector
from mimo.nn.device import Compute
from services.llm.engine import acceptance
from services.llm.engine.core import EngineCore
from services.llm.engine.ranks import LeadingRunner, follow
from services.llm.engine.request import FinishReason, Request, Span
from services.llm.engine.runner import Runner
from services.llm.model import parallel
from services.llm.model.parallel import WHOLE, GroupShard, RankLost, Shard
from services.llm.model.weights import load_decoder
from tests.support import golden_decoder
from tests.support.parallel import on_ranks
from tests.support.toy_decoder import build_core, make_request, run_all

SPANS = (Span(1, 4, 1, 0), Span(0, 5, 2, 0), Span(1, 11, 1, 1), Span(0, 12, 1, 2))
PROMPTS = [[3, 10, 17, 24], [(7 * p + 5) % 58 for p in range(50)], [41], [9, 9, 9] * 7]
FEW_BLOCKS = {"full": 26, "window": 24}  # all prompts fit at once, their continuations do not
COMPUTE = Compute("cpu", "float32")

ResultT = TypeVar("ResultT")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chain")
    (directory / "config.json").write_text(json.dumps(golden_decoder.config("chain_vis7")))
    tensors = golden_decoder.weights("chain_vis7")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


class QueuedFollowers:
    """Ranks in threads, each with its commands in a queue; None ends it."""

    def __init__(self, size: int) -> None:
        self.queues: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in range(1, size)]

    def tell(self, command: bytes) -> None:
        for commands in self.queues:
            commands.put(command)

    def explain(self, error: Exception) -> str:
        return f"explained: {error}"

    def stop(self) -> None:
        for commands in self.queues:
            commands.put(None)

    def commands(self, rank: int) -> Iterator[bytes]:
        while (command := self.queues[rank - 1].get(timeout=60)) is not None:
            yield command


def core_of(
    directory: Path,
    shard: Shard = WHOLE,
    make_runner: Callable[..., Runner] = Runner,
    **limits: object,
) -> EngineCore:
    decoder, mtp = load_decoder(
        CheckpointIndex.open(directory),
        dtype=torch.float32,
        device="cpu",
        selector=AttentionSelector("llm"),
        shard=shard,
    )
    config = decoder.config
    return build_core(
        decoder,
        mtp,
        layers=(*config.layers, *config.mtp_layers),
        visible=config.swa_visible,
        dtype=torch.float32,
        make_runner=make_runner,
        **{"kv_bytes": 4 << 20, "max_step_tokens": 64, **limits},  # type: ignore[arg-type]
    )


def on_cores(
    directory: Path, size: int, work: Callable[[EngineCore], ResultT], **limits: object
) -> ResultT:
    """``work`` around an engine of ``size`` ranks."""
    followers = QueuedFollowers(size)

    def run(shard: GroupShard) -> ResultT | None:
        if shard.rank == 0:
            leading = functools.partial(LeadingRunner, shard=shard, followers=followers)
            try:
                return work(core_of(directory, shard, leading, **limits))
            finally:
                followers.stop()
        core = core_of(directory, shard, functools.partial(Runner, shard=shard), **limits)
        follow(core._runner, followers.commands(shard.rank), 32, COMPUTE)
        return None

    result = on_ranks(size, run)[0]
    assert result is not None
    return result


def requests() -> list[Request]:
    """Texts and media, greedy and sampled."""
    images, audio = (rows.float() for rows in golden_decoder.media_rows().split((3, 2)))
    sampled = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4}
    made = []
    for options in ({}, sampled):
        for seed, prompt in enumerate(PROMPTS):
            made.append(
                make_request(prompt, max_tokens=20, seed=seed, max_draft_tokens=3, **options)
            )
        made.append(
            make_request(
                golden_decoder.prompt_ids().tolist(),
                max_tokens=20,
                max_draft_tokens=3,
                spans=SPANS,
                item_rows={0: images, 1: audio},
                **options,
            )
        )
    return made


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_are_those_of_one_rank(
    checkpoint: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "FLOOR", 0.0)  # drafts, however seldom they hold
    expected = run_all(core_of(checkpoint), requests())
    together = requests()
    tight = {"num_blocks": FEW_BLOCKS, "max_running": 4, "max_step_tokens": 16}
    produced = on_cores(checkpoint, size, lambda core: run_all(core, together), **tight)
    assert produced == expected
    assert sum(request.num_preemptions for request in together) > 0
    assert sum(sum(request.num_accepted) for request in together) > 0


def test_a_poisoned_request_fails_alone_and_leaves_no_nan_on_any_rank(checkpoint: Path) -> None:
    def poisoned() -> Request:
        rows = torch.full((2, 32), torch.nan)
        return make_request(
            [58, 58, 3], spans=(Span(0, 0, 2, 0),), item_rows={0: rows}, max_draft_tokens=3
        )

    def work(core: EngineCore) -> tuple[list[list[int]], list[list[int]]]:
        before = run_all(core, [make_request(PROMPTS[1])])
        core.add(poisoned())
        (progress,) = core.step().progress
        assert progress.finish_reason is FinishReason.ERROR
        assert isinstance(progress.error, Internal)
        return before, run_all(core, [make_request(PROMPTS[1])])

    # So few blocks that the next request takes over the poisoned one's.
    before, after = on_cores(checkpoint, 2, work, num_blocks={"full": 15, "window": 15})
    assert after == before


def test_what_fails_in_a_pass_ends_the_engine_with_the_reason(checkpoint: Path) -> None:
    def work(core: EngineCore) -> str:
        core._runner.cache.write = None  # type: ignore[assignment, method-assign]
        core.add(make_request([1, 2, 3]))
        with pytest.raises(RankLost) as caught:
            core.step()
        return str(caught.value)

    class Alone(GroupShard):
        """A rank whose group meets at once: it is not the others that fail here."""

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            return x

    shard, followers = Alone(0, 2), QueuedFollowers(2)
    leading = functools.partial(LeadingRunner, shard=shard, followers=followers)
    assert "explained: 'NoneType'" in work(core_of(checkpoint, shard, leading))


def test_a_rank_that_leaves_ends_the_others_pass(checkpoint: Path) -> None:
    def leave(shard: GroupShard) -> str:
        if shard.rank == 1:
            return ""
        with pytest.raises(RankLost) as caught:
            shard.sum(torch.ones(3))
        return str(caught.value)

    assert "do not answer" in on_ranks(2, leave)[0]


def test_a_rank_that_never_comes_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "MEETING_TIMEOUT", timedelta(seconds=1))
    over = threading.Event()

    def stay_away(shard: GroupShard) -> bool:
        if shard.rank == 1:
            return over.wait(60)
        try:
            with pytest.raises(RankLost, match="do not answer"):
                shard.sum(torch.ones(3))
        finally:
            over.set()
        return True

    assert on_ranks(2, stay_away) == [True, True]
