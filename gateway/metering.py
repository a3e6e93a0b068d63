"""What the gateway measures about every public call, the same for both faces."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from gateway.generation import Delta, Event, ItemReport, Started
from mimo.errors import (
    Cancelled,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unimplemented,
)
from mimo.metrics import Metrics
from mimo.rpc.status import from_exception

LARGE_PROMPT_TOKENS = 32_768

_CLIENT_ERRORS = frozenset(
    error.code
    for error in (InvalidRequest, NotFound, Unauthenticated, PermissionDenied, Unimplemented)
)


class CallMeter:
    """Counts calls of one face (``api`` is "grpc" or "rest")."""

    def __init__(
        self, metrics: Metrics, api: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._api = api
        self._clock = clock

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        """Measure one call from its first to its last byte."""
        began = self._clock()
        code = "OK"
        self._metrics.add("mimo_gateway_requests_in_flight", 1, api=self._api)
        try:
            yield
        except GeneratorExit:  # the stream's reader has left
            code = Cancelled.code
            raise
        except BaseException as error:
            translated = from_exception(error)
            code = translated.code
            if isinstance(translated, Overloaded):
                self._metrics.inc("mimo_gateway_admission_rejected_total", reason=translated.reason)
            raise
        finally:
            self._metrics.add("mimo_gateway_requests_in_flight", -1, api=self._api)
            self._metrics.inc(
                "mimo_gateway_requests_total", api=self._api, method=method, code=code
            )
            self._metrics.observe(
                "mimo_gateway_request_duration_seconds",
                self._clock() - began,
                api=self._api,
                outcome=_outcome(code),
            )

    async def events(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Pass events through, measuring time to the first text, between texts of a choice by
        token, and how many tokens come together."""
        began = self._clock()
        latest: dict[int, float] = {}
        media = "none"
        async with aclosing(events):
            async for event in events:
                match event:
                    case Started():
                        media = _media(event.items, event.prompt.prompt_tokens)
                    case Delta(choice_index, num_tokens=num_tokens):
                        self._metrics.observe("mimo_gateway_tokens_per_event", num_tokens)
                        now = self._clock()
                        if not latest:
                            self._metrics.observe(
                                "mimo_gateway_ttft_seconds", now - began, media=media
                            )
                        if choice_index in latest:
                            gap = (now - latest[choice_index]) / max(num_tokens, 1)
                            self._metrics.observe("mimo_gateway_itl_seconds", gap)
                        latest[choice_index] = now
                yield event


def _outcome(code: str) -> str:
    match code:
        case "OK":
            return "ok"
        case Overloaded.code:
            return "shed"
        case Cancelled.code:
            return "cancelled"
    return "client_error" if code in _CLIENT_ERRORS else "server_error"


def _media(items: tuple[ItemReport, ...], prompt_tokens: int) -> str:
    kinds = {item.modality.value for item in items}
    if prompt_tokens > LARGE_PROMPT_TOKENS:
        return "large"
    if not kinds:
        return "none"
    return kinds.pop() if len(kinds) == 1 else "mixed"
