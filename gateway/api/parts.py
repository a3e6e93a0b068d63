"""Messages and content parts of a chat request, in all the spellings clients use.

Messages and parts keep their places, even when they say nothing: an error of a later stage names
the place that the client knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.bounds import MAX_STRING_CHARACTERS, MAX_TEXT_CHARACTERS, check_parts
from gateway.conversation import Message, Part, Role, TextPart
from gateway.items import MediaOptions, MediaPart, MediaUrl, Modality
from gateway.media.options import parse_options
from gateway.media.payload import decode_base64, wav_from_pcm16
from mimo.errors import InvalidRequest, Reason

LOW_DETAIL_MAX_PIXELS = 512 * 512
PCM_SAMPLE_RATE = 24_000

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_REASONING_TYPES = frozenset({"thinking", "reasoning"})


@dataclass(frozen=True, slots=True)
class _MediaForm:
    """A spelling of a media part: ``key`` holds a URL, an object with one, or bare base64."""

    key: str
    modality: Modality | None
    base64_allowed: bool = False


_MEDIA_FORMS = {
    "image_url": _MediaForm("image_url", Modality.IMAGE),
    "input_image": _MediaForm("image_url", Modality.IMAGE),
    "image": _MediaForm("image", Modality.IMAGE, base64_allowed=True),
    "video_url": _MediaForm("video_url", Modality.VIDEO),
    "video": _MediaForm("video", Modality.VIDEO, base64_allowed=True),
    "audio_url": _MediaForm("audio_url", Modality.AUDIO),
    "input_audio": _MediaForm("input_audio", Modality.AUDIO, base64_allowed=True),
    "audio": _MediaForm("audio", Modality.AUDIO, base64_allowed=True),
    "file": _MediaForm("file", None, base64_allowed=True),
}
_EMBEDDING_TYPES = frozenset(
    {"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil"}
)
_OPTION_ALIASES = {"use_audio": "use_audio_track", "use_audio_in_video": "use_audio_track"}
_OPTION_KEYS = (
    *("min_pixels", "max_pixels", "total_max_pixels", "fps", "num_frames", "min_frames"),
    *("max_frames", "use_audio_track", "exif", *_OPTION_ALIASES),
)
_URL_PREFIXES = ("http:", "https:", "data:", "media:", "file:", "ftp:", "s3:", "blob:")


def parse_messages(
    messages: Sequence[Mapping[str, Any]], base: MediaOptions
) -> tuple[Message, ...]:
    """Messages of a request whose media options are ``base``. Raises InvalidRequest with a path."""
    contents = (message.get("content") for message in messages)
    check_parts(sum(len(content) for content in contents if isinstance(content, list)))
    parsed = tuple(
        _message(message, f"messages[{index}]", base) for index, message in enumerate(messages)
    )
    if sum(len(m.text) + len(m.reasoning or "") for m in parsed) > MAX_TEXT_CHARACTERS:
        raise _too_long("the text of all messages", MAX_TEXT_CHARACTERS, "messages")
    return parsed


def media_options(given: Mapping[str, Any], base: MediaOptions, field: str) -> MediaOptions:
    """Options as clients write them, over ``base``. Raises InvalidRequest for ``field``."""
    try:
        return parse_options(
            {_OPTION_ALIASES.get(name, name): value for name, value in given.items()}, base
        )
    except InvalidRequest as error:
        error.field = field
        raise


def _message(message: Mapping[str, Any], path: str, base: MediaOptions) -> Message:
    role = _role(message, path)
    parts, reasoning = _content(message.get("content"), role, path, base)
    if role is not Role.ASSISTANT:
        return Message(role, parts)
    if message.get("audio"):
        raise _unsupported("spoken answers are not kept", f"{path}.audio")
    if refusal := message.get("refusal"):
        parts += (TextPart(_string(refusal, f"{path}.refusal")),)
    for name in ("reasoning_content", "reasoning"):
        if isinstance(given := message.get(name), str):
            reasoning = _string(given, f"{path}.{name}")
            break
    return Message(role, parts, reasoning or None)


def _role(message: Mapping[str, Any], path: str) -> Role:
    name = message.get("role")
    if name is None:
        raise _missing("role is missing", f"{path}.role")
    name = _string(name, f"{path}.role").strip()
    if name in ("tool", "function"):
        raise _unsupported("tool calls are not available yet", f"{path}.role")
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise _unsupported("tool calls are not available yet", f"{path}.{key}")
    if name not in _ROLES:
        raise InvalidRequest(
            f"role {name[:40]!r} is not one of {', '.join(_ROLES)}", field=f"{path}.role"
        )
    return _ROLES[name]


def _content(
    content: Any, role: Role, path: str, base: MediaOptions
) -> tuple[tuple[Part, ...], str]:
    """Parts, and the reasoning that was written as parts."""
    if content is None:
        return (), ""
    if isinstance(content, str):
        return (TextPart(_string(content, f"{path}.content")),), ""
    if not isinstance(content, list):
        raise _wrong_type("content must be a string or a list of parts", f"{path}.content")
    parts: list[Part] = []
    reasoning = ""
    for index, part in enumerate(content):
        where = f"{path}.content[{index}]"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise _wrong_type("a part is a string or an object", where)
        kind = _part_type(part, where)
        if kind in _TEXT_TYPES:
            parts.append(TextPart(_string(part.get("text", ""), f"{where}.text")))
        elif kind in _MEDIA_FORMS:
            parts.append(_media(part, _MEDIA_FORMS[kind], where, base))
        elif kind == "refusal" and role is Role.ASSISTANT:
            parts.append(TextPart(_string(part.get("refusal", ""), f"{where}.refusal")))
        elif kind in _REASONING_TYPES and role is Role.ASSISTANT:
            reasoning += _string(part.get("thinking", part.get("text", "")), where)
            parts.append(TextPart(""))
        else:
            raise _unknown_type(kind, f"{where}.type")
    return tuple(parts), reasoning


def _part_type(part: Mapping[str, Any], where: str) -> str:
    if "type" in part:
        return _string(part["type"], f"{where}.type")
    known = [key for key in ("text", *_MEDIA_FORMS) if key in part]
    if len(known) != 1:
        raise _missing("type is missing", f"{where}.type")
    return known[0]


def _media(part: Mapping[str, Any], form: _MediaForm, where: str, base: MediaOptions) -> MediaPart:
    payload = part.get(form.key)
    fields: Mapping[str, Any] = payload if isinstance(payload, dict) else part
    field = f"{where}.{form.key}"
    if isinstance(payload, list):
        raise _unsupported("a list of frames is not read; send a video file", field)
    for name in ("start", "end"):
        if fields.get(name) is not None:
            raise _unsupported("media are used from beginning to end", f"{field}.{name}")
    if fields.get("file_id"):
        raise _unsupported("files are not kept; send file_data", f"{field}.file_id")
    text = _payload_text(part, payload, field)
    options = _part_options(part, fields, where, base)
    if form.key in ("input_audio", "audio") and fields.get("format") in ("pcm16", "pcm"):
        return MediaPart(form.modality, _wav(text, fields, field), options)
    is_url = text[:16].lower().startswith(_URL_PREFIXES)
    if not is_url and not form.base64_allowed and "base64" not in part:
        raise InvalidRequest(
            "not an http, https or data URL", reason=Reason.URL_INVALID, field=field
        )
    source = MediaUrl(text if is_url else f"data:;base64,{text}")
    return MediaPart(form.modality, source, options)


def _payload_text(part: Mapping[str, Any], payload: Any, field: str) -> str:
    """The URL or base64 of a part, wherever it is."""
    text = payload
    if isinstance(payload, dict):
        text = payload.get("url", payload.get("data", payload.get("file_data")))
    elif payload is None:
        text = part.get("url", part.get("base64"))
    if text is None or text == "":
        raise _missing("it holds no URL or data", field)
    if not isinstance(text, str):
        raise _wrong_type("a URL or base64 is a string", field)
    return text.strip()


def _wav(text: str, fields: Mapping[str, Any], field: str) -> bytes:
    """Raw 16-bit mono samples with a header that says so."""
    rate = fields.get("sample_rate", PCM_SAMPLE_RATE)
    if not isinstance(rate, int) or not 1000 <= rate <= 384_000:
        raise InvalidRequest("sample_rate must be in 1000..384000", field=f"{field}.sample_rate")
    try:
        return wav_from_pcm16(decode_base64(text), rate)
    except InvalidRequest as error:
        error.field = field
        raise


def _part_options(
    part: Mapping[str, Any], fields: Mapping[str, Any], where: str, base: MediaOptions
) -> MediaOptions:
    """Options of one part: those beside the payload, those inside it, and ``detail``."""
    given = {key: part[key] for key in _OPTION_KEYS if key in part}
    given |= {key: fields[key] for key in _OPTION_KEYS if key in fields}
    detail = fields.get("detail", "auto")
    if detail not in ("low", "auto", "high", "original"):
        raise InvalidRequest("detail must be low, auto, high or original", field=f"{where}.detail")
    if detail == "low":
        given.setdefault("max_pixels", LOW_DETAIL_MAX_PIXELS)
    return media_options(given, base, where)


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong_type("must be a string", field)
    if len(value) > MAX_STRING_CHARACTERS:
        raise _too_long("a string", MAX_STRING_CHARACTERS, field)
    return value


def _missing(message: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", reason=Reason.MISSING_FIELD, field=field)


def _wrong_type(message: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", reason=Reason.INVALID_TYPE, field=field)


def _unsupported(message: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", reason=Reason.UNSUPPORTED_PARAMETER, field=field)


def _too_long(what: str, limit: int, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} may hold {limit} characters",
        reason=Reason.REQUEST_TOO_LARGE,
        field=field,
        limit=limit,
    )


def _unknown_type(kind: str, field: str) -> InvalidRequest:
    if kind in _EMBEDDING_TYPES:
        return _unsupported("embeddings are not accepted from outside", field)
    supported = ", ".join(sorted(_TEXT_TYPES | _MEDIA_FORMS.keys()))
    return InvalidRequest(f"{field}: {kind[:40]!r} is not one of {supported}", field=field)
