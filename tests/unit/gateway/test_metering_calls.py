"""What both faces count of their calls."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from gateway.generation import Event, PromptUsage, Started
from gateway.items import Modality
from gateway.metering import CallMeter
from mimo.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from mimo.metrics import Metrics
from tests.support.faces import PICTURE, STARTED, SUMMARY, said, stopped


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "error, code, outcome",
    [
        (None, "OK", "ok"),
        (InvalidRequest("x"), "INVALID_ARGUMENT", "client_error"),
        (NotFound("x"), "NOT_FOUND", "client_error"),
        (Overloaded("x"), "RESOURCE_EXHAUSTED", "shed"),
        (Unavailable("x"), "UNAVAILABLE", "server_error"),
        (DeadlineExceeded("x"), "DEADLINE_EXCEEDED", "server_error"),
        (Internal("x"), "INTERNAL", "server_error"),
        (ZeroDivisionError(), "INTERNAL", "server_error"),
        (asyncio.CancelledError(), "CANCELLED", "cancelled"),
        (GeneratorExit(), "CANCELLED", "cancelled"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_a_call_is_counted_by_how_it_ended(
    error: BaseException | None, code: str, outcome: str
) -> None:
    metrics = Metrics("gateway")
    meter = CallMeter(metrics, "rest", Clock())
    try:
        with meter.call("generate"):
            assert metrics.value("mimo_gateway_requests_in_flight", api="rest") == 1
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert metrics.value("mimo_gateway_requests_in_flight", api="rest") == 0
    labels = {"api": "rest", "method": "generate", "code": code}
    assert metrics.value("mimo_gateway_requests_total", **labels) == 1
    duration = "mimo_gateway_request_duration_seconds"
    assert metrics.value(duration, api="rest", outcome=outcome) == 1
    rejected = metrics.value("mimo_gateway_admission_rejected_total", reason="OVERLOADED")
    assert rejected == isinstance(error, Overloaded)


async def observe(events: Sequence[Event]) -> Metrics:
    """Events that come one second after another."""
    metrics, clock = Metrics("gateway"), Clock()

    async def ticking() -> AsyncGenerator[Event, None]:
        for event in events:
            clock.now += 1
            yield event

    seen = [event async for event in CallMeter(metrics, "grpc", clock).events(ticking())]
    assert seen == list(events)
    return metrics


async def test_tokens_that_come_together_share_their_gap() -> None:
    metrics = await observe([STARTED, said("a", num_tokens=1), said("bcd", num_tokens=4), SUMMARY])
    sample = metrics.registry.get_sample_value
    assert metrics.value("mimo_gateway_tokens_per_event") == 2
    assert sample("mimo_gateway_tokens_per_event_sum") == 5
    assert sample("mimo_gateway_itl_seconds_sum") == 0.25


async def test_gaps_are_measured_within_a_choice() -> None:
    events = [
        *(STARTED, said("a", 0), said("b", 1), said("c", 0), said("d", 1)),
        *(stopped(0), stopped(1), SUMMARY),
    ]
    metrics = await observe(events)
    assert metrics.value("mimo_gateway_ttft_seconds", media="image") == 1
    assert metrics.value("mimo_gateway_itl_seconds") == 2
    assert (
        metrics.registry.get_sample_value("mimo_gateway_ttft_seconds_sum", {"media": "image"}) == 2
    )
    assert metrics.registry.get_sample_value("mimo_gateway_itl_seconds_sum") == 4


@pytest.mark.parametrize(
    "modalities, tokens, media",
    [
        ([], 5, "none"),
        ([Modality.AUDIO, Modality.AUDIO], 5, "audio"),
        ([Modality.AUDIO, Modality.IMAGE], 5, "mixed"),
        ([Modality.IMAGE], 40_000, "large"),
    ],
)
async def test_the_first_token_is_measured_by_what_the_prompt_held(
    modalities: list[Modality], tokens: int, media: str
) -> None:
    items = tuple(type(PICTURE)(index, modality, 1) for index, modality in enumerate(modalities))
    started = Started("req_1", PromptUsage(text_tokens=tokens), items)
    metrics = await observe([started, said("x")])
    assert metrics.value("mimo_gateway_ttft_seconds", media=media) == 1


async def test_closing_the_meter_closes_what_it_meters() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[Event, None]:
        try:
            while True:
                yield said("x")
        finally:
            closed.set()

    events = CallMeter(Metrics("gateway"), "grpc").events(endless())
    await anext(events)
    await events.aclose()
    assert closed.is_set()
