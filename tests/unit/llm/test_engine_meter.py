"""What the engine's past says about the next caller."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from mimo.metrics import LLM, Metrics
from services.llm.engine.meter import Meter
from services.llm.engine.request import FinishReason
from services.llm.engine.sampler import Sampled


def scheduler_of(*, running: int, waiting: int, tokens: int = 0) -> Any:
    group = SimpleNamespace(name="full", num_blocks=8)
    blocks = SimpleNamespace(
        block_size=16, groups=[group], num_used=lambda _: 0, num_cached=lambda _: 0
    )
    return SimpleNamespace(
        running=[None] * running,
        waiting=[SimpleNamespace(num_preemptions=0, num_tokens=1)] * waiting,
        num_waiting_tokens=tokens,
        max_running=4,
        max_step_tokens=64,
        blocks=blocks,
    )


@dataclass(frozen=True, eq=False)
class Ending:
    num_output_tokens: int


def step_of(
    num_sequences: int,
    num_tokens: int,
    num_ends: int = 0,
    length: int = 10,
    draft_ids: tuple[int, ...] = (),
) -> Any:
    """Decodes that emit token 7 ``num_tokens`` times, the first ``num_ends`` of which end at
    ``length``."""
    progress = [
        SimpleNamespace(
            tokens=(Sampled(7),) * num_tokens,
            finish_reason=FinishReason.LENGTH if number < num_ends else None,
            request=Ending(length),
        )
        for number in range(num_sequences)
    ]
    scheduled = [
        SimpleNamespace(request=each.request, is_decode=True, num_tokens=1, draft_ids=draft_ids)
        for each in progress
    ]
    plan = SimpleNamespace(scheduled=scheduled, preempted=())
    return SimpleNamespace(plan=plan, progress=progress, lost_drafting=())


def test_nothing_is_known_at_first() -> None:
    load = Meter().load(scheduler_of(running=4, waiting=9))
    assert (load.predicted_wait_s, load.service_s) == (0.0, 0.0)


def test_waiting_tokens_take_time() -> None:
    meter = Meter(prefill_rate=100.0)
    assert meter.load(scheduler_of(running=0, waiting=1, tokens=250)).predicted_wait_s == 2.5


def test_behind_a_full_house_one_waits_for_ends() -> None:
    meter = Meter()
    scheduler = scheduler_of(running=4, waiting=0)
    for _ in range(40):
        meter.record_step(scheduler, step_of(4, 1, num_ends=1), 0.5)  # two ends a second
    assert meter.load(scheduler_of(running=3, waiting=0)).predicted_wait_s == 0.0
    assert meter.load(scheduler).predicted_wait_s == pytest.approx(0.5)
    assert meter.load(scheduler_of(running=4, waiting=5)).predicted_wait_s == pytest.approx(3.0)
    # Those that were let in since the last step count as well.
    assert meter.load(scheduler, num_present=9).predicted_wait_s == pytest.approx(3.0)


def test_the_rate_of_ends_is_that_of_the_last_few_dozen() -> None:
    meter = Meter()
    scheduler = scheduler_of(running=4, waiting=0)
    for _ in range(400):
        meter.record_step(scheduler, step_of(4, 1, num_ends=1), 0.1)  # ten a second
    for _ in range(100):
        meter.record_step(scheduler, step_of(4, 1, num_ends=1), 1.0)  # the machine became slow
    assert meter.load(scheduler).predicted_wait_s == pytest.approx(1.0, rel=0.1)
    before = meter.load(scheduler).predicted_wait_s
    for _ in range(30):
        meter.record_step(scheduler, step_of(4, 1), 1.0)  # nobody ends
    assert meter.load(scheduler).predicted_wait_s > 1.5 * before


@pytest.mark.parametrize(
    ("draft_ids", "num_tokens", "accepted"),
    [((7, 7, 1), 3, 2), ((7, 7, 7), 4, 3), ((7, 7, 7), 2, 2), ((1, 7, 7), 1, 0)],
    ids=["two hold", "all hold", "the second ends the answer", "none holds"],
)
def test_accepted_drafts_are_those_that_came_out(
    draft_ids: tuple[int, ...], num_tokens: int, accepted: int
) -> None:
    metrics = Metrics(LLM)
    step = step_of(1, num_tokens, draft_ids=draft_ids)
    Meter(metrics).record_step(scheduler_of(running=1, waiting=0), step, 0.1)
    counts = [
        metrics.value("mimo_llm_accepted_tokens_total", position=str(position))
        for position in (1, 2, 3)
    ]
    assert counts == [1.0] * accepted + [0.0] * (3 - accepted)


def test_an_answer_takes_as_long_as_those_before_it() -> None:
    meter = Meter()
    scheduler = scheduler_of(running=2, waiting=0)
    for _ in range(200):
        meter.record_step(scheduler, step_of(2, 2, num_ends=2, length=20), 0.1)  # 50 ms a token
    assert meter.load(scheduler).service_s == pytest.approx(1.0)
    assert meter.service_s(max_tokens=5) == pytest.approx(0.25)
    assert meter.service_s(max_tokens=4000) == pytest.approx(1.0)
