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

from mimo.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    MimoError,
    NotFound,
    Overloaded,
    Unavailable,
)
from mimo.rpc.channel import open_channel
from mimo.rpc.status import from_rpc_error
from mimo.v1 import encoding_pb2, gateway_pb2, gateway_pb2_grpc

START_HINT = "start one with `mimo up` (or `make up`)"
TIMEOUT_S = 300.0

# Media of a gRPC call up to this size travel inside the message, which may have 8 MiB.
MAX_INLINE_BYTES = 4 << 20

_REST_ERRORS: Mapping[str, type[MimoError]] = {
    "overloaded": Overloaded,
    "rate_limit_exceeded": Overloaded,
    "insufficient_quota": Overloaded,
    "concurrency_limit": Overloaded,
    "service_unavailable": Unavailable,
    "upstream_unavailable": Unavailable,
    "timeout": DeadlineExceeded,
    "model_not_found": NotFound,
}


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
    """New text of the answer. ``num_tokens`` of it arrived since the last piece, when the call asks
    for them with ``return_token_ids``."""

    text: str
    reasoning: bool = False
    num_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    """What the system said about the whole call, last."""

    finish_reason: str
    usage: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


class ChatClient(Protocol):
    """Streams the answer to a conversation: pieces, then one Answer. Raises MimoError.

    ``options`` are what both faces know by the same name, such as ``max_tokens``, ``ignore_eos``,
    ``return_token_ids``, ``cache_salt`` or ``speculation``.
    """

    def ask(self, turns: Sequence[Turn], **options: Any) -> AsyncIterator[Piece | Answer]: ...

    async def close(self) -> None: ...


class RestClient:
    """The OpenAI-compatible face. Each call has ``timeout_s``, of which the system knows."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        url = url if "://" in url else f"http://{url}"
        self._url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=5),
            limits=httpx.Limits(max_connections=None),
            headers={"x-request-timeout-ms": str(round(timeout_s * 1000))},
        )

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
                        raise _rest_error(json.dumps(chunk), 500)
                    for choice in chunk["choices"]:
                        finish_reason = choice["finish_reason"] or finish_reason
                        if piece := _rest_piece(choice):
                            yield piece
                    if not chunk["choices"]:
                        yield Answer(finish_reason, chunk["usage"], chunk.get("mimo", {}))
        except httpx.TimeoutException:
            raise DeadlineExceeded(f"{self._url} did not answer in time") from None
        except httpx.ConnectError:
            raise Unavailable(f"nothing answers at {self._url}: {START_HINT}") from None
        except httpx.TransportError as error:
            raise Unavailable(f"{self._url}: {type(error).__name__}") from None

    async def close(self) -> None:
        await self._http.aclose()


class GrpcClient:
    """mimo.v1.Gateway. Each call has a deadline in ``timeout_s``."""

    def __init__(self, address: str, timeout_s: float = TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = open_channel(address)
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def ask(self, turns: Sequence[Turn], **options: Any) -> AsyncIterator[Piece | Answer]:
        known = gateway_pb2.SamplingParams.DESCRIPTOR.fields_by_name
        sampling = {name: options.pop(name) for name in [*options] if name in known}
        attached = sum(len(media.data) for turn in turns for media in turn.attachments)
        upload_salt = options.get("cache_salt", "") if attached > MAX_INLINE_BYTES else None
        request = gateway_pb2.GenerateRequest(
            messages=[await self._message(turn, upload_salt) for turn in turns],
            sampling=gateway_pb2.SamplingParams(**sampling),
            **options,
        )
        finish_reason = ""
        try:
            async for response in self._stub.Generate(request, timeout=self._timeout_s):
                match response.WhichOneof("event"):
                    case "delta":
                        delta = response.delta
                        is_reasoning = delta.WhichOneof("text") == "reasoning"
                        text = delta.reasoning if is_reasoning else delta.content
                        yield Piece(text, is_reasoning, len(delta.token_ids))
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

    async def _message(self, turn: Turn, upload_salt: str | None) -> gateway_pb2.Message:
        """Media are uploaded, with the salt of the call, unless that is None."""
        role = gateway_pb2.ROLE_USER if turn.role == "user" else gateway_pb2.ROLE_ASSISTANT
        parts = []
        for attachment in turn.attachments:
            if upload_salt is None:
                media = gateway_pb2.MediaInput(inline=attachment.data)
            else:
                reference = await self._upload(attachment.data, upload_salt)
                media = gateway_pb2.MediaInput(media_ref=reference)
            part = gateway_pb2.ContentPart()
            getattr(part, attachment.kind).CopyFrom(media)
            parts.append(part)
        parts.append(gateway_pb2.ContentPart(text=turn.text))
        return gateway_pb2.Message(role=role, parts=parts)

    async def _upload(self, data: bytes, salt: str) -> str:
        async def chunks() -> AsyncIterator[gateway_pb2.UploadMediaRequest]:
            for offset in range(0, len(data), 1 << 20):
                chunk = data[offset : offset + (1 << 20)]
                yield gateway_pb2.UploadMediaRequest(data=chunk, cache_salt=salt)

        try:
            uploaded = await self._stub.UploadMedia(chunks(), timeout=self._timeout_s)
            return uploaded.media_ref
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


def _rest_piece(choice: Mapping[str, Any]) -> Piece | None:
    """What a chunk adds to the answer, if it adds anything."""
    delta, num_tokens = choice["delta"], len(choice.get("token_ids") or ())
    if text := delta.get("reasoning_content"):
        return Piece(text, True, num_tokens)
    text = delta.get("content") or ""
    return Piece(text, False, num_tokens) if text or num_tokens else None


def _rest_error(body: bytes | str, status: int) -> MimoError:
    try:
        error = json.loads(body)["error"]
        message, param, code = str(error["message"]), error.get("param"), str(error.get("code"))
    except (ValueError, KeyError, TypeError):
        message, param, code = f"HTTP {status}", None, ""
    kind = _REST_ERRORS.get(code, InvalidRequest if status < 500 else Internal)
    return kind(message, field=param)


def _grpc_answer(finish_reason: str, summary: gateway_pb2.GenerateSummary) -> Answer:
    """In the terms of REST: the same names, modalities and outcomes."""
    prompt, speculation = summary.prompt, summary.speculation
    kinds = ("text", "image", "video", "audio", "cached")
    usage = {
        "prompt_tokens": prompt.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "prompt_tokens_details": {
            f"{kind}_tokens": getattr(prompt, f"{kind}_tokens") for kind in kinds
        },
    }
    timings = {
        field.name.removesuffix("_ms"): getattr(summary.timings, field.name)
        for field in summary.timings.DESCRIPTOR.fields
    }
    items = [
        {
            "index": item.index,
            "modality": encoding_pb2.Modality.Name(item.modality).rpartition("_")[2].lower(),
            "tokens": item.tokens,
            "cache": encoding_pb2.CacheOutcome.Name(item.cache).rpartition("_")[2].lower(),
            "encode_ms": item.encode_ms,
            "bytes": item.bytes,
        }
        for item in summary.items
    ]
    report = {
        "timings_ms": timings,
        "items": items,
        "speculation": {
            "drafted": list(speculation.drafted),
            "accepted": list(speculation.accepted),
        },
        "model_fingerprint": summary.model_fingerprint,
    }
    return Answer(finish_reason, usage, report)
