"""From the body of a chat request to a GenerationRequest. Pure: no I/O, no clock."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.api.answer import Shown
from gateway.api.parts import media_options, parse_messages
from gateway.api.schema import FORBIDDEN, UNSUPPORTED, ChatFields
from gateway.api.structure import requested_grammar
from gateway.bounds import MAX_PRIORITY
from gateway.conversation import Conversation, Ending, Role
from gateway.generation import (
    CachePolicy,
    EmbeddingCache,
    GenerationRequest,
    SamplingParams,
    Speculation,
)
from gateway.items import MediaOptions
from gateway.salt import tenant_salt
from mimo.errors import InvalidRequest, Reason

_SEED_MASK = (1 << 64) - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_REPORTABLE = re.compile(r"[\w.-]{1,64}", re.ASCII)  # what may stand in a header
_MAX_REPORTED = 32


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A parsed chat request: what to generate, and how to send it. ``ignored`` names what was not
    understood."""

    request: GenerationRequest
    model: str
    stream: bool
    shown: Shown
    ignored: tuple[str, ...]


def parse_chat(body: Mapping[str, Any], request_id: str, timeout_s: float) -> ChatCall:
    """Raises InvalidRequest whose ``field`` is the dotted path of the offending parameter."""
    _refuse(body)
    fields = _validate(body)
    request = GenerationRequest(
        request_id=request_id,
        conversation=_conversation(fields),
        sampling=_sampling(fields),
        speculation=Speculation(fields.speculation.enabled, fields.speculation.max_draft_tokens),
        cache=CachePolicy(fields.cache.prefix, EmbeddingCache(fields.cache.embeddings)),
        grammar=requested_grammar(fields),
        n=fields.n,
        stop=tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        top_logprobs=fields.top_logprobs if fields.logprobs else None,
        return_token_ids=fields.return_token_ids,
        priority=max(-MAX_PRIORITY, min(MAX_PRIORITY, fields.priority)),
        tenant_salt=tenant_salt(fields.cache_salt),
        timeout_s=timeout_s,
    )
    shown = Shown(
        reasoning=fields.include_reasoning and not fields.reasoning.exclude,
        logprobs=fields.logprobs,
        token_ids=fields.return_token_ids,
        stream_usage=fields.stream_options.include_usage,
    )
    return ChatCall(request, fields.model, fields.stream, shown, _ignored(fields))


def _refuse(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in FORBIDDEN:
            raise InvalidRequest(
                f"{name} is never accepted", reason=Reason.FORBIDDEN_PARAMETER, field=name
            )
        if name in UNSUPPORTED:
            harmless, why = UNSUPPORTED[name]
            if value not in harmless:
                raise InvalidRequest(
                    f"{name} is not supported: {why}",
                    reason=Reason.UNSUPPORTED_PARAMETER,
                    field=name,
                )


def _validate(body: Mapping[str, Any]) -> ChatFields:
    try:
        fields = ChatFields.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", field="top_logprobs")
    for key in fields.logit_bias:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"{key[:20]!r} is not a token id", field="logit_bias")
    max_tokens = _max_tokens(fields)
    if max_tokens is not None and fields.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is above {max_tokens}, the most", field="min_tokens")
    return fields


def _first_problem(error: ValidationError) -> InvalidRequest:
    problem = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for step in problem["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]":
            path += f".{step[:64]}" if path else step[:64]
    kind = problem["type"]
    if kind == "missing" or (kind == "too_short" and path == "messages"):
        reason = Reason.MISSING_FIELD
    elif kind.endswith("_type"):
        reason = Reason.INVALID_TYPE
    else:
        reason = Reason.INVALID_VALUE
    return InvalidRequest(f"{path}: {problem['msg']}", reason=reason, field=path)


def _conversation(fields: ChatFields) -> Conversation:
    messages = parse_messages(fields.messages, _media_options(fields))
    ending = Ending.NEW_TURN
    if fields.continue_final_message or fields.messages[-1].get("prefix") is True:
        if messages[-1].role is not Role.ASSISTANT:
            raise InvalidRequest(
                "continue_final_message needs an assistant message at the end",
                field="continue_final_message",
            )
        if fields.add_generation_prompt and "add_generation_prompt" in fields.model_fields_set:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                field="continue_final_message",
            )
        ending = Ending.CONTINUE
    elif not fields.add_generation_prompt:
        ending = Ending.CLOSED
    return Conversation(
        messages=messages,
        thinking=_thinking(fields),
        keep_all_reasoning=fields.chat_template_kwargs.keep_all_reasoning,
        ending=ending,
    )


def _media_options(fields: ChatFields) -> MediaOptions:
    """Of the whole request: the later spelling wins."""
    options = MediaOptions()
    for name in ("mm_processor_kwargs", "media"):
        options = media_options(getattr(fields, name), options, name)
    if fields.use_audio_in_video is not None:
        given = {"use_audio_track": fields.use_audio_in_video}
        options = media_options(given, options, "use_audio_in_video")
    return options


def _thinking(fields: ChatFields) -> bool | None:
    """The most specific of the many spellings wins; None leaves it to the template."""
    effort = fields.reasoning.effort or fields.reasoning_effort
    spellings = (
        fields.chat_template_kwargs.enable_thinking,
        fields.chat_template_kwargs.thinking,
        fields.enable_thinking,
        None if fields.thinking is None else fields.thinking.type == "enabled",
        fields.reasoning.enabled,
        None if effort is None else effort != "none",
    )
    return next((each for each in spellings if each is not None), None)


def _sampling(fields: ChatFields) -> SamplingParams:
    temperature, top_p = fields.temperature, fields.top_p
    if top_p == 0:  # nothing but the most likely token is left
        temperature, top_p = 0.0, None
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=None if fields.top_k is None else max(0, fields.top_k),
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        max_tokens=_max_tokens(fields),
        min_tokens=fields.min_tokens,
        seed=None if fields.seed is None else fields.seed & _SEED_MASK,
        logit_bias={int(key): value for key, value in fields.logit_bias.items()},
        ignore_eos=fields.ignore_eos,
        bad_words=tuple(fields.bad_words),
    )


def _max_tokens(fields: ChatFields) -> int | None:
    return fields.max_completion_tokens or fields.max_tokens


def _ignored(fields: ChatFields) -> tuple[str, ...]:
    """Dotted names of what nobody here understands, as far as a header can carry them."""
    names = [name for name in fields.model_extra or {} if name not in UNSUPPORTED]
    for path in type(fields).model_fields:
        if path not in fields.model_fields_set:
            continue
        extra = getattr(getattr(fields, path), "model_extra", None) or {}
        names += [f"{path}.{name}" for name in extra]
    return tuple(name for name in names if _REPORTABLE.fullmatch(name))[:_MAX_REPORTED]
