"""Messages and content parts in all their spellings."""

import base64
from typing import Any

import pytest

from gateway.api.parts import parse_messages
from gateway.bounds import MAX_PARTS
from gateway.conversation import Message, Role, TextPart
from gateway.items import MediaOptions, MediaPart, MediaUrl, Modality
from mimo.errors import InvalidRequest, Reason

URL = "https://example.org/x"


def parse(*messages: Any) -> tuple[Message, ...]:
    return parse_messages(messages, MediaOptions())


def user(*parts: Any) -> Message:
    (message,) = parse({"role": "user", "content": list(parts)})
    return message


def medium(part: Any) -> MediaPart:
    (parsed,) = user(part).parts
    assert isinstance(parsed, MediaPart)
    return parsed


def refusal(*messages: Any) -> tuple[Reason, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        parse(*messages)
    return caught.value.reason, caught.value.field


def part_refusal(part: Any) -> tuple[Reason, str]:
    reason, field = refusal({"role": "user", "content": ["look:", part]})
    prefix = "messages[0].content[1]"
    assert field is not None and field.startswith(prefix)
    return reason, field.removeprefix(prefix)


# ── messages ──


def test_roles_have_synonyms_and_may_have_blanks_around_them() -> None:
    names = ("system", "developer", " user ", "assistant")
    messages = parse(*({"role": name, "content": "x"} for name in names))
    assert [m.role for m in messages] == [Role.SYSTEM, Role.SYSTEM, Role.USER, Role.ASSISTANT]


@pytest.mark.parametrize(
    "message, reason, field",
    [
        ({"content": "x"}, Reason.MISSING_FIELD, "messages[1].role"),
        ({"role": "banana"}, Reason.INVALID_VALUE, "messages[1].role"),
        ({"role": "User"}, Reason.INVALID_VALUE, "messages[1].role"),
        ({"role": 5}, Reason.INVALID_TYPE, "messages[1].role"),
        ({"role": "tool", "content": "x"}, Reason.UNSUPPORTED_PARAMETER, "messages[1].role"),
        ({"role": "user", "content": 5}, Reason.INVALID_TYPE, "messages[1].content"),
        ({"role": "user", "content": [5]}, Reason.INVALID_TYPE, "messages[1].content[0]"),
        (
            {"role": "assistant", "tool_calls": [{}]},
            Reason.UNSUPPORTED_PARAMETER,
            "messages[1].tool_calls",
        ),
        (
            {"role": "assistant", "audio": {"id": "x"}},
            Reason.UNSUPPORTED_PARAMETER,
            "messages[1].audio",
        ),
    ],
)
def test_a_wrong_message_is_named(message: Any, reason: Reason, field: str) -> None:
    assert refusal({"role": "user", "content": "hi"}, message) == (reason, field)


def test_a_string_is_a_text_part_and_missing_content_is_nothing() -> None:
    (text,) = parse({"role": "user", "content": "hi"})
    assert text == user("hi") == user({"type": "text", "text": "hi"})
    assert parse({"role": "user"}) == (Message(Role.USER),)


def test_keys_nobody_knows_change_nothing() -> None:
    known = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    extra = {
        "role": "user",
        "id": 7,
        "timestamp": 1,
        "tool_calls": [],
        "name": "me",
        "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
    }
    assert parse(known) == parse(extra)


def test_reasoning_has_two_names_and_can_be_a_part() -> None:
    for fields in ({"reasoning_content": "why"}, {"reasoning": "why"}):
        (message,) = parse({"role": "assistant", "content": "so", **fields})
        assert (message.reasoning, message.text) == ("why", "so")
    parts = [{"type": "thinking", "thinking": "why"}, {"type": "output_text", "text": "so"}]
    (message,) = parse({"role": "assistant", "content": parts})
    assert (message.reasoning, message.text) == ("why", "so")


def test_a_refusal_is_text_of_the_assistant() -> None:
    (message,) = parse({"role": "assistant", "content": "no", "refusal": ", never"})
    assert message.text == "no, never"
    assert part_refusal({"type": "refusal", "refusal": "no"})[1] == ".type"


def test_parts_and_messages_keep_their_places() -> None:
    picture = {"type": "image_url", "image_url": URL}
    messages = parse(
        {"role": "assistant"},
        {"role": "user", "content": [{"type": "text"}, "", picture]},
    )
    assert messages[0] == Message(Role.ASSISTANT)
    assert messages[1].parts == (
        TextPart(""),
        TextPart(""),
        MediaPart(Modality.IMAGE, MediaUrl(URL)),
    )


def test_text_has_limits() -> None:
    half = "x" * ((4 << 20) - 1)
    assert parse({"role": "user", "content": half})
    long = {"role": "user", "content": "x" * ((4 << 20) + 1)}
    assert refusal(long) == (Reason.REQUEST_TOO_LARGE, "messages[0].content")
    three = {"role": "user", "content": [half, half, half]}
    assert refusal(three) == (Reason.REQUEST_TOO_LARGE, "messages")


def test_all_messages_together_have_a_bounded_number_of_parts() -> None:
    half = {"role": "user", "content": [""] * (MAX_PARTS // 2)}
    assert parse(half, half, {"role": "user", "content": "x"})
    one = {"role": "user", "content": [""]}
    assert refusal(half, half, one) == (Reason.TOO_MANY_MEDIA, "messages")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_text_with_the_same_limits(name: str) -> None:
    half = "x" * ((4 << 20) - 1)
    thought = {"role": "assistant", name: half}
    assert parse(thought, thought)
    assert refusal(thought, thought, thought) == (Reason.REQUEST_TOO_LARGE, "messages")
    long = {"role": "assistant", name: half + "xx"}
    assert refusal(long) == (Reason.REQUEST_TOO_LARGE, f"messages[0].{name}")


# ── media ──


@pytest.mark.parametrize(
    "part, modality",
    [
        ({"type": "image_url", "image_url": {"url": URL}}, Modality.IMAGE),
        ({"type": "image_url", "image_url": URL}, Modality.IMAGE),
        ({"image_url": {"url": URL}}, Modality.IMAGE),
        ({"type": "input_image", "image_url": URL}, Modality.IMAGE),
        ({"type": "image", "image": URL}, Modality.IMAGE),
        ({"type": "image", "url": URL}, Modality.IMAGE),
        ({"type": "video_url", "video_url": {"url": URL}}, Modality.VIDEO),
        ({"type": "video_url", "video_url": URL}, Modality.VIDEO),
        ({"type": "video", "video": URL}, Modality.VIDEO),
        ({"type": "audio_url", "audio_url": {"url": URL}}, Modality.AUDIO),
        ({"type": "audio_url", "audio_url": URL}, Modality.AUDIO),
        ({"type": "audio", "audio": URL}, Modality.AUDIO),
        ({"type": "input_audio", "input_audio": {"data": URL, "format": "wav"}}, Modality.AUDIO),
        ({"type": "file", "file": {"file_data": URL, "filename": "x.png"}}, None),
    ],
)
def test_media_by_url_in_every_spelling(part: Any, modality: Modality | None) -> None:
    assert medium(part) == MediaPart(modality, MediaUrl(URL))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "QUJD"},
        {"type": "image", "base64": "QUJD", "mime_type": "image/png"},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}},
        {"type": "audio", "audio": {"data": " QUJD\n"}},
        {"type": "file", "file": {"file_data": "QUJD"}},
    ],
)
def test_bare_base64_becomes_a_data_url(part: Any) -> None:
    assert medium(part).source == MediaUrl("data:;base64,QUJD")


@pytest.mark.parametrize("prefix", ["data:image/png;base64,QUJD", "DATA:;BASE64,QUJD", "media:m"])
def test_urls_of_other_schemes_are_passed_on_as_they_are(prefix: str) -> None:
    assert medium({"type": "image_url", "image_url": prefix}).source == MediaUrl(prefix)


@pytest.mark.parametrize("kind", ["input_audio", "audio"])
def test_raw_samples_get_a_header(kind: str) -> None:
    data = base64.b64encode(b"\1\0\2\0").decode()
    audio = {"data": data, "format": "pcm16", "sample_rate": 16000}
    source = medium({"type": kind, kind: audio}).source
    assert isinstance(source, bytes)
    assert source.startswith(b"RIFF") and source.endswith(b"\1\0\2\0")
    assert int.from_bytes(source[24:28], "little") == 16000


@pytest.mark.parametrize(
    "part, reason, field",
    [
        ({"type": "banana"}, Reason.INVALID_VALUE, ".type"),
        ({"type": 5}, Reason.INVALID_TYPE, ".type"),
        ({"x": 1}, Reason.MISSING_FIELD, ".type"),
        ({"image_url": URL, "video_url": URL}, Reason.MISSING_FIELD, ".type"),
        ({"type": "text", "text": 5}, Reason.INVALID_TYPE, ".text"),
        ({"type": "image_url"}, Reason.MISSING_FIELD, ".image_url"),
        ({"type": "image_url", "uuid": "x"}, Reason.MISSING_FIELD, ".image_url"),
        ({"type": "image_url", "image_url": ""}, Reason.MISSING_FIELD, ".image_url"),
        ({"type": "image_url", "image_url": {}}, Reason.MISSING_FIELD, ".image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, Reason.INVALID_TYPE, ".image_url"),
        ({"type": "image_url", "image_url": "QUJD"}, Reason.URL_INVALID, ".image_url"),
        ({"type": "image_url", "image_url": URL, "detail": "x"}, Reason.INVALID_VALUE, ".detail"),
        ({"type": "image_url", "image_url": URL, "fps": "x"}, Reason.INVALID_TYPE, ""),
        ({"type": "video", "video": [URL, URL]}, Reason.UNSUPPORTED_PARAMETER, ".video"),
        (
            {"type": "video_url", "video_url": {"url": URL, "start": 3}},
            Reason.UNSUPPORTED_PARAMETER,
            ".video_url.start",
        ),
        (
            {"type": "file", "file": {"file_id": "file-1"}},
            Reason.UNSUPPORTED_PARAMETER,
            ".file.file_id",
        ),
        ({"type": "image_embeds", "image_embeds": "x"}, Reason.UNSUPPORTED_PARAMETER, ".type"),
        ({"type": "thinking", "thinking": "x"}, Reason.INVALID_VALUE, ".type"),
        (
            {"type": "input_audio", "input_audio": {"data": "!", "format": "pcm16"}},
            Reason.MEDIA_ENCODING,
            ".input_audio",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            Reason.MISSING_FIELD,
            ".input_audio",
        ),
    ],
)
def test_a_wrong_part_is_named(part: Any, reason: Reason, field: str) -> None:
    assert part_refusal(part) == (reason, field)


def test_an_unknown_part_hears_which_are_known() -> None:
    with pytest.raises(InvalidRequest, match="input_audio.*video_url"):
        user({"type": "banana"})


@pytest.mark.parametrize(
    "detail, max_pixels", [("low", 262_144), ("auto", None), ("high", None), ("original", None)]
)
def test_detail_bounds_the_pixels(detail: str, max_pixels: int | None) -> None:
    inside = medium({"type": "image_url", "image_url": {"url": URL, "detail": detail}})
    beside = medium({"type": "input_image", "image_url": URL, "detail": detail})
    assert inside.options == beside.options == MediaOptions(max_pixels=max_pixels)


def test_options_stand_beside_the_payload_or_inside_it() -> None:
    options = {"fps": 2, "max_frames": 8, "use_audio": False}
    inside = medium({"type": "video_url", "video_url": {"url": URL, **options}})
    beside = medium({"type": "video_url", "video_url": URL, **options})
    assert inside == beside
    assert inside.options == MediaOptions(fps=2, max_frames=8, use_audio_track=False)
