"""Load on a running system: questions asked by many at once, and what became of each."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from mimo.v1 import gateway_pb2_grpc
from tests.support.live import Part, grpc_request, rest_body

FACES = ("rest", "grpc")


@dataclass(frozen=True)
class Question:
    """``seed`` None is greedy. The answer is always ``num_tokens`` long."""

    name: str
    parts: tuple[Part, ...]
    seed: int | None = None
    num_tokens: int = 24

    @property
    def sampling(self) -> dict[str, Any]:
        how: dict[str, Any] = {"temperature": 0.0}
        if self.seed is not None:
            how = {"temperature": 0.9, "top_p": 0.95, "seed": self.seed}
        return {"max_tokens": self.num_tokens, "ignore_eos": True, **how}


@dataclass
class Answer:
    """What arrived. ``error`` is empty for a stream that ended well."""

    question: Question
    face: str
    began: float = 0.0
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    code: str = ""  # of a refusal: a gRPC or HTTP status

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def said(self) -> tuple[list[int], str]:
        return self.token_ids, self.text


class Clients:
    """Both faces of one gateway, asynchronously. Use inside ``opened``."""

    def __init__(self, http: httpx.AsyncClient, stub: Any) -> None:
        self._http = http
        self._stub = stub

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, rest_url: str, grpc_address: str) -> AsyncIterator["Clients"]:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=rest_url, timeout=None, limits=limits) as http,
            grpc.aio.insecure_channel(grpc_address) as channel,
        ):
            yield cls(http, gateway_pb2_grpc.GatewayStub(channel))

    async def ask(
        self,
        question: Question,
        face: str,
        *,
        salt: str = "",
        timeout_s: float = 120.0,
        request_id: str = "",
        on_tokens: Callable[[Answer], None] = lambda _: None,
    ) -> Answer:
        """Never raises but when cancelled: what goes wrong is in the answer.

        ``salt`` makes it a tenant's own question, so that nothing is found in a cache.
        """
        answer = Answer(question, face, began=time.monotonic())
        ask = self._by_rest if face == "rest" else self._by_grpc
        try:
            await ask(answer, salt, timeout_s, request_id, on_tokens)
        except (httpx.HTTPError, grpc.RpcError) as error:
            answer.error = answer.error or f"{type(error).__name__}: {error}"
            if isinstance(error, grpc.RpcError):
                answer.code = error.code().name
        answer.ended = time.monotonic()
        return answer

    async def _by_rest(
        self,
        answer: Answer,
        salt: str,
        timeout_s: float,
        request_id: str,
        on_tokens: Callable[[Answer], None],
    ) -> None:
        question = answer.question
        body = rest_body(
            *question.parts,
            stream=True,
            return_token_ids=True,
            cache_salt=salt,
            **question.sampling,
        )
        headers = {"x-request-timeout-ms": str(round(timeout_s * 1000))}
        if request_id:
            headers["x-request-id"] = request_id
        url = "/v1/chat/completions"
        async with self._http.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != 200:
                answer.code = str(response.status_code)
                answer.error = (await response.aread()).decode()
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    answer.error = json.dumps(chunk["error"])
                    return
                for choice in chunk["choices"]:
                    answer.text += choice["delta"].get("content") or ""
                    answer.token_ids += choice.get("token_ids") or []
                on_tokens(answer)
            answer.error = "the stream ended without [DONE]"

    async def _by_grpc(
        self,
        answer: Answer,
        salt: str,
        timeout_s: float,
        request_id: str,
        on_tokens: Callable[[Answer], None],
    ) -> None:
        question = answer.question
        request = grpc_request(
            *question.parts, return_token_ids=True, cache_salt=salt, sampling=question.sampling
        )
        metadata = (("x-request-id", request_id),) if request_id else ()
        is_over = False
        async for event in self._stub.Generate(request, timeout=timeout_s, metadata=metadata):
            match event.WhichOneof("event"):
                case "delta":
                    answer.text += event.delta.content
                    answer.token_ids += event.delta.token_ids
                    on_tokens(answer)
                case "summary":
                    is_over = True
        if not is_over:
            answer.error = "the stream ended without a summary"


def numbers_until(stop: asyncio.Event, first: int = 0) -> Iterator[int]:
    """Running numbers for a closed loop that goes on until it is told to stop."""
    return itertools.takewhile(lambda _: not stop.is_set(), itertools.count(first))
