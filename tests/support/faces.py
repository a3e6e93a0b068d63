"""The public faces over a pipeline that follows a script, and HTTP exchanges driven by hand."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Message

from gateway.admission import Place
from gateway.app import create_app
from gateway.catalog import Catalog
from gateway.generation import (
    ChoiceFinished,
    Delta,
    Event,
    FinishReason,
    GenerationRequest,
    ItemReport,
    PromptUsage,
    SpeculationReport,
    StageTimings,
    Started,
    Summary,
    TextKind,
)
from gateway.items import Modality
from gateway.metering import CallMeter
from gateway.routing import ReplicaPool
from gateway.targets import FixedTargets
from gateway.uploads import Uploads
from mimo.errors import MimoError
from mimo.metrics import Metrics
from mimo.rpc.interceptors import DrainGate
from mimo.store import Outcome
from mimo.store.memory_store import MemoryStore

PROMPT = PromptUsage(text_tokens=7, image_tokens=2, cached_tokens=3)
PICTURE = ItemReport(0, Modality.IMAGE, 2, Outcome.MISS, encode_ms=5.0, bytes=90)
STARTED = Started("req_test", PROMPT, (ItemReport(0, Modality.IMAGE, 2, bytes=90),))
SUMMARY = Summary(
    prompt=PROMPT,
    completion_tokens=4,
    reasoning_tokens=1,
    timings_ms=StageTimings(queue=1.0, total=20.0),
    items=(PICTURE,),
    speculation=SpeculationReport((3, 2), (2, 1)),
    model_fingerprint="0123456789abcdef",
)

NO_DECODERS = ReplicaPool("llm", FixedTargets(()), Metrics("gateway"))

Step = Event | Exception | asyncio.Event


def said(text: str, choice: int = 0, **fields: Any) -> Delta:
    return Delta(choice, TextKind.CONTENT, text, **fields)


def thought(text: str, choice: int = 0, **fields: Any) -> Delta:
    return Delta(choice, TextKind.REASONING, text, **fields)


def stopped(choice: int = 0, **fields: Any) -> ChoiceFinished:
    return ChoiceFinished(choice, FinishReason.STOP, **fields)


SCRIPT: tuple[Step, ...] = (STARTED, said("Hel"), said("lo"), stopped(), SUMMARY)


class ScriptedPipeline:
    """Gives the events of a script, raises its exceptions, waits where it has an asyncio.Event."""

    def __init__(self, script: Sequence[Step] = SCRIPT) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.refusal: MimoError | None = None
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    @contextmanager
    def place(self, timeout_s: float) -> Iterator[Place]:
        """Refuses when it is told to."""
        if self.refusal is not None:
            raise self.refusal
        yield Place(NO_DECODERS, time.monotonic() + timeout_s)

    async def generate(
        self, request: GenerationRequest, place: Place | None = None
    ) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.entered.set()
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def count(self, request: GenerationRequest) -> Started:
        self.requests.append(request)
        return STARTED

    async def fingerprints(self) -> dict[str, str]:
        return {"llm": "f" * 64}


class Exchange:
    """One HTTP exchange with an application. The client stays until it is told to ``leave``."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        headers: Mapping[str, str],
        pieces: Sequence[bytes],
    ) -> None:
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8080),
        }
        self._pieces = list(pieces)
        self._left = asyncio.Event()
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self.num_received = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.task = asyncio.ensure_future(self._run(app))

    def leave(self) -> None:
        self._left.set()

    async def start(self) -> int:
        """Wait for the status line."""
        message = await self._sent.get()
        assert message["type"] == "http.response.start", message
        self.status = message["status"]
        self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        return self.status

    async def piece(self) -> bytes:
        """The next piece of the body; empty when it is over."""
        message = await self._sent.get()
        assert message["type"] == "http.response.body", message
        return bytes(message["body"])

    async def finish(self) -> bytes:
        """The rest of the body, once the application has returned."""
        await self.task
        if not self.status and not self._sent.empty():
            await self.start()
        body = b""
        while not self._sent.empty():
            message = self._sent.get_nowait()
            body += message["body"]
        return body

    async def json(self) -> Any:
        return json.loads(await self.finish())

    async def _run(self, app: ASGIApp) -> None:
        await app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._pieces or self._left.is_set():
            await self._left.wait()
            return {"type": "http.disconnect"}
        self.num_received += 1
        body = self._pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self._pieces)}

    async def _send(self, message: Message) -> None:
        if not self._left.is_set():
            self._sent.put_nowait(dict(message))


class RestFace:
    """A REST application over a script."""

    def __init__(self, script: Sequence[Step] = SCRIPT, **options: Any) -> None:
        self.pipeline = ScriptedPipeline(script)
        self.metrics = Metrics("gateway")
        self.gate = DrainGate()
        self.uploads = Uploads(MemoryStore())
        self.app = create_app(
            self.pipeline,  # type: ignore[arg-type]
            catalog(),
            self.uploads,
            CallMeter(self.metrics, "rest"),
            self.gate,
            **options,
        )

    def open(
        self,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Exchange:
        pieces = [body] if isinstance(body, bytes) else body
        given = {"host": "localhost:8080"} | dict(headers or {})
        return Exchange(self.app, method, path, given, pieces)

    def chat(self, headers: Mapping[str, str] | None = None, **fields: Any) -> Exchange:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        given = {"content-type": "application/json"} | dict(headers or {})
        return self.open("POST", "/v1/chat/completions", json.dumps(body).encode(), given)


def catalog() -> Catalog:
    model = SimpleNamespace(name="tiny", max_context_tokens=4096, processor=object())
    return Catalog(model, created=1_700_000_000)  # type: ignore[arg-type]


def sse_chunks(body: bytes) -> list[Any]:
    """JSON payloads of a stream, checked to be framed as the clients need it and to end well."""
    assert body.endswith(b"data: [DONE]\n\n"), body[-200:]
    events = body.replace(b": ka\n", b"").split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
