"""Fields of a chat request: defaults, bounds, spellings, and who is told what was wrong."""

from typing import Any

import pytest

from gateway.api.body import parse_json
from gateway.api.request import ChatCall, parse_chat
from gateway.conversation import Ending
from gateway.generation import CachePolicy, EmbeddingCache, SamplingParams, Speculation
from gateway.items import MediaOptions
from mimo.errors import InvalidRequest, Reason

HI = {"role": "user", "content": "hi"}


def parse(**fields: Any) -> ChatCall:
    return parse_chat({"messages": [HI], **fields}, "req_1", 60.0)


def refusal(**fields: Any) -> tuple[Reason, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.message
    return caught.value.reason, caught.value.field


def test_a_minimal_request_leaves_everything_to_the_model() -> None:
    call = parse()
    request = call.request
    assert request.sampling == SamplingParams()
    assert request.speculation == Speculation(None, None)
    assert request.cache == CachePolicy(True, EmbeddingCache.USE)
    assert (request.n, request.stop, request.top_logprobs) == (1, (), None)
    assert (request.request_id, request.timeout_s, request.tenant_salt) == ("req_1", 60.0, b"")
    assert request.conversation.thinking is None
    assert request.conversation.ending is Ending.NEW_TURN
    assert not call.stream and not call.shown.stream_usage and call.shown.reasoning
    assert call.ignored == ()


def test_every_field_arrives() -> None:
    call = parse(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=5,
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        seed=-1,
        n=2,
        stop=["a", "", "b"],
        stop_token_ids=[3, 4.0],
        min_tokens=2,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"7": -100},
        bad_words=["no"],
        speculation={"enabled": True, "max_draft_tokens": 2},
        cache={"prefix": False, "embeddings": "bypass"},
        cache_salt="mine",
        priority=1000,
        return_token_ids=True,
        include_reasoning=False,
    )
    request = call.request
    assert call.model == "m" and call.stream and call.shown.stream_usage
    assert not call.shown.reasoning and call.shown.logprobs and call.shown.token_ids
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        max_tokens=5,
        min_tokens=2,
        seed=(1 << 64) - 1,
        logit_bias={7: -100.0},
        ignore_eos=True,
        bad_words=("no",),
    )
    assert request.n == 2 and request.stop == ("a", "b") and request.stop_token_ids == (3, 4)
    assert request.top_logprobs == 2
    assert request.speculation == Speculation(True, 2)
    assert request.cache == CachePolicy(False, EmbeddingCache.BYPASS)
    assert request.priority == 100 and len(request.tenant_salt) == 32


@pytest.mark.parametrize(
    "name, value, path",
    [
        ("temperature", 2.1, "temperature"),
        ("temperature", -0.1, "temperature"),
        ("top_p", 1.5, "top_p"),
        ("top_k", -2, "top_k"),
        ("top_k", 1 << 40, "top_k"),
        ("min_p", 1.1, "min_p"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("frequency_penalty", -2.5, "frequency_penalty"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", 1e-46, "repetition_penalty"),  # 0 on the wire
        ("repetition_penalty", 11, "repetition_penalty"),
        ("n", 0, "n"),
        ("n", 9, "n"),
        ("max_tokens", 0, "max_tokens"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("min_tokens", -1, "min_tokens"),
        ("seed", 1 << 63, "seed"),
        ("stop", ["x"] * 17, "stop"),
        ("stop", ["x", "y" * 257], "stop[1]"),
        ("stop_token_ids", [1] * 65, "stop_token_ids"),
        ("stop_token_ids", [-1], "stop_token_ids[0]"),
        ("top_logprobs", 2, "top_logprobs"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"7": 101}, "logit_bias.7"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias"),
        ("bad_words", ["x"] * 65, "bad_words"),
        ("speculation", {"max_draft_tokens": 17}, "speculation.max_draft_tokens"),
        ("cache", {"embeddings": "maybe"}, "cache.embeddings"),
        ("cache_salt", "x" * 1025, "cache_salt"),
        ("reasoning_effort", "huge", "reasoning_effort"),
        ("metadata", {str(i): "x" for i in range(17)}, "metadata"),
        ("metadata", {"k" * 65: "x"}, "metadata." + "k" * 64),
        ("metadata", {"k": "x" * 513}, "metadata.k"),
        ("user", "x" * 513, "user"),
        ("thinking", {"type": "maybe"}, "thinking.type"),
        ("media", {"fps": -1}, "media"),
        ("mm_processor_kwargs", {"surprise": 1}, "mm_processor_kwargs"),
    ],
)
def test_a_value_out_of_bounds_is_named(name: str, value: Any, path: str) -> None:
    assert refusal(**{name: value}) == (Reason.INVALID_VALUE, path)


@pytest.mark.parametrize(
    "name, value, path",
    [
        ("temperature", "0.7", "temperature"),
        ("temperature", True, "temperature"),
        ("max_tokens", 5.5, "max_tokens"),
        ("max_tokens", "5", "max_tokens"),
        ("stream", "true", "stream"),
        ("stream", 1, "stream"),
        ("logprobs", 5, "logprobs"),
        ("model", 5, "model"),
        ("messages", "hi", "messages"),
        ("messages", {"role": "user"}, "messages"),
        ("messages", [HI, "hi"], "messages[1]"),
        ("stop", 5, "stop"),
        ("stop", [5], "stop[0]"),
        ("stop_token_ids", ["5"], "stop_token_ids[0]"),
        ("logit_bias", [1], "logit_bias"),
        ("stream_options", True, "stream_options"),
        ("speculation", {"enabled": "yes"}, "speculation.enabled"),
        ("metadata", {"k": 5}, "metadata.k"),
        ("media", {"fps": "2"}, "media"),
    ],
)
def test_a_value_of_another_type_is_named(name: str, value: Any, path: str) -> None:
    assert refusal(**{name: value}) == (Reason.INVALID_TYPE, path)


@pytest.mark.parametrize("value", [10**400, -(10**400)])
@pytest.mark.parametrize("name", ["temperature", "seed", "n", "max_tokens", "top_k", "priority"])
def test_numbers_beyond_everything_are_no_bug_of_ours(name: str, value: int) -> None:
    if name == "priority":
        assert abs(parse(priority=value).request.priority) == 100
    else:
        assert refusal(**{name: value})[1] == name


def test_missing_and_empty_messages_are_missing() -> None:
    assert refusal(messages=[]) == (Reason.MISSING_FIELD, "messages")
    with pytest.raises(InvalidRequest) as caught:
        parse_chat({}, "req_1", 60.0)
    assert (caught.value.reason, caught.value.field) == (Reason.MISSING_FIELD, "messages")


def test_too_many_messages_are_refused() -> None:
    assert refusal(messages=[HI] * 2049) == (Reason.INVALID_VALUE, "messages")


def test_nulls_that_clients_send_explicitly_are_absent() -> None:
    body = parse_json(
        b'{"messages": [{"role": "user", "content": "hi"}], "stop": null, "stream_options": null,'
        b' "tools": [], "tool_choice": null, "temperature": null, "seed": null, "audio": null}'
    )
    assert parse_chat(body, "req_1", 60.0).request.sampling == SamplingParams()


def test_minus_one_is_no_limit_and_whole_floats_are_whole() -> None:
    assert parse(max_tokens=-1).request.sampling.max_tokens is None
    assert parse(max_completion_tokens=-1, max_tokens=9).request.sampling.max_tokens == 9
    assert parse(max_tokens=5.0).request.sampling.max_tokens == 5


def test_one_stop_string_needs_no_list() -> None:
    assert parse(stop="END").request.stop == ("END",)
    assert parse(stop="").request.stop == ()


def test_top_p_of_nothing_is_greedy() -> None:
    sampling = parse(top_p=0, temperature=1).request.sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, None)


def test_min_tokens_above_the_most_contradict() -> None:
    assert refusal(min_tokens=6, max_tokens=5) == (Reason.INVALID_VALUE, "min_tokens")


def test_logprobs_alone_are_those_of_the_chosen_tokens() -> None:
    assert parse(logprobs=True).request.top_logprobs == 0


@pytest.mark.parametrize(
    "name, value",
    [
        ("functions", [{"name": "f"}]),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("best_of", 2),
        ("length_penalty", 0.5),
        ("echo", True),
        ("prompt_logprobs", 1),
        ("ebnf", "root ::= a"),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_what_would_be_lost_in_silence_is_refused(name: str, value: Any) -> None:
    assert refusal(**{name: value}) == (Reason.UNSUPPORTED_PARAMETER, name)


def test_the_same_names_are_accepted_where_they_mean_nothing() -> None:
    call = parse(
        tools=[],
        tool_choice="auto",
        modalities=["text"],
        best_of=1,
        length_penalty=1.0,
        echo=False,
        response_format={"type": "text"},
    )
    assert call.ignored == ()


def test_templates_and_processors_never_come_from_outside() -> None:
    for name in ("chat_template", "custom_logit_processor", "kv_transfer_params"):
        assert refusal(**{name: None}) == (Reason.FORBIDDEN_PARAMETER, name)


def test_unknown_fields_are_ignored_and_reported() -> None:
    call = parse(
        foo=1,
        provider={},
        store=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        thinking={"type": "enabled", "budget_tokens": 5},
    )
    assert call.ignored == (
        *("foo", "provider", "store"),
        *("stream_options.include_obfuscation", "thinking.budget_tokens"),
    )


def test_only_names_that_fit_into_a_header_are_reported() -> None:
    odd = {"имя": 1, "a,b": 1, "a\r\nb": 1, "x" * 65: 1, "fine-1.2_3": 1}
    assert parse(**odd).ignored == ("fine-1.2_3",)
    assert len(parse(**{f"x{i}": 1 for i in range(100)}).ignored) == 32


@pytest.mark.parametrize(
    "fields, thinking",
    [
        ({"chat_template_kwargs": {"enable_thinking": False, "thinking": True}}, False),
        ({"chat_template_kwargs": {"thinking": False}, "enable_thinking": True}, False),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, False),
        ({"thinking": {"type": "disabled"}, "reasoning": {"enabled": True}}, False),
        ({"reasoning": {"enabled": False, "effort": "high"}}, False),
        ({"reasoning": {"effort": "none"}, "reasoning_effort": "high"}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, True),
    ],
)
def test_the_most_specific_spelling_of_thinking_wins(
    fields: dict[str, Any], thinking: bool
) -> None:
    assert parse(**fields).request.conversation.thinking is thinking


def test_reasoning_can_be_excluded_from_the_answer() -> None:
    assert not parse(reasoning={"exclude": True}).shown.reasoning


ANSWER = [HI, {"role": "assistant", "content": "He"}]


@pytest.mark.parametrize(
    "fields, ending",
    [
        ({"messages": ANSWER}, Ending.NEW_TURN),
        ({"messages": ANSWER, "continue_final_message": True}, Ending.CONTINUE),
        ({"messages": [HI, {**ANSWER[1], "prefix": True}]}, Ending.CONTINUE),
        ({"messages": ANSWER, "add_generation_prompt": False}, Ending.CLOSED),
    ],
)
def test_how_the_prompt_ends(fields: dict[str, Any], ending: Ending) -> None:
    assert parse(**fields).request.conversation.ending is ending


def test_a_continued_message_must_be_an_answer_and_excludes_a_new_turn() -> None:
    expected = (Reason.INVALID_VALUE, "continue_final_message")
    assert refusal(continue_final_message=True) == expected
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal(messages=ANSWER, **both) == expected


def test_media_options_of_the_request_apply_to_every_part_under_both_names() -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://a.b/c.png", "max_pixels": 5000}}
    call = parse(
        messages=[{"role": "user", "content": [picture]}],
        mm_processor_kwargs={"fps": 1, "max_pixels": 4000, "use_audio_in_video": True},
        media={"num_frames": 4},
        use_audio_in_video=False,
    )
    ((_, part),) = call.request.conversation.media_parts()
    assert part.options == MediaOptions(max_pixels=5000, num_frames=4, use_audio_track=False)
