"""Generation events as one ``chat.completion`` object, and what it shares with chunks. Pure."""

import base64
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from gateway.generation import (
    ChoiceFinished,
    Delta,
    Event,
    ItemReport,
    PromptUsage,
    Summary,
    TextKind,
    TokenLogprob,
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer shares."""

    id: str
    model: str
    created: int  # seconds since 1970
    request_id: str


@dataclass(frozen=True, slots=True)
class Shown:
    """Which of the optional parts the client wants to see."""

    reasoning: bool = True
    logprobs: bool = False
    token_ids: bool = False
    stream_usage: bool = False


@dataclass(slots=True)
class _Choice:
    content: str = ""
    reasoning: str = ""
    logprobs: list[Json] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: ChoiceFinished | None = None


class CompletionBuilder:
    """Collects events into one completion."""

    def __init__(self, head: AnswerHead, num_choices: int, shown: Shown) -> None:
        self._head = head
        self._shown = shown
        self._choices = [_Choice() for _ in range(num_choices)]
        self._summary: Summary | None = None

    def add(self, event: Event) -> None:
        match event:
            case Delta(index, kind, text, logprobs, token_ids):
                choice = self._choices[index]
                if kind is TextKind.CONTENT:
                    choice.content += text
                else:
                    choice.reasoning += text
                choice.logprobs += map(logprob_object, logprobs)
                choice.token_ids += token_ids
            case ChoiceFinished(index):
                self._choices[index].finished = event
            case Summary():
                self._summary = event

    def build(self) -> Json:
        """The completion. Every choice must have finished and the summary be there."""
        assert self._summary is not None
        return {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": system_fingerprint(self._summary),
            "choices": [self._choice(*pair) for pair in enumerate(self._choices)],
            "usage": usage_object(self._summary),
            "mimo": mimo_object(self._summary, self._head.request_id),
        }

    def _choice(self, index: int, choice: _Choice) -> Json:
        assert choice.finished is not None
        message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning and self._shown.reasoning:
            message |= reasoning_fields(choice.reasoning)
        rendered: Json = {
            "index": index,
            "message": message,
            "finish_reason": choice.finished.reason.value,
            "logprobs": logprobs_object(choice.logprobs) if self._shown.logprobs else None,
            **stop_field(choice.finished),
        }
        if self._shown.token_ids:
            rendered["token_ids"] = choice.token_ids
        return rendered


def new_answer_id() -> str:
    return "chatcmpl-" + base64.b32encode(secrets.token_bytes(15)).decode().lower()


def system_fingerprint(summary: Summary) -> str:
    return f"fp_{summary.model_fingerprint[:10]}"


def reasoning_fields(text: str) -> Json:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def stop_field(finished: ChoiceFinished) -> Json:
    """The stop string or id that matched, if one did."""
    if finished.stop_string is not None:
        return {"stop_reason": finished.stop_string}
    return {} if finished.stop_token_id is None else {"stop_reason": finished.stop_token_id}


def usage_object(summary: Summary) -> Json:
    prompt = summary.prompt
    return {
        "prompt_tokens": prompt.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "total_tokens": prompt.prompt_tokens + summary.completion_tokens,
        "prompt_tokens_details": prompt_details(prompt),
        "completion_tokens_details": {"reasoning_tokens": summary.reasoning_tokens},
    }


def prompt_details(prompt: PromptUsage) -> Json:
    """The first four add up to the prompt."""
    return {
        "text_tokens": prompt.text_tokens,
        "image_tokens": prompt.image_tokens,
        "video_tokens": prompt.video_tokens,
        "audio_tokens": prompt.audio_tokens,
        "cached_tokens": prompt.cached_tokens,
    }


def mimo_object(summary: Summary, request_id: str) -> Json:
    """What we report beyond the OpenAI fields. Times are in milliseconds."""
    return {
        "request_id": request_id,
        "timings_ms": {
            each.name: round(getattr(summary.timings_ms, each.name), 3)
            for each in fields(summary.timings_ms)
        },
        "items": item_objects(summary.items),
        "speculation": {
            "drafted": summary.speculation.drafted,
            "accepted": summary.speculation.accepted,
        },
        "model_fingerprint": summary.model_fingerprint,
    }


def item_objects(items: Iterable[ItemReport]) -> list[Json]:
    return [
        {
            "index": item.index,
            "modality": item.modality.value,
            "tokens": item.tokens,
            "cache": item.cache.value if item.cache is not None else None,
            "encode_ms": round(item.encode_ms, 3),
            "bytes": item.bytes,
        }
        for item in items
    ]


def logprobs_object(entries: list[Json]) -> Json:
    return {"content": entries, "refusal": None}


def logprob_object(entry: TokenLogprob) -> Json:
    rivals = [_token(top.token, top.logprob) for top in entry.top]
    return {**_token(entry.token, entry.logprob), "top_logprobs": rivals}


def _token(token: bytes, logprob: float) -> Json:
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}
