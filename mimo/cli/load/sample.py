"""What became of one request, moment by moment."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mimo.cli.client import Answer, ChatClient
from mimo.cli.load.workload import Call
from mimo.errors import Internal, MimoError, Overloaded


@dataclass(frozen=True, slots=True)
class Delivery:
    """Tokens that arrived together, at a moment of the monotonic clock."""

    moment: float
    num_tokens: int


@dataclass(slots=True)
class Sample:
    """One request. ``due`` is when it should have been sent: what it takes is counted from there.

    Moments are on the monotonic clock. ``error`` is None for an answer that came to its end.
    """

    kind: str
    due: float
    sent: float
    ended: float = 0.0
    deliveries: list[Delivery] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    error: MimoError | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def is_refused(self) -> bool:
        """Turned away for load, as opposed to gone wrong."""
        return isinstance(self.error, Overloaded)

    @property
    def num_tokens(self) -> int:
        return sum(delivery.num_tokens for delivery in self.deliveries)

    @property
    def ttft_s(self) -> float:
        """To the first token. Needs a delivery."""
        return self.deliveries[0].moment - self.due

    @property
    def gaps_s(self) -> list[float]:
        """Between one delivery and the next: how long a reader waits for something new."""
        moments = [delivery.moment for delivery in self.deliveries]
        return [after - before for before, after in zip(moments, moments[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Per output token after those of the first delivery; None when there are none."""
        num_after = self.num_tokens - self.deliveries[0].num_tokens
        if not num_after:
            return None
        return (self.deliveries[-1].moment - self.deliveries[0].moment) / num_after

    @property
    def e2e_s(self) -> float:
        return self.ended - self.due


async def take(
    client: ChatClient,
    call: Call,
    *,
    due: float | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Sample:
    """Ask and watch. Raises nothing but cancellation: what goes wrong is in the sample.

    ``due`` None: now. ``on_tokens`` hears of tokens as they come.
    """
    sent = time.monotonic()
    sample = Sample(call.kind, sent if due is None else due, sent)
    answer: Answer | None = None
    try:
        async for event in client.ask(call.turns, **call.options):
            if isinstance(event, Answer):
                answer = event
            elif event.num_tokens:
                sample.deliveries.append(Delivery(time.monotonic(), event.num_tokens))
                on_tokens(event.num_tokens)
        if answer is None or not sample.deliveries:
            raise Internal("the stream ended without an answer")
        sample.usage, sample.report = answer.usage, answer.report
    except MimoError as error:
        sample.error = error
    sample.ended = time.monotonic()
    return sample
