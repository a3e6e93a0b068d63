"""The engine around a decoder whose tokens are computed by hand."""

from typing import Any

import pytest
import torch

from mimo.errors import ConfigError, DeadlineExceeded, Internal, InvalidRequest, StartupError
from services.llm.calibration import calibrate
from services.llm.engine.kv_cache import MAX_LAG, KVLayout
from services.llm.engine.request import FinishReason, Span
from tests.support.toy_decoder import (
    VISIBLE,
    VOCAB,
    ToyDecoder,
    ToyMtp,
    build_core,
    continuation,
    make_request,
    next_token,
    run_all,
    spec,
)

PROMPTS = [[5, 9, 2], list(range(3, 40)), [7], list(range(60, 24, -2)), [1] * 16, [8] * 33]


def test_the_formula_by_hand() -> None:
    # 3 x 4 + 1, and with history the sum 10 and twice the windowed sum 10.
    assert next_token([1, 2, 3, 4], history=0) == 13
    assert next_token([1, 2, 3, 4], history=1) == 13 + 10 + 20
    # The window forgets the first of eight.
    assert next_token([50, 1, 1, 1, 1, 1, 1, 1], history=1) == 4 + 57 + 14


def test_one_request_decodes_past_windows_and_block_borders() -> None:
    prompt = [4, 1, 7]
    (produced,) = run_all(build_core(ToyDecoder()), [make_request(prompt, max_tokens=60)])
    assert produced == continuation(prompt, 60, history=1)


@pytest.mark.parametrize("max_step_tokens", [8, 9, 64])
def test_a_ragged_batch_with_chunked_prompts_equals_the_formula(max_step_tokens: int) -> None:
    core = build_core(ToyDecoder(), max_step_tokens=max_step_tokens)
    produced = run_all(core, [make_request(prompt, max_tokens=30) for prompt in PROMPTS])
    assert produced == [continuation(prompt, 30, history=1) for prompt in PROMPTS]


def test_preemption_changes_nothing() -> None:
    core = build_core(ToyDecoder(), num_blocks={"full": 15, "window": 15})
    requests = [make_request(prompt, max_tokens=20) for prompt in PROMPTS]
    assert run_all(core, requests) == [continuation(p, 20, history=1) for p in PROMPTS]
    assert sum(request.num_preemptions for request in requests) > 0


def test_a_resumed_request_goes_on_as_if_undisturbed() -> None:
    prompt, whole = [3, 8], continuation([3, 8], 20, history=1)
    resumed = make_request(prompt, max_tokens=20, prior_output_ids=whole[:7])
    assert run_all(build_core(ToyDecoder()), [resumed]) == [whole[7:]]


def test_a_stop_id_ends_a_request_and_is_output() -> None:
    whole = continuation([3, 8], 20, history=1)
    request = make_request([3, 8], max_tokens=20, stop_ids=frozenset([whole[4]]))
    assert run_all(build_core(ToyDecoder()), [request]) == [whole[: whole.index(whole[4]) + 1]]
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_drafts_are_accepted_as_deep_as_the_blocks_are_right(num_right: int) -> None:
    prompt, count = list(range(3, 40)), 9
    request = make_request(prompt, max_tokens=count, max_draft_tokens=3)
    (produced,) = run_all(build_core(ToyDecoder(history=0), ToyMtp(num_right)), [request])
    assert produced == continuation(prompt, count, history=0)
    drafted, left = [0, 0, 0], count - 1
    while left > 1:  # the last token is never drafted: nothing would follow it
        num_drafts = min(3, left - 1)
        left -= min(num_drafts, num_right) + 1
        for depth in range(num_drafts):
            drafted[depth] += 1
    assert request.num_drafted == drafted
    assert request.num_accepted == [
        drafted[depth] if depth < num_right else 0 for depth in range(3)
    ]


def test_drafts_that_do_not_hold_are_given_up_and_tried_again() -> None:
    mtp = ToyMtp(num_right=0)
    core = build_core(ToyDecoder(history=0), mtp)
    request = make_request([5], max_tokens=400, max_draft_tokens=3)
    core.add(request)
    while request.num_output_tokens < 150:
        core.step()
    assert request.num_drafted[0] < 25
    mtp.num_right = 3
    while core.scheduler.num_unfinished:
        core.step()
    assert request.token_ids[1:] == continuation([5], 400, history=0)
    assert request.num_accepted[0] > 20


def test_useless_drafts_change_nothing() -> None:
    core = build_core(ToyDecoder(), ToyMtp(num_right=0), kv_bytes=40_000)
    requests = [make_request(p, max_tokens=25, max_draft_tokens=3) for p in PROMPTS]
    assert run_all(core, requests) == [continuation(p, 25, history=1) for p in PROMPTS]
    assert all(sum(request.num_drafted) > 0 for request in requests)


def test_fewer_drafts_when_more_than_half_of_the_places_are_taken() -> None:
    core = build_core(ToyDecoder(history=0), ToyMtp(num_right=3), max_running=2)
    requests = [make_request(p, max_tokens=20, max_draft_tokens=3) for p in ([5], [6])]
    assert run_all(core, requests) == [continuation(p, 20, history=0) for p in ([5], [6])]
    assert all(len(request.num_drafted) == 1 for request in requests)


def test_a_broken_drafter_costs_speed_only() -> None:
    mtp = ToyMtp(num_right=3)
    core = build_core(ToyDecoder(history=0), mtp)
    request = make_request([5, 6], max_tokens=20, max_draft_tokens=3)
    core.add(request)
    core.step()
    mtp.fails = True
    assert core.step().lost_drafting == (request,)
    while core.scheduler.num_unfinished:
        core.step()
    assert request.token_ids[2:] == continuation([5, 6], 20, history=0)


def test_encoder_rows_take_the_place_of_pads() -> None:
    prompt = [4, 90, 90, 90, 6, 90, 90, 2]
    first, second = torch.tensor([[10.0], [20.0], [30.0]]), torch.tensor([[1.5], [2.5], [40.0]])
    request = make_request(
        prompt,
        max_tokens=12,
        spans=(Span(0, 1, 3, 0), Span(1, 5, 2, 1)),
        item_rows={0: first, 1: second},
    )
    numbers = [4, 10, 20, 30, 6, 2.5, 40, 2]
    assert run_all(build_core(ToyDecoder(), max_step_tokens=3, max_running=3), [request]) == [
        continuation(numbers, 12, history=1)
    ]


@pytest.mark.parametrize("num_right", [0, 3])
def test_a_prompt_runs_up_to_a_missing_item_and_goes_on_when_it_arrives(num_right: int) -> None:
    prompt, rows = [4, 7, 90, 90, 6], torch.tensor([[11.0], [12.0]])
    core = build_core(ToyDecoder(history=0), ToyMtp(num_right))
    request = make_request(
        prompt, max_tokens=9, spans=(Span(0, 2, 2, 0),), pending_items={0}, max_draft_tokens=3
    )
    core.add(request)
    core.step()
    assert request.num_cached_tokens == 2
    assert not core.step().plan.scheduled
    request.item_rows[0] = rows
    request.pending_items.clear()
    while core.scheduler.num_unfinished:
        core.step()
    assert request.token_ids[5:] == continuation([4, 7, 11, 12, 6], 9, history=0)


def test_a_request_with_nan_logits_fails_alone_and_leaves_no_nan_behind() -> None:
    decoder = ToyDecoder()
    core = build_core(decoder, kv_bytes=2_000)
    decoder.poisoned = {96}
    good = make_request([5, 6, 7], max_tokens=20)
    bad = make_request([1, 2, 96], max_tokens=20)
    core.add(good)
    core.add(bad)
    (failure,) = [p for p in core.step().progress if p.error is not None]
    assert failure.request is bad
    assert isinstance(failure.error, Internal)
    late = make_request([9] * 20, max_tokens=20)
    core.add(late)
    while core.scheduler.num_unfinished:
        core.step()
    assert good.token_ids[3:] == continuation([5, 6, 7], 20, history=1)
    assert late.token_ids[20:] == continuation([9] * 20, 20, history=1)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(
    "nothing",
    [
        {"banned_ids": frozenset(range(VOCAB))},
        {"bad_words": tuple((id,) for id in range(VOCAB))},
        {"min_tokens": 8, "stop_ids": frozenset(range(VOCAB))},
        {"bad_words": tuple((16, id) for id in range(VOCAB))},  # from the second token on
    ],
)
def test_a_request_that_allows_no_token_is_told_so_and_fails_alone(
    nothing: dict[str, Any], num_drafts: int, caplog: pytest.LogCaptureFixture
) -> None:
    core = build_core(ToyDecoder(history=0), ToyMtp(num_right=3))
    good = make_request([6], max_tokens=20, max_draft_tokens=num_drafts)
    bad = make_request([5], max_draft_tokens=num_drafts, **nothing)
    core.add(good)
    core.add(bad)
    failures = []
    while core.scheduler.num_unfinished:
        failures += [p for p in core.step().progress if p.error is not None]
    (failure,) = failures
    assert failure.request is bad
    assert isinstance(failure.error, InvalidRequest)
    assert "no token to choose" in failure.error.message
    assert good.token_ids[1:] == continuation([6], 20, history=0)
    assert not caplog.records


def test_a_failing_forward_ends_its_batch_and_the_engine_goes_on() -> None:
    decoder = ToyDecoder()
    core = build_core(decoder)
    decoder.failure = RuntimeError("out of memory")
    core.add(make_request([1, 2]))
    assert isinstance(core.step().progress[0].error, Internal)
    decoder.failure = None
    assert run_all(core, [make_request([1, 2])]) == [continuation([1, 2], 8, history=1)]


def test_a_model_that_cannot_generate_does_not_start() -> None:
    decoder = ToyDecoder()
    assert calibrate(build_core(decoder)) > 0
    decoder.poisoned = {continuation([0] * 16, 1, history=1)[0]}  # the second step's token
    with pytest.raises(StartupError, match="no usable logits"):
        calibrate(build_core(decoder))
    decoder.failure = RuntimeError("no kernel for this device")
    with pytest.raises(StartupError, match="a first generation failed"):
        calibrate(build_core(decoder))


def test_a_broken_device_ends_the_engine_instead_of_one_batch_after_another() -> None:
    decoder = ToyDecoder()
    core = build_core(decoder)
    decoder.failure = torch.AcceleratorError("the device is gone")
    core.add(make_request([1, 2]))
    with pytest.raises(torch.AcceleratorError):
        core.step()


def test_late_requests_end_whether_they_run_or_wait() -> None:
    core = build_core(ToyDecoder(), max_running=1)
    requests = [make_request([1, 2], deadline=deadline) for deadline in (5.0, 6.0, 99.0)]
    for request in requests:
        core.add(request)
    core.step()
    assert core.next_deadline() == 5.0
    expired = core.expire(now=6.0)
    assert {progress.request for progress in expired} == set(requests[:2])
    assert all(isinstance(progress.error, DeadlineExceeded) for progress in expired)
    assert core.step().plan.scheduled[0].request is requests[2]


def test_a_removed_request_frees_its_blocks_at_once() -> None:
    core = build_core(ToyDecoder())
    request = make_request([1] * 20, max_tokens=50)
    core.add(request)
    core.step()
    assert core.scheduler.blocks.num_used("full") > 0
    core.remove(request)
    assert core.scheduler.blocks.num_used("full") == core.scheduler.blocks.num_used("window") == 0


def test_tokens_report_their_output_position() -> None:
    core = build_core(ToyDecoder(history=0), ToyMtp(num_right=3))
    core.add(make_request([5], max_tokens=9, prior_output_ids=[16], max_draft_tokens=3))
    progress = [p for _ in range(3) for p in core.step().progress]
    assert [(p.first_index, len(p.tokens)) for p in progress] == [(1, 1), (2, 4), (6, 3)]


def test_kv_memory_is_divided_by_what_each_group_can_use() -> None:
    layout = KVLayout((spec(0, sliding=False), spec(1, sliding=True)), VISIBLE, 3, 4, torch.float32)
    assert layout.retention == VISIBLE - 1 + 6 + MAX_LAG
    limits = {"max_running": 2, "max_step_tokens": 16, "max_context": 400}
    full, window = layout.groups(10_000, **limits)
    assert window.num_blocks == 2 * 9 + 4  # two requests of 28 + 4 positions, and one step
    assert full.num_blocks == min(2 * 100, (10_000 - 22 * 32) // 32)
    full, window = layout.groups(2_000, **limits)
    assert (full.num_blocks + window.num_blocks) * 32 <= 2_000
    with pytest.raises(ConfigError, match="--kv-memory-mib"):
        layout.groups(100, **limits)
