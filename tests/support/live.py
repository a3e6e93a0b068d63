"""A running system, and plain clients of its two faces that report in the same terms."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from mimo.errors import MimoError
from mimo.rpc.status import from_rpc_error
from mimo.v1 import encoding_pb2, gateway_pb2, gateway_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
POLL_S = 0.02


def eventually(what: str, check: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for something that other processes do on their own time."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_S)


# ── the system ──


@dataclass
class Stack:
    """`mimo up` and what its ready file says."""

    process: "subprocess.Popen[str]"
    ready_file: Path
    output: list[str]

    @property
    def state(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.ready_file.read_text())
        return parsed

    @property
    def rest_url(self) -> str:
        return str(self.state["rest"])

    @property
    def grpc_address(self) -> str:
        return str(self.state["grpc"])

    def processes(self, role: str) -> list[dict[str, Any]]:
        return [entry for entry in self.state["processes"] if entry["role"] == role]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the supervisor and return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def total(self, role: str, name: str, **labels: str) -> float:
        """Sum of a metric over the processes of a role and all labels that are not given."""
        return sum(
            value
            for entry in self.processes(role)
            for sample, found, value in scrape(entry["metrics"])
            if sample == name and labels.items() <= found.items()
        )

    def work(self) -> "Counter[str]":
        """What has been done so far: items that reached an encoder, encodes, media jobs of the
        gateway, prompt tokens computed."""
        encoders = ("vision", "audio")
        items, jobs = "mimo_encoder_items_total", "mimo_gateway_media_decode_seconds_count"
        return Counter(
            items=int(sum(self.total(role, items) for role in encoders)),
            encodes=int(sum(self.total(role, items, outcome="encoded") for role in encoders)),
            decodes=int(self.total("gateway", jobs)),
            prompt_tokens=int(self.total("llm", "mimo_llm_prompt_tokens_total")),
        )


def start(
    arguments: Sequence[str], output: list[str], **environment: str
) -> "subprocess.Popen[str]":
    """Run a module of this interpreter; its lines on both streams are added to ``output``."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    threading.Thread(target=_drain, args=(process.stdout, output), daemon=True).start()
    return process


def start_stack(directory: Path, *flags: str, **environment: str) -> Stack:
    """Run `mimo up` on free ports and wait for its ready file."""
    ready_file = directory / "ready.json"
    output: list[str] = []
    ports = ("--rest-port", "0", "--grpc-port", "0")
    process = start(
        ["mimo.cli", "up", *ports, "--ready-file", str(ready_file), *flags],
        output,
        **environment,
    )
    try:
        eventually(
            "the stack starts", lambda: ready_file.exists() or process.poll() is not None, 120
        )
        if not ready_file.exists():
            raise AssertionError("the stack did not start")
    except AssertionError as error:
        process.kill()
        process.wait()
        raise RuntimeError(f"{error}:\n" + "".join(output)) from None
    return Stack(process, ready_file, output)


def scrape(url: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of every sample of a metrics page."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _drain(stream: Any, output: list[str]) -> None:
    with stream:
        output.extend(stream)


# ── its clients ──


@dataclass(frozen=True)
class Media:
    """A part of a question. ``kind`` is image, audio or video; ``source`` a file, a URL, or a
    reference to an upload."""

    kind: str
    source: bytes | str


def image(source: bytes | str) -> Media:
    return Media("image", source)


def audio(source: bytes | str) -> Media:
    return Media("audio", source)


def video(source: bytes | str) -> Media:
    return Media("video", source)


Part = str | Media


@dataclass(frozen=True)
class Item:
    modality: str
    tokens: int
    cache: str


@dataclass
class Choice:
    text: str = ""
    finish_reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Reply:
    """An answer, whichever face gave it."""

    choices: list[Choice]
    prompt_tokens: dict[str, int] = field(default_factory=dict)  # text, image, video, audio, all
    completion_tokens: int = 0
    items: list[Item] = field(default_factory=list)
    timings_ms: dict[str, float] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def outcomes(self) -> set[str]:
        return {item.cache for item in self.items}


class Rest:
    """The OpenAI-compatible face. Options are fields of the body."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def post(self, *parts: Part, **options: Any) -> httpx.Response:
        return self._http.post("/v1/chat/completions", json=rest_body(*parts, **options))

    def ask(self, *parts: Part, **options: Any) -> Reply:
        response = self.post(*parts, return_token_ids=True, **options)
        assert response.status_code == 200, response.text
        completion = response.json()
        choices = [
            Choice(
                choice["message"]["content"],
                choice["finish_reason"],
                choice["token_ids"],
                [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content", ())],
            )
            for choice in completion["choices"]
        ]
        return _rest_reply(choices, completion["usage"], completion["mimo"])

    def stream(self, *parts: Part, **options: Any) -> Iterator[dict[str, Any]]:
        """The chunks of an answer as they come, up to [DONE]."""
        body = rest_body(*parts, stream=True, stream_options={"include_usage": True}, **options)
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def ask_streaming(self, *parts: Part, **options: Any) -> Reply:
        choices: dict[int, Choice] = {}
        last: dict[str, Any] = {}
        for chunk in self.stream(*parts, return_token_ids=True, **options):
            for part in chunk["choices"]:
                choice = choices.setdefault(part["index"], Choice())
                choice.text += part["delta"].get("content", "")
                choice.finish_reason = part["finish_reason"] or choice.finish_reason
                choice.token_ids += part.get("token_ids", [])
                entries = (part.get("logprobs") or {}).get("content", ())
                choice.logprobs += [entry["logprob"] for entry in entries]
            last = chunk
        ordered = [choices[index] for index in sorted(choices)]
        return _rest_reply(ordered, last["usage"], last["mimo"])


class Grpc:
    """mimo.v1.Gateway. Options are fields of GenerateRequest; ``sampling`` takes a dict."""

    def __init__(self, address: str) -> None:
        limit = ("grpc.max_send_message_length", 64 << 20)  # the server's is what is tested
        self._channel = grpc.insecure_channel(address, options=[limit])
        self.stub = gateway_pb2_grpc.GatewayStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def ask(self, *parts: Part, **options: Any) -> Reply:
        request = grpc_request(*parts, return_token_ids=True, **options)
        choices = [Choice() for _ in range(request.n or 1)]
        summary = gateway_pb2.GenerateSummary()
        for event in self.stub.Generate(request, timeout=PATIENCE_S):
            match event.WhichOneof("event"):
                case "delta":
                    choice = choices[event.delta.choice_index]
                    choice.text += event.delta.content
                    choice.token_ids += event.delta.token_ids
                    choice.logprobs += [entry.logprob for entry in event.delta.logprobs]
                case "choice_finished":
                    finished = event.choice_finished
                    name = gateway_pb2.ChoiceFinishReason.Name(finished.reason)
                    choices[finished.choice_index].finish_reason = name.rpartition("_")[2].lower()
                case "summary":
                    summary = event.summary
        return _grpc_reply(choices, summary)

    def refusal(self, *parts: Part, **options: Any) -> MimoError:
        """The error of a call that must fail, with its ErrorInfo."""
        try:
            self.ask(*parts, **options)
        except grpc.RpcError as error:
            return from_rpc_error(error)
        raise AssertionError("the call was answered")

    def upload(self, data: bytes) -> str:
        chunks = (
            gateway_pb2.UploadMediaRequest(data=data[offset : offset + (1 << 20)])
            for offset in range(0, len(data), 1 << 20)
        )
        reference: str = self.stub.UploadMedia(chunks, timeout=PATIENCE_S).media_ref
        return reference


def rest_body(*parts: Part, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(map(_rest_part, parts))}], **options}


def grpc_request(*parts: Part, **options: Any) -> gateway_pb2.GenerateRequest:
    message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=map(_grpc_part, parts))
    return gateway_pb2.GenerateRequest(messages=[message], **options)


def _rest_part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = part.source
    if isinstance(url, bytes):
        url = f"data:;base64,{base64.b64encode(url).decode()}"
    elif url.startswith("media_"):
        url = f"media:{url}"
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": url}}


def _grpc_part(part: Part) -> gateway_pb2.ContentPart:
    if isinstance(part, str):
        return gateway_pb2.ContentPart(text=part)
    if isinstance(part.source, bytes):
        media = gateway_pb2.MediaInput(inline=part.source)
    elif part.source.startswith("media_"):
        media = gateway_pb2.MediaInput(media_ref=part.source)
    else:
        media = gateway_pb2.MediaInput(url=part.source)
    return gateway_pb2.ContentPart(**{part.kind: media})


def _rest_reply(choices: list[Choice], usage: dict[str, Any], report: dict[str, Any]) -> Reply:
    details = usage["prompt_tokens_details"]
    kinds = ("text", "image", "video", "audio")
    counts = {kind: details[f"{kind}_tokens"] for kind in kinds}
    return Reply(
        choices,
        counts | {"all": usage["prompt_tokens"]},
        usage["completion_tokens"],
        [Item(item["modality"], item["tokens"], item["cache"]) for item in report["items"]],
        report["timings_ms"],
        report["speculation"]["drafted"],
    )


def _grpc_reply(choices: list[Choice], summary: gateway_pb2.GenerateSummary) -> Reply:
    prompt, timings = summary.prompt, summary.timings
    kinds = ("text", "image", "video", "audio")
    counts = {kind: getattr(prompt, f"{kind}_tokens") for kind in kinds}
    return Reply(
        choices,
        counts | {"all": prompt.prompt_tokens},
        summary.completion_tokens,
        [
            Item(
                encoding_pb2.Modality.Name(item.modality).rpartition("_")[2].lower(),
                item.tokens,
                encoding_pb2.CacheOutcome.Name(item.cache).rpartition("_")[2].lower(),
            )
            for item in summary.items
        ],
        {
            field.name.removesuffix("_ms"): getattr(timings, field.name)
            for field in timings.DESCRIPTOR.fields
        },
        list(summary.speculation.drafted),
    )
