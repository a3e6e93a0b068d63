"""POST /v1/chat/completions and POST /v1/tokenize."""

import math
import re
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.admission import Place
from gateway.api.answer import (
    AnswerHead,
    CompletionBuilder,
    item_objects,
    new_answer_id,
    prompt_details,
)
from gateway.api.body import read_json
from gateway.api.chunks import ChunkBuilder
from gateway.api.request import ChatCall, parse_chat
from gateway.api.sse import PATIENCE, EventStream, Patience
from gateway.catalog import Catalog
from gateway.generation import Event
from gateway.metering import CallMeter
from gateway.pipeline import Pipeline
from mimo.errors import InvalidRequest

# How long the official clients will wait for a whole answer, as they say with every call.
_CLIENT_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
_CLIENT_MARGIN_S = 0.5

_MILLISECONDS = re.compile(r"[1-9][0-9]{0,8}")
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class Chat:
    """Handlers around one pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        catalog: Catalog,
        meter: CallMeter,
        patience: Patience = PATIENCE,
    ) -> None:
        self._pipeline = pipeline
        self._catalog = catalog
        self._meter = meter
        self._patience = patience

    def admit(self, request: Request) -> AbstractContextManager[Place]:
        """A place for a request of which only the head is known. Raises Overloaded."""
        # Hints are for the whole answer unless it is streamed, which only the body tells.
        return self._pipeline.place(_timeout_s(request, is_stream=True))

    async def completions(self, request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        call = await self._parse(request)
        head = AnswerHead(
            id=new_answer_id(),
            model=call.model or self._catalog.card.name,
            created=int(time.time()),
            request_id=call.request.request_id,
        )
        headers = {"x-ignored-params": ",".join(call.ignored)} if call.ignored else {}
        generated = self._pipeline.generate(call.request, request.state.place)
        if call.stream:
            chunks = self._chunks(call, head, generated)
            return EventStream(chunks, head.request_id, headers, self._patience)
        builder = CompletionBuilder(head, call.request.n, call.shown)
        async with aclosing(self._meter.events(generated)) as events:
            async for event in events:
                builder.add(event)
        return JSONResponse(builder.build(), headers=headers)

    async def tokenize(self, request: Request) -> Response:
        """Plan a request: token counts by modality, without encoding or generating."""
        call = await self._parse(request)
        started = await self._pipeline.count(call.request)
        return JSONResponse(
            {
                "count": started.prompt.prompt_tokens,
                "prompt_tokens_details": prompt_details(started.prompt),
                "items": item_objects(started.items),
                "max_model_len": self._catalog.card.max_context_tokens,
            }
        )

    async def _parse(self, request: Request) -> ChatCall:
        def parse(body: dict[str, Any]) -> ChatCall:
            timeout_s = _timeout_s(request, is_stream=body.get("stream") is True)
            return parse_chat(body, request.state.request_id, timeout_s)

        call = await read_json(request, parse)
        self._catalog.check(call.model)
        return call

    async def _chunks(
        self, call: ChatCall, head: AnswerHead, generated: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """What each event adds, if anything."""
        builder = ChunkBuilder(head, call.request.n, call.shown)
        async with aclosing(self._meter.events(generated)) as events:
            async for event in events:
                if chunks := list(builder.chunks(event)):
                    yield chunks


def _timeout_s(request: Request, *, is_stream: bool) -> float:
    """How long the client lets us work; the pipeline has a bound of its own."""
    given = request.headers.get("x-request-timeout-ms")
    if given is not None and not _MILLISECONDS.fullmatch(given):
        raise InvalidRequest(
            "x-request-timeout-ms must be a positive whole number", field="x-request-timeout-ms"
        )
    timeout_s = math.inf if given is None else int(given) / 1000
    if is_stream:  # the clients' own limits are for the time between two events
        return timeout_s
    for name in _CLIENT_TIMEOUTS:
        hint = request.headers.get(name, "")
        if _SECONDS.fullmatch(hint) and float(hint) > _CLIENT_MARGIN_S:
            timeout_s = min(timeout_s, float(hint) - _CLIENT_MARGIN_S)
    return timeout_s
