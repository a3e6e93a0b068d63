"""Talking to a running system, over REST or gRPC: the same turns in, the same pieces out."""

import base64
import json
import mimetypes
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import httpx

from mimo.errors import Internal, InvalidRequest, Unavailable
from mimo.rpc.channel import open_channel
from mimo.rpc.status import from_rpc_error
from mimo.v1 import gateway_pb2, gateway_pb2_grpc

START_HINT = "start one with `mimo up` (or `make up`)"


@dataclass(frozen=True)
class Attachment:
    """A media file of one turn. ``kind`` is image, audio or video."""

    kind: str
    name: str
    data: bytes

    @classmethod
    def read(cls, kind: str, path: Path) -> "Attachment":
        """Raises InvalidRequest when the file cannot be read."""
        try:
            return cls(kind, path.name, path.read_bytes())
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}") from None

    @property
    def data_url(self) -> str:
        mime = mimetypes.guess_type(self.name)[0] or "application/octet-stream"
        return f"data:{mime};base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True)
class Turn:
    """One message. ``role`` is user or assistant."""

    role: str
    text: str
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True)
class Piece:
    """New text of the answer."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True)
class Answer:
    """What the system said about the whole call, last."""

    finish_reason: str
    usage: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


class ChatClient(Protocol):
    """Streams the answer to a conversation: pieces, then one Answer. Raises MimoError."""

    def ask(self, turns: Sequence[Turn], **options: Any) -> AsyncIterator[Piece | Answer]: ...

    async def close(self) -> None: ...


class RestClient:
    """The OpenAI-compatible face. ``options`` are fields of the request body."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(300, connect=5))

    async def ask(self, turns: Sequence[Turn], **options: Any) -> AsyncIterator[Piece | Answer]:
        body = {
            "messages": [_rest_message(turn) for turn in turns],
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        finish_reason = ""
        try:
            async with self._http.stream(
                "POST", f"{self._url}/v1/chat/completions", json=body
            ) as response:
                if response.status_code != 200:
                    raise _rest_error(await response.aread(), response.status_code)
                async for chunk in _events(response):
                    if "error" in chunk:
                        raise Internal(str(chunk["error"].get("message")))
                    for choice in chunk["choices"]:
                        finish_reason = choice["finish_reason"] or finish_reason
                        delta = choice["delta"]
                        if text := delta.get("reasoning_content"):
                            yield Piece(text, reasoning=True)
                        if text := delta.get("content"):
                            yield Piece(text)
                    if not chunk["choices"]:
                        yield Answer(finish_reason, chunk["usage"], chunk.get("mimo", {}))
        except httpx.ConnectError:
            raise Unavailable(f"nothing answers at {self._url}: {START_HINT}") from None
        except httpx.TransportError as error:
            raise Unavailable(f"{self._url}: {type(error).__name__}") from None

    async def close(self) -> None:
        await self._http.aclose()


class GrpcClient:
    """The gRPC face. Supports ``max_tokens`` and ``temperature`` of the options."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = open_channel(address)
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def ask(self, turns: Sequence[Turn], **options: Any) -> AsyncIterator[Piece | Answer]:
        request = gateway_pb2.GenerateRequest(
            messages=[await self._message(turn) for turn in turns],
            sampling=gateway_pb2.SamplingParams(**options),
        )
        finish_reason = ""
        try:
            async for response in self._stub.Generate(request, timeout=300):
                match response.WhichOneof("event"):
                    case "delta" if response.delta.WhichOneof("text") == "reasoning":
                        yield Piece(response.delta.reasoning, reasoning=True)
                    case "delta":
                        yield Piece(response.delta.content)
                    case "choice_finished":
                        reason = response.choice_finished.reason
                        name = gateway_pb2.ChoiceFinishReason.Name(reason)
                        finish_reason = name.removeprefix("CHOICE_FINISH_REASON_").lower()
                    case "summary":
                        yield _grpc_answer(finish_reason, response.summary)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in (error.details() or ""):
                raise Unavailable(f"nothing answers at {self._address}: {START_HINT}") from None
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        await self._channel.close()

    async def _message(self, turn: Turn) -> gateway_pb2.Message:
        role = gateway_pb2.ROLE_USER if turn.role == "user" else gateway_pb2.ROLE_ASSISTANT
        parts = []
        for attachment in turn.attachments:
            media = gateway_pb2.MediaInput(media_ref=await self._upload(attachment.data))
            part = gateway_pb2.ContentPart()
            getattr(part, attachment.kind).CopyFrom(media)
            parts.append(part)
        parts.append(gateway_pb2.ContentPart(text=turn.text))
        return gateway_pb2.Message(role=role, parts=parts)

    async def _upload(self, data: bytes) -> str:
        async def chunks() -> AsyncIterator[gateway_pb2.UploadMediaRequest]:
            for offset in range(0, len(data), 1 << 20):
                yield gateway_pb2.UploadMediaRequest(data=data[offset : offset + (1 << 20)])

        try:
            return (await self._stub.UploadMedia(chunks())).media_ref
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def _rest_message(turn: Turn) -> dict[str, Any]:
    if not turn.attachments:
        return {"role": turn.role, "content": turn.text}
    parts: list[dict[str, Any]] = []
    for attachment in turn.attachments:
        if attachment.kind == "audio":
            encoded = base64.b64encode(attachment.data).decode()
            form = Path(attachment.name).suffix.lstrip(".")
            audio = {"data": encoded, "format": form}
            parts.append({"type": "input_audio", "input_audio": audio})
        else:
            kind = f"{attachment.kind}_url"
            parts.append({"type": kind, kind: {"url": attachment.data_url}})
    return {"role": turn.role, "content": [*parts, {"type": "text", "text": turn.text}]}


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """JSON payloads of a server-sent event stream, up to its [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            payload = line.removeprefix("data:").strip()
            if payload == "[DONE]":
                return
            yield json.loads(payload)


def _rest_error(body: bytes, status: int) -> InvalidRequest | Unavailable | Internal:
    try:
        error = json.loads(body)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        message, param = f"HTTP {status}", None
    kind = InvalidRequest if status < 500 else Unavailable if status == 503 else Internal
    return kind(message, field=param)


def _grpc_answer(finish_reason: str, summary: gateway_pb2.GenerateSummary) -> Answer:
    from google.protobuf.json_format import MessageToDict

    report = MessageToDict(
        summary, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    prompt = report.pop("prompt", {})
    usage = {
        "prompt_tokens": prompt.get("prompt_tokens", 0),
        "completion_tokens": summary.completion_tokens,
        "prompt_tokens_details": prompt,
    }
    timings = {name.removesuffix("_ms"): ms for name, ms in report.pop("timings", {}).items()}
    return Answer(finish_reason, usage, {**report, "timings_ms": timings})
