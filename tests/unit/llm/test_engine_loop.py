"""The engine's thread: streams, cancellation, deadlines, overload, stop."""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator

import pytest
import torch

from mimo.errors import (
    DeadlineExceeded,
    EmbeddingMissing,
    Internal,
    InvalidRequest,
    Overloaded,
    Reason,
    Retry,
    Unavailable,
)
from mimo.metrics import Metrics
from services.llm.engine import loop
from services.llm.engine.core import Progress
from services.llm.engine.loop import Admitted, Engine, Event
from services.llm.engine.meter import Meter
from services.llm.engine.request import FinishReason, Request, Span
from tests.support.toy_decoder import (
    ToyDecoder,
    ToyMtp,
    build_core,
    continuation,
    make_request,
    running_engine,
)


class GatedDecoder(ToyDecoder):
    """Waits before each step until the test lets it run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)

    def __call__(self, *args: object) -> torch.Tensor:
        assert self.gate.acquire(timeout=30), "the test let too few steps run"
        return super().__call__(*args)  # type: ignore[arg-type]


async def collect(engine: Engine, request: Request) -> list[int]:
    return [
        sampled.token_id
        async for event in engine.generate(request)
        if isinstance(event, Progress)
        for sampled in event.tokens
    ]


async def first_tokens(events: AsyncIterator[Event]) -> Progress:
    async for event in events:
        if isinstance(event, Progress):
            return event
    raise AssertionError("the stream ended without tokens")


async def test_many_streams_at_once_get_their_own_tokens() -> None:
    core = build_core(ToyDecoder(), ToyMtp(num_right=1))
    prompts = [[n, n + 1, 2 * n] for n in range(12)]
    async with running_engine(core) as engine:
        produced = await asyncio.gather(
            *(collect(engine, make_request(p, 30, max_draft_tokens=3)) for p in prompts)
        )
    assert produced == [continuation(p, 30, history=1) for p in prompts]


async def test_a_stream_is_admitted_then_counts_its_tokens_then_finishes_once() -> None:
    async with running_engine(build_core(ToyDecoder())) as engine:
        events = [event async for event in engine.generate(make_request([1, 2], 3))]
    assert isinstance(events[0], Admitted)
    progress = [event for event in events if isinstance(event, Progress)]
    assert [event.first_index for event in progress] == [0, 1, 2]
    assert [event.finish_reason for event in progress] == [None, None, FinishReason.LENGTH]


async def test_a_resumed_request_that_is_complete_finishes_without_tokens() -> None:
    request = make_request([1, 2], 2, prior_output_ids=[5, 6])
    async with running_engine(build_core(ToyDecoder())) as engine:
        (event,) = [event async for event in engine.generate(request)]
    assert event == Progress(request, (), 2, FinishReason.LENGTH)


async def test_closing_a_stream_frees_its_blocks_before_the_next_step() -> None:
    decoder = GatedDecoder()
    core = build_core(decoder)
    async with running_engine(core) as engine:
        events = engine.generate(make_request([1] * 30, 400))
        decoder.gate.release(2)  # two chunks of the prompt
        await first_tokens(events)
        await events.aclose()
        decoder.gate.release(1)  # the step that was already planned
        assert len(await collect_with(engine, decoder, make_request([3], 1))) == 1
        assert core.scheduler.num_unfinished == 0
        assert core.scheduler.blocks.num_used("full") == 0


async def test_five_hundred_callers_who_leave_at_any_moment_leave_no_block_behind() -> None:
    draw = random.Random(0)
    core = build_core(ToyDecoder(), ToyMtp(num_right=1), num_blocks={"full": 90, "window": 90})
    async with running_engine(core) as engine:
        for _ in range(50):
            requests = [
                make_request(
                    [draw.randrange(3)] * draw.randint(1, 40),
                    60,
                    max_draft_tokens=draw.randint(0, 3),
                    use_prefix_cache=draw.random() < 0.7,
                )
                for _ in range(10)
            ]
            await asyncio.gather(*(leave(engine, r, draw.randint(0, 12)) for r in requests))
        assert len(await collect(engine, make_request([3], 2))) == 2  # all aborts came before
        assert core.scheduler.num_unfinished == 0
        for group in core.scheduler.blocks.groups:
            assert core.scheduler.blocks.num_used(group.name) == 0
            assert core.scheduler.blocks.num_free(group.name) == group.num_blocks


async def leave(engine: Engine, request: Request, num_events: int) -> None:
    """Close a stream after so many events."""
    async with contextlib.aclosing(engine.generate(request)) as events:
        for _ in range(num_events):
            await anext(events)


async def collect_with(engine: Engine, decoder: GatedDecoder, request: Request) -> list[int]:
    decoder.gate.release(request.params.max_tokens)
    return await collect(engine, request)


async def test_a_deadline_ends_a_request_that_waits_for_an_item() -> None:
    now = 0.0
    core = build_core(ToyDecoder())
    request = make_request(
        [1, 2, 3], 5, deadline=10.0, spans=(Span(0, 1, 1, 0),), pending_items={0}
    )
    async with running_engine(core, clock=lambda: now) as engine:
        events = engine.generate(request)
        assert isinstance(await anext(events), Admitted)
        now = 10.0
        engine.supply(make_request([9]), 0, None)  # anything that wakes the thread
        with pytest.raises(DeadlineExceeded):
            await anext(events)
    assert core.scheduler.num_unfinished == 0


async def test_an_item_that_arrives_later_lets_the_prompt_go_on() -> None:
    request = make_request([1, 90, 3], 5, spans=(Span(0, 1, 1, 0),), pending_items={0})
    async with running_engine(build_core(ToyDecoder())) as engine:
        events = engine.generate(request)
        assert isinstance(await anext(events), Admitted)
        engine.supply(request, 0, torch.tensor([[44.0]]))
        tokens = [s.token_id async for e in events if isinstance(e, Progress) for s in e.tokens]
    assert tokens == continuation([1, 44, 3], 5, history=1)


async def test_an_item_that_never_arrives_ends_the_request_with_its_error() -> None:
    core = build_core(ToyDecoder())
    request = make_request([1, 90, 3], 5, spans=(Span(0, 1, 1, 0),), pending_items={0})
    async with running_engine(core) as engine:
        events = engine.generate(request)
        assert isinstance(await anext(events), Admitted)
        engine.fail(request, EmbeddingMissing("gone", item_index=0))
        with pytest.raises(EmbeddingMissing):
            await anext(events)
        await collect(engine, make_request([1], 1))
        assert core.scheduler.num_unfinished == 0


async def test_timing_tells_the_queue_from_the_prefill() -> None:
    times = iter(range(1000))
    request = make_request([1] * 20, 2)  # two chunks of the prompt, then one token more
    async with running_engine(build_core(ToyDecoder()), clock=lambda: next(times)) as engine:
        await collect(engine, request)
    assert request.timing.queue_s > 0
    assert request.timing.prefill_s == 2
    assert request.timing.first_token_s >= 2


async def test_a_failing_request_fails_alone() -> None:
    decoder = ToyDecoder()
    decoder.poisoned = {96}
    async with running_engine(build_core(decoder)) as engine:
        good, bad = await asyncio.gather(
            collect(engine, make_request([5, 6], 20)),
            collect(engine, make_request([5, 96], 20)),
            return_exceptions=True,
        )
    assert good == continuation([5, 6], 20, history=1)
    assert isinstance(bad, Internal)


async def test_what_can_never_run_is_refused_at_once() -> None:
    async with running_engine(build_core(ToyDecoder(), max_context=20)) as engine:
        with pytest.raises(InvalidRequest):
            await collect(engine, make_request([1] * 20))


async def test_a_full_queue_is_overload_with_a_pause() -> None:
    decoder = GatedDecoder()
    async with running_engine(build_core(decoder, max_running=1), max_waiting=0) as engine:
        first = asyncio.create_task(collect(engine, make_request([1], 1)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await collect(engine, make_request([2], 1))
        decoder.gate.release(1)
        await first
    assert caught.value.retry_after_s == 1.0


async def test_a_wait_longer_than_the_deadline_is_overload() -> None:
    decoder = GatedDecoder()
    core = build_core(decoder, max_running=1)
    async with running_engine(core, meter=Meter(prefill_rate=2.0), clock=lambda: 0.0) as engine:
        first = asyncio.create_task(collect(engine, make_request([1] * 100, 1)))
        await asyncio.sleep(0)
        while not core.scheduler.running:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await collect(engine, make_request([1], 1, deadline=20.0))
        assert caught.value.retry_after_s == pytest.approx(50.0)
        decoder.gate.release(7)
        await first


async def test_stopping_ends_running_calls_as_draining_and_refuses_new_ones() -> None:
    decoder = GatedDecoder()
    async with running_engine(build_core(decoder)) as engine:
        running = asyncio.create_task(collect(engine, make_request([1], 9)))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)  # it has begun before the running step may end
        decoder.gate.release(1)
        await stopping
        with pytest.raises(Unavailable) as caught:
            await running
        assert caught.value.reason is Reason.DRAINING
        with pytest.raises(Unavailable):
            await collect(engine, make_request([1], 9))


async def test_a_dying_thread_fails_every_call_and_says_so() -> None:
    core = build_core(ToyDecoder())
    failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    core.expire = None  # type: ignore[assignment, method-assign]
    async with running_engine(core, on_failure=failed.set_result) as engine:
        with pytest.raises(Unavailable):
            await collect(engine, make_request([1], 9))
        assert "the log says which" in await failed


async def test_giving_up_ends_calls_though_a_step_hangs() -> None:
    decoder = GatedDecoder()
    core = build_core(decoder)
    async with running_engine(core) as engine:
        running = asyncio.create_task(collect(engine, make_request([1], 9)))
        while not core.scheduler.running:
            await asyncio.sleep(0)
        engine.give_up("rank 1 is gone")
        with pytest.raises(Unavailable, match="rank 1 is gone"):
            await running
        with pytest.raises(Unavailable):
            await collect(engine, make_request([1], 9))
        decoder.gate.release(1)


async def test_a_step_that_hangs_ends_calls_before_their_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "WATCH_S", 0.01)
    monkeypatch.setattr(loop, "LOST_STEP_S", 0.01)
    decoder = GatedDecoder()
    core = build_core(decoder, max_running=1)
    failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with running_engine(core, max_step_s=0.1, on_failure=failed.set_result) as engine:
        calls = [collect(engine, make_request([n], 9)) for n in (1, 2)]  # one runs, one waits
        ends = await asyncio.gather(*calls, return_exceptions=True)
        for end in ends:
            assert isinstance(end, Unavailable)
            assert end.retry is Retry.ELSEWHERE
            assert end.message == "a step of the engine did not end in 0.1 s" == await failed
        with pytest.raises(Unavailable):
            await collect(engine, make_request([3], 1))
        decoder.gate.release(1)


async def test_many_steps_and_waiting_for_an_item_are_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside an engine that hangs and says when the time is over."""
    monkeypatch.setattr(loop, "WATCH_S", 0.01)
    stuck, failures = GatedDecoder(), list[str]()
    limit = {"max_step_s": 0.5}
    async with (
        running_engine(build_core(stuck), on_failure=failures.append, **limit) as hanging,
        running_engine(build_core(ToyDecoder()), **limit) as busy,
        running_engine(build_core(ToyDecoder()), **limit) as waiting,
    ):
        request = make_request([1, 90, 3], 5, spans=(Span(0, 1, 1, 0),), pending_items={0})
        events = waiting.generate(request)
        assert isinstance(await anext(events), Admitted)
        hung = asyncio.create_task(collect(hanging, make_request([1], 1)))
        while not failures:
            assert await collect(busy, make_request([1], 50)) == continuation([1], 50, history=1)
        waiting.supply(request, 0, torch.tensor([[44.0]]))
        tokens = [s.token_id async for e in events if isinstance(e, Progress) for s in e.tokens]
        assert tokens == continuation([1, 44, 3], 5, history=1)
        with pytest.raises(Unavailable):
            await hung
        stuck.gate.release(1)


async def test_steps_are_metered() -> None:
    metrics = Metrics("llm")
    core = build_core(ToyDecoder(history=0), ToyMtp(num_right=3))
    async with running_engine(core, meter=Meter(metrics)) as engine:
        await collect(engine, make_request([5] * 16, 9, max_draft_tokens=3))
        assert engine.load().num_running == 0
    assert metrics.value("mimo_llm_prompt_tokens_total", source="computed") == 16
    assert metrics.value("mimo_llm_output_tokens_total") == 9
    assert metrics.value("mimo_llm_requests_finished_total", reason="length") == 1
    assert metrics.value("mimo_llm_draft_tokens_total", position="1") == 2
    assert metrics.value("mimo_llm_accepted_tokens_total", position="3") == 2
    assert metrics.value("mimo_llm_step_seconds", phase="decode") == 2
    assert metrics.value("mimo_llm_queue_wait_seconds") == 1
