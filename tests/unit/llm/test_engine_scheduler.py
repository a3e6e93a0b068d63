"""The planner: transcripts of its policy, and laws that hold after any sequence of events."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.errors import InvalidRequest, Overloaded, Reason
from services.llm.engine.block_manager import NO_BLOCK, BlockGroup, BlockManager
from services.llm.engine.request import FinishReason, Request, SamplingParams, Span
from services.llm.engine.scheduler import Plan, Scheduler
from tests.support import transcript

REACH = 5  # positions behind its first row that a request reads

TRANSCRIPTS = sorted((Path(__file__).parents[2] / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    transcript.check(path)


def make_request(num_prompt: int, max_tokens: int = 99, **fields: object) -> Request:
    return Request(
        request_id="r",
        token_ids=[1] * num_prompt,
        num_prompt_tokens=num_prompt,
        params=SamplingParams(max_tokens=max_tokens, stop_ids=frozenset([0])),
        **fields,  # type: ignore[arg-type]
    )


def make_cached_request(num_prompt: int, num_same: int) -> Request:
    """Its first ``num_same`` tokens are those of all such requests."""
    request = make_request(num_prompt, max_tokens=12, use_prefix_cache=True)
    request.token_ids[num_same:] = [2 + num_same] * max(num_prompt - num_same, 0)
    return request


def make_scheduler(full: int = 16, window: int = 16, context: int = 999) -> Scheduler:
    groups = [BlockGroup("full", full), BlockGroup("window", window, retention=6, reach=REACH)]
    return Scheduler(
        BlockManager(groups, block_size=4), max_running=4, max_step_tokens=16, max_context=context
    )


def test_a_prompt_that_fills_the_context_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_scheduler(context=20).check(make_request(20))
    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED


def test_a_prompt_that_fits_the_context_but_not_the_pool_is_a_matter_of_capacity() -> None:
    with pytest.raises(Overloaded) as caught:
        make_scheduler(full=4).check(make_request(16))
    assert caught.value.reason is Reason.CAPACITY


def test_a_request_alone_in_a_full_pool_ends_by_length() -> None:
    scheduler = make_scheduler(full=2)
    request = make_request(5)
    scheduler.add(request)
    reasons = []
    while scheduler.num_unfinished:
        plan = scheduler.plan()
        reasons += [a.finish_reason for a in scheduler.commit(plan, {request: [1]})]
    assert reasons == [None, None, FinishReason.LENGTH]
    assert request.num_tokens == 8


def test_tokens_after_a_stop_among_accepted_drafts_are_dropped() -> None:
    scheduler = make_scheduler()
    request = make_request(3)
    scheduler.add(request)
    scheduler.commit(scheduler.plan(), {request: [5]})
    request.draft_ids = [6, 0, 7]
    (advance,) = scheduler.commit(scheduler.plan(), {request: [6, 0, 7, 8]})
    assert advance.token_ids == (6, 0)
    assert advance.finish_reason is FinishReason.STOP
    assert (request.num_drafted, request.num_accepted) == ([1, 1, 1], [1, 1, 0])


def test_stop_ids_do_not_end_a_request_before_min_tokens() -> None:
    request = make_request(2)
    request.params = SamplingParams(max_tokens=9, min_tokens=2, stop_ids=frozenset([0]))
    request.token_ids.append(0)
    assert request.finish_reason is None
    request.token_ids.append(0)
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 2.1), ("top_p", 1.5), ("max_tokens", 0), ("top_k", 0)]
)
def test_sampling_out_of_range_names_the_field(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{"max_tokens": 4, name: value})  # type: ignore[arg-type]
    assert caught.value.field == f"sampling.{name}"


def test_spans_within_a_chunk_are_cut_to_it() -> None:
    spans = (Span(0, 2, 3, 0), Span(1, 5, 4, 0), Span(0, 12, 2, 3))
    request = make_request(16, spans=spans)
    found = [(span.offset, first, last) for span, first, last in request.spans_within(3, 13)]
    assert found == [(2, 3, 5), (5, 5, 9), (12, 12, 13)]
    assert list(request.spans_within(9, 12)) == []


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(0, 2)),
        st.tuples(st.just("repeat"), st.integers(1, 40), st.integers(0, 40)),
        st.tuples(st.just("step"), st.integers(1, 4), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, full=st.integers(3, 14), window=st.integers(3, 10))
def test_blocks_are_never_lost_overwritten_or_dropped_too_early(
    events: list[tuple[str, int, int]], full: int, window: int
) -> None:
    scheduler = make_scheduler(full, window)
    for kind, number, other in events:
        live = [*scheduler.running, *scheduler.waiting]
        if kind == "add":
            if number < scheduler.max_context:
                scheduler.add(make_request(number, max_tokens=12, priority=other))
        elif kind == "repeat":
            if number < scheduler.max_context:
                scheduler.add(make_cached_request(number, num_same=other))
        elif kind == "abort" and live:
            scheduler.remove(live[number % len(live)])
        elif kind == "step":
            _step(scheduler, accepted=number, drafts=other)
        _check_blocks(scheduler)


def test_ten_thousand_random_operations_leave_no_block_behind() -> None:
    draw = random.Random(0)
    scheduler = make_scheduler(full=24, window=20)
    for _ in range(10_000):
        live = [*scheduler.running, *scheduler.waiting]
        kind = draw.choices(("step", "add", "repeat", "abort"), (6, 2, 2, 1))[0]
        if kind == "step":
            _step(scheduler, accepted=draw.randint(1, 4), drafts=draw.randint(0, 3))
        elif kind == "abort" and live:
            scheduler.remove(draw.choice(live))
        elif kind != "abort" and len(live) < 12:
            length, same = draw.randint(1, 60), draw.randint(0, 60)
            is_repeat = kind == "repeat"
            scheduler.add(make_cached_request(length, same) if is_repeat else make_request(length))
        _check_blocks(scheduler)
    for request in [*scheduler.running, *scheduler.waiting]:
        scheduler.remove(request)
    for group in scheduler.blocks.groups:
        assert scheduler.blocks.num_used(group.name) == 0
        assert scheduler.blocks.num_free(group.name) == group.num_blocks


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    full=st.integers(8, 14),
    window=st.integers(3, 10),
    drafts=st.integers(0, 3),
)
def test_every_request_finishes_whatever_the_pool(
    prompts: list[int], full: int, window: int, drafts: int
) -> None:
    scheduler = make_scheduler(full, window)
    for prompt in prompts:
        scheduler.add(make_request(prompt, max_tokens=9))
    for _ in range(2000):
        if not scheduler.num_unfinished:
            break
        assert _step(scheduler, accepted=2, drafts=drafts).scheduled
    assert scheduler.num_unfinished == 0
    assert all(scheduler.blocks.num_used(group.name) == 0 for group in scheduler.blocks.groups)


def _step(scheduler: Scheduler, accepted: int, drafts: int) -> Plan:
    """Run one step in which up to ``accepted`` tokens come out, and propose drafts for the next."""
    plan = scheduler.plan()
    for scheduled in plan.scheduled:
        _check_readable(scheduler, scheduled.request, scheduled.start, scheduled.num_rows)
    assert sum(scheduled.num_rows for scheduled in plan.scheduled) <= scheduler.max_step_tokens
    sampled = {
        scheduled.request: [1] * min(accepted, len(scheduled.draft_ids) + 1)
        for scheduled in plan.scheduled
        if scheduled.samples
    }
    scheduler.commit(plan, sampled)
    for request in scheduler.running:
        request.draft_ids = [1] * drafts if request.is_decoding else []
    return plan


def _check_readable(scheduler: Scheduler, request: Request, start: int, num_rows: int) -> None:
    """Every position a step reads or writes has a block in its group."""
    for group in scheduler.blocks.groups:
        first = 0 if group.retention is None else max(start - REACH, 0)
        size = scheduler.blocks.block_size
        table = request.block_tables[group.name][first // size : -(-(start + num_rows) // size)]
        assert len(table) == -(-(start + num_rows) // size) - first // size
        assert NO_BLOCK not in table
        written = request.block_tables[group.name][start // size : -(-(start + num_rows) // size)]
        others = [
            block
            for other in scheduler.running
            if other is not request
            for block in other.block_tables.get(group.name, ())
        ]
        assert not set(written) & set(others)
        assert not any(scheduler.blocks.is_findable(group.name, block) for block in written)


def _check_blocks(scheduler: Scheduler) -> None:
    assert len(scheduler.running) <= scheduler.max_running
    assert all(not request.block_tables for request in scheduler.waiting)
    for group in scheduler.blocks.groups:
        held = [
            block
            for request in scheduler.running
            for block in request.block_tables.get(group.name, [])
            if block != NO_BLOCK
        ]
        assert len(set(held)) == scheduler.blocks.num_used(group.name)
        assert scheduler.blocks.num_free(group.name) + len(set(held)) == group.num_blocks
        assert scheduler.blocks.num_cached(group.name) <= scheduler.blocks.num_free(group.name)
