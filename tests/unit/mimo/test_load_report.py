"""Figures of a load, computed by hand."""

import io
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from mimo.cli.client import Answer, Piece, Turn
from mimo.cli.load.report import parse_limits, summarise
from mimo.cli.load.sample import Delivery, Sample, take
from mimo.cli.load.tables import tables
from mimo.cli.load.workload import Call
from mimo.errors import ConfigError, Internal, InvalidRequest, MimoError, Overloaded, Reason


def usage(prompt: int, output: int, cached: int = 0, image: int = 0) -> dict[str, Any]:
    details = {"text_tokens": prompt - image, "image_tokens": image, "cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"video_tokens": 0, "audio_tokens": 0, **details},
    }


def report(
    drafted: Sequence[int] = (), accepted: Sequence[int] = (), *outcomes: str
) -> dict[str, Any]:
    return {
        "speculation": {"drafted": drafted, "accepted": accepted},
        "items": [{"modality": "image", "cache": outcome} for outcome in outcomes],
    }


# Due at 10.0 and sent 0.1 late: first two tokens after 0.5, then 1, then 3 more; over at 12.5.
SLOW = Sample(
    kind="image",
    due=10.0,
    sent=10.1,
    ended=12.5,
    deliveries=[Delivery(10.5, 2), Delivery(11.0, 1), Delivery(12.0, 3)],
    usage=usage(prompt=30, output=6, cached=16, image=10),
    report=report((3, 3, 2), (2, 1, 0), "hit", "miss"),
)
# Due at 11.0: a single delivery.
QUICK = Sample(
    kind="text",
    due=11.0,
    sent=11.0,
    ended=11.25,
    deliveries=[Delivery(11.2, 4)],
    usage=usage(prompt=10, output=4),
    report=report((1,), (1,)),
)
REFUSED = Sample(kind="text", due=11.5, sent=11.5, ended=11.6, error=Overloaded("full"))
FAILED = Sample(kind="text", due=9.0, sent=9.0, ended=13.0, error=Internal("bug"))


def test_moments_of_a_sample() -> None:
    assert SLOW.num_tokens == 6
    assert SLOW.ttft_s == pytest.approx(0.5)
    assert SLOW.gaps_s == pytest.approx([0.5, 1.0])
    assert SLOW.tpot_s == pytest.approx(1.5 / 4)  # four tokens after the first delivery
    assert SLOW.e2e_s == pytest.approx(2.5)
    assert QUICK.gaps_s == [] and QUICK.tpot_s is None


def test_counts_tokens_and_rates() -> None:
    figures = summarise([SLOW, QUICK, REFUSED, FAILED], {})
    assert figures["seconds"] == pytest.approx(4.0)  # from 9.0 to 13.0
    assert figures["requests"] == {
        "sent": 4,
        "ok": 2,
        "refused": 1,
        "failed": 1,
        "errors": {"INTERNAL INTERNAL": 1, "RESOURCE_EXHAUSTED OVERLOADED": 1},
    }
    assert figures["tokens"] == {
        "prompt": 40,
        "prompt_by_kind": {"text": 30, "image": 10, "video": 0, "audio": 0},
        "output": 10,
        "prefix_hits": 1,
        "prefix_saved": 16,
        "prefix_saved_share": pytest.approx(0.4),
    }
    assert figures["rates"] == {
        "requests_per_s": pytest.approx(0.5),
        "goodput_per_s": None,
        "output_tokens_per_s": pytest.approx(2.5),
        "prompt_tokens_per_s": pytest.approx(10.0),
    }
    assert figures["embeddings"] == {"image": {"hit": 1, "miss": 1}}


def test_latencies_are_of_answers_and_interpolate() -> None:
    latencies = summarise([SLOW, QUICK, REFUSED, FAILED], {})["latency_ms"]
    # Between 200 and 500 ms: the 90th percentile lies at nine tenths of the way.
    assert latencies["ttft"] == pytest.approx(
        {"mean": 350, "p50": 350, "p90": 470, "p99": 497, "max": 500}
    )
    assert latencies["itl"] == pytest.approx(
        {"mean": 750, "p50": 750, "p90": 950, "p99": 995, "max": 1000}
    )
    assert latencies["tpot"] == pytest.approx(dict.fromkeys(latencies["tpot"], 375))
    assert latencies["e2e"]["max"] == pytest.approx(2500)
    assert latencies["send_lag"]["max"] == pytest.approx(100)


def test_percentiles_of_a_hundred_and_one_values() -> None:
    samples = [
        Sample("text", 0.0, 0.0, 1.0, [Delivery(n / 1000, 1)], QUICK.usage, QUICK.report)
        for n in reversed(range(101))
    ]
    ttft = summarise(samples, {})["latency_ms"]["ttft"]
    assert ttft == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100})


def test_acceptance_length_counts_the_token_of_the_step_itself() -> None:
    speculation = summarise([SLOW, QUICK], {})["speculation"]
    assert speculation["drafted"] == [4, 3, 2]
    assert speculation["accepted"] == [3, 1, 0]
    assert speculation["acceptance_length"] == pytest.approx(1 + 4 / 4)
    without = Sample("text", 0.0, 0.0, 1.0, [Delivery(0.5, 1)], QUICK.usage, report())
    assert summarise([without], {})["speculation"]["acceptance_length"] is None


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [("ttft=500.1", 2), ("ttft=499", 1), ("e2e=2600,tpot=374", 1), ("e2e=100", 0)],
)
def test_goodput_counts_answers_within_every_limit(limits: str, num_good: int) -> None:
    rates = summarise([SLOW, QUICK, FAILED], parse_limits(limits))["rates"]
    assert rates["goodput_per_s"] == pytest.approx(num_good / 4.0)


@pytest.mark.parametrize("text", ["itl=5", "ttft", "ttft=x", "ttft=0", "=5"])
def test_limits_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_limits(text)


def test_kinds_are_told_apart() -> None:
    by_kind = summarise([SLOW, QUICK, REFUSED], {})["by_kind"]
    assert list(by_kind) == ["image", "text"]
    assert (by_kind["text"]["sent"], by_kind["text"]["ok"]) == (2, 1)
    assert by_kind["image"]["ttft_ms"]["p50"] == pytest.approx(500)


@pytest.mark.parametrize("samples", [[SLOW, QUICK, REFUSED, FAILED], [REFUSED]])
def test_figures_are_json_and_fit_into_eighty_columns(samples: list[Sample]) -> None:
    figures = summarise(samples, {"ttft": 1.0})
    assert json.loads(json.dumps(figures)) == figures
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(tables(figures))
    text = console.export_text()
    assert "RESOURCE_EXHAUSTED OVERLOADED" in text
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


class Scripted:
    """A client that says what it is told to."""

    def __init__(self, *events: Piece | Answer | MimoError) -> None:
        self._events = events

    async def ask(self, turns: Sequence[Turn], **options: Any) -> AsyncIterator[Piece | Answer]:
        for event in self._events:
            if isinstance(event, MimoError):
                raise event
            yield event

    async def close(self) -> None: ...


CALL = Call("text", (Turn("user", "hello"),), {})
DONE = Answer("length", QUICK.usage, QUICK.report)


async def test_a_sample_keeps_what_arrived_and_when() -> None:
    heard: list[int] = []
    client = Scripted(Piece("a", num_tokens=1), Piece("b"), Piece("", num_tokens=3), DONE)
    sample = await take(client, CALL, on_tokens=heard.append)
    assert sample.is_ok and heard == [1, 3]
    assert [delivery.num_tokens for delivery in sample.deliveries] == [1, 3]
    moments = [sample.sent, *(delivery.moment for delivery in sample.deliveries), sample.ended]
    assert moments == sorted(moments)
    assert sample.due == sample.sent
    assert sample.usage == QUICK.usage


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (Overloaded("full", reason=Reason.CAPACITY), True),
        (InvalidRequest("no"), False),
        (Internal("bug"), False),
    ],
)
async def test_what_goes_wrong_is_in_the_sample(error: MimoError, is_refused: bool) -> None:
    sample = await take(Scripted(Piece("a", num_tokens=1), error), CALL, due=1.0)
    assert sample.error is error and sample.is_refused is is_refused
    assert sample.due == 1.0 and sample.ended >= sample.sent


@pytest.mark.parametrize("events", [(), (Piece("a", num_tokens=1),), (DONE,)])
async def test_a_stream_that_breaks_off_is_an_error(events: tuple[Piece | Answer, ...]) -> None:
    sample = await take(Scripted(*events), CALL)
    assert isinstance(sample.error, Internal)
