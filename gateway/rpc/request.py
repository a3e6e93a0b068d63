"""From the public protobuf messages to the pipeline's types. Pure."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from gateway import bounds
from gateway.conversation import Conversation, Ending, Message, Part, Role, TextPart
from gateway.generation import (
    CachePolicy,
    EmbeddingCache,
    GenerationRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
    Speculation,
)
from gateway.grammar import grammar, json_grammar
from gateway.items import MediaOptions, MediaPart, MediaUrl, Modality
from gateway.media.options import check_options
from gateway.salt import tenant_salt
from gateway.uploads import SCHEME
from mimo.errors import InvalidRequest, Reason
from mimo.v1 import gateway_pb2

_ROLES = {
    gateway_pb2.ROLE_SYSTEM: Role.SYSTEM,
    gateway_pb2.ROLE_USER: Role.USER,
    gateway_pb2.ROLE_ASSISTANT: Role.ASSISTANT,
}
_MODALITIES = {"image": Modality.IMAGE, "video": Modality.VIDEO, "audio": Modality.AUDIO}
_EMBEDDING_CACHES = {
    gateway_pb2.EMBEDDING_CACHE_MODE_UNSPECIFIED: EmbeddingCache.USE,
    gateway_pb2.EMBEDDING_CACHE_MODE_USE: EmbeddingCache.USE,
    gateway_pb2.EMBEDDING_CACHE_MODE_BYPASS: EmbeddingCache.BYPASS,
}
_EXIF = {gateway_pb2.EXIF_MODE_APPLY: True, gateway_pb2.EXIF_MODE_IGNORE: False}

_RANGES = {
    "temperature": bounds.TEMPERATURE,
    "top_p": bounds.PROBABILITY,
    "min_p": bounds.PROBABILITY,
    "presence_penalty": bounds.PENALTY,
    "frequency_penalty": bounds.PENALTY,
}
_COUNTS = {
    "stop": bounds.MAX_STOP_STRINGS,
    "stop_token_ids": bounds.MAX_STOP_IDS,
}


def generation_request(
    request: gateway_pb2.GenerateRequest, request_id: str, timeout_s: float
) -> GenerationRequest:
    """Raises InvalidRequest whose ``field`` is the path in the protobuf request."""
    _check_bounds(request)
    return GenerationRequest(
        request_id=request_id,
        conversation=conversation(
            request.messages,
            request.media,
            optional(request.reasoning, "enabled"),
            Ending.CONTINUE if request.continue_final_message else Ending.NEW_TURN,
        ),
        sampling=_sampling(request.sampling),
        speculation=Speculation(
            optional(request.speculation, "enabled"),
            optional(request.speculation, "max_draft_tokens"),
        ),
        cache=CachePolicy(
            optional(request.cache, "prefix") is not False,
            _known(_EMBEDDING_CACHES, request.cache.embeddings, "cache.embeddings"),
        ),
        grammar=_grammar(request.output_format),
        n=request.n or 1,
        stop=tuple(filter(None, request.stop)),
        stop_token_ids=tuple(request.stop_token_ids),
        top_logprobs=optional(request, "top_logprobs"),
        return_token_ids=request.return_token_ids,
        priority=max(-bounds.MAX_PRIORITY, min(bounds.MAX_PRIORITY, request.priority)),
        tenant_salt=tenant_salt(request.cache_salt),
        timeout_s=timeout_s,
    )


def conversation(
    messages: Sequence[gateway_pb2.Message],
    media: gateway_pb2.MediaOptions,
    thinking: bool | None,
    ending: Ending = Ending.NEW_TURN,
) -> Conversation:
    """Raises InvalidRequest for a conversation that is empty or too long, an unknown role or an
    empty part."""
    if not messages:
        raise InvalidRequest("messages are empty", reason=Reason.MISSING_FIELD, field="messages")
    _check_most(len(messages), bounds.MAX_MESSAGES, "messages")
    bounds.check_parts(sum(len(message.parts) for message in messages))
    base = _media_options(media, MediaOptions(), "media")
    parsed = tuple(_message(each, f"messages[{i}]", base) for i, each in enumerate(messages))
    if ending is Ending.CONTINUE and parsed[-1].role is not Role.ASSISTANT:
        raise InvalidRequest(
            "continue_final_message needs an assistant message at the end",
            field="continue_final_message",
        )
    return Conversation(parsed, thinking=thinking, ending=ending)


def optional(message: ProtoMessage, name: str) -> Any:
    """The value of an optional field, or None when it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def _check_bounds(request: gateway_pb2.GenerateRequest) -> None:
    for name, most in _COUNTS.items():
        _check_most(len(getattr(request, name)), most, name)
    for index, text in enumerate(request.stop):
        _check_most(len(text), bounds.MAX_STOP_CHARACTERS, f"stop[{index}]")
    _check_most(request.n, bounds.MAX_CHOICES, "n")
    _check_most(request.top_logprobs, bounds.MAX_TOP_LOGPROBS, "top_logprobs")
    _check_most(len(request.cache_salt), bounds.MAX_SALT_CHARACTERS, "cache_salt")
    drafts = request.speculation.max_draft_tokens
    _check_most(drafts, bounds.MAX_DRAFT_TOKENS, "speculation.max_draft_tokens")


def _grammar(output: gateway_pb2.OutputFormat) -> Grammar | None:
    form = output.WhichOneof("form")
    field = f"output_format.{form}"
    match form:
        case "json_object":
            return json_grammar({"type": "object"}, field) if output.json_object else None
        case "json_schema":
            return grammar(GrammarKind.JSON_SCHEMA, output.json_schema, field)
        case "regex":
            return grammar(GrammarKind.REGEX, output.regex, field)
        case "lark":
            return grammar(GrammarKind.LARK, output.lark, field)
    return None


def _check_most(value: int, most: int, field: str) -> None:
    if value > most:
        raise InvalidRequest(f"{field}: {value} is above {most}", field=field, limit=most)


def _sampling(params: gateway_pb2.SamplingParams) -> SamplingParams:
    for name, (low, high) in _RANGES.items():
        value = optional(params, name)
        if value is not None and not low <= value <= high:
            raise _out_of_range(f"sampling.{name}", f"in {low:g}..{high:g}")
    penalty = optional(params, "repetition_penalty")
    if penalty is not None and not 0 < penalty <= bounds.MAX_REPETITION_PENALTY:
        most = bounds.MAX_REPETITION_PENALTY
        raise _out_of_range("sampling.repetition_penalty", f"above 0 and at most {most:g}")
    max_tokens = optional(params, "max_tokens")
    if max_tokens == 0:
        raise _out_of_range("sampling.max_tokens", "at least 1")
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise _out_of_range("sampling.min_tokens", f"at most {max_tokens}, the most")
    _check_most(len(params.logit_bias), bounds.MAX_BIASES, "sampling.logit_bias")
    if not all(-bounds.MAX_BIAS <= bias <= bounds.MAX_BIAS for bias in params.logit_bias.values()):
        raise _out_of_range("sampling.logit_bias", f"in {-bounds.MAX_BIAS}..{bounds.MAX_BIAS}")
    _check_most(len(params.bad_words), bounds.MAX_BAD_WORDS, "sampling.bad_words")
    for index, word in enumerate(params.bad_words):
        _check_most(len(word), bounds.MAX_STOP_CHARACTERS, f"sampling.bad_words[{index}]")
    temperature, top_p = optional(params, "temperature"), optional(params, "top_p")
    if top_p == 0:  # nothing but the most likely token is left
        temperature, top_p = 0.0, None
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=optional(params, "top_k"),
        min_p=optional(params, "min_p"),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=penalty,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        seed=optional(params, "seed"),
        logit_bias=dict(params.logit_bias),
        ignore_eos=params.ignore_eos,
        bad_words=tuple(params.bad_words),
    )


def _message(message: gateway_pb2.Message, path: str, base: MediaOptions) -> Message:
    role = _known(_ROLES, message.role, f"{path}.role")
    parts = tuple(
        _part(part, f"{path}.parts[{index}]", base) for index, part in enumerate(message.parts)
    )
    return Message(role, parts, message.reasoning or None)


def _part(part: gateway_pb2.ContentPart, path: str, base: MediaOptions) -> Part:
    kind = part.WhichOneof("part")
    if kind is None:
        raise InvalidRequest("the part is empty", reason=Reason.MISSING_FIELD, field=path)
    if kind == "text":
        return TextPart(part.text)
    media: gateway_pb2.MediaInput = getattr(part, kind)
    where = f"{path}.{kind}"
    options = _media_options(media.options, base, f"{where}.options")
    match media.WhichOneof("source"):
        case "inline":
            return MediaPart(_MODALITIES[kind], media.inline, options)
        case "url":
            return MediaPart(_MODALITIES[kind], MediaUrl(media.url), options)
        case "media_ref":
            return MediaPart(_MODALITIES[kind], MediaUrl(SCHEME + media.media_ref), options)
    raise InvalidRequest("the part has no source", reason=Reason.MISSING_FIELD, field=where)


def _media_options(
    options: gateway_pb2.MediaOptions, base: MediaOptions, path: str
) -> MediaOptions:
    given: dict[str, Any] = {
        field.name: value for field, value in options.ListFields() if field.name != "exif"
    }
    if options.exif != gateway_pb2.EXIF_MODE_UNSPECIFIED:
        given["exif"] = _known(_EXIF, options.exif, f"{path}.exif")
    values = {name: getattr(base, name) for name in MediaOptions.__dataclass_fields__}
    for name, rival in (("fps", "num_frames"), ("num_frames", "fps")):
        if name in given:
            values[rival] = None  # the base's; they exclude each other
    merged = MediaOptions(**values | given)
    try:
        check_options(merged)
    except InvalidRequest as error:
        error.field = path
        raise
    return merged


def _known(meanings: dict[Any, Any], value: int, field: str) -> Any:
    """What an enum value means. Raises InvalidRequest for none and for numbers of the future."""
    if value not in meanings:
        raise InvalidRequest(f"{field}: missing or unknown", field=field)
    return meanings[value]


def _out_of_range(field: str, range: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: must be {range}", field=field)
