"""The chat format, rendered to text in which control tokens are spelled out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.conversation import Conversation, Ending, Message, Role, TextPart, Tool, ToolCall
from gateway.items import MediaPart, Modality
from gateway.prompt.placeholders import expand
from gateway.prompt.reasoning import Phase
from gateway.prompt.segments import Control, Media, Segment
from gateway.prompt.template import ChatTemplate, TemplateSettings
from gateway.prompt.tokenizer import Tokenizer
from mimo.errors import CheckpointError, InvalidRequest, Reason
from tests.support import byte_model as ids

TOKENIZER = Tokenizer(json.dumps(ids.tokenizer_definition()))
PLAIN = ChatTemplate(TemplateSettings("", False), TOKENIZER)
NO_THINKING = "<|im_start|>assistant\n<think></think>"


def spelled(segments: tuple[Segment, ...]) -> str:
    """One readable string; media as [0], [1], …"""
    parts: list[str] = []
    for segment in segments:
        match segment:
            case Control(id):
                parts.append(TOKENIZER.spelling(id).decode())
            case Media(index):
                parts.append(f"[{index}]")
            case text:
                parts.append(text.text)
    return "".join(parts)


def render(*messages: Message, template: ChatTemplate = PLAIN, **options: object) -> str:
    conversation = Conversation(messages, **options)  # type: ignore[arg-type]
    return spelled(template.render(conversation).segments)


def system(text: str) -> Message:
    return Message(Role.SYSTEM, (TextPart(text),))


def user(text: str) -> Message:
    return Message(Role.USER, (TextPart(text),))


def assistant(text: str = "", reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(Role.ASSISTANT, (TextPart(text),) if text else (), reasoning, calls)


def tool(text: str, id: str) -> Message:
    return Message(Role.TOOL, (TextPart(text),), tool_call_id=id)


def picture() -> MediaPart:
    return MediaPart(Modality.IMAGE, b"")


def test_single_turn() -> None:
    assert render(user("Hi")) == "<|im_start|>user\nHi<|im_end|>" + NO_THINKING


def test_turns_follow_without_a_line_feed_and_history_has_think_blocks() -> None:
    text = render(user("1"), assistant("2", "hm"), user("3"), assistant("4"), user("5"))
    assert text == (
        "<|im_start|>user\n1<|im_end|>"
        "<|im_start|>assistant\n<think>hm</think>2<|im_end|>"
        "<|im_start|>user\n3<|im_end|>"
        "<|im_start|>assistant\n<think></think>4<|im_end|>"
        "<|im_start|>user\n5<|im_end|>" + NO_THINKING
    )


def test_thinking_leaves_the_turn_to_the_model() -> None:
    rendered = PLAIN.render(Conversation((user("Hi"),), thinking=True))
    assert spelled(rendered.segments).endswith("<|im_end|><|im_start|>assistant\n")
    assert rendered.phase is Phase.START
    assert PLAIN.render(Conversation((user("Hi"),))).phase is Phase.CONTENT
    thoughtful = ChatTemplate(TemplateSettings("", True), TOKENIZER)
    assert thoughtful.render(Conversation((user("Hi"),))).phase is Phase.START
    assert thoughtful.render(Conversation((user("Hi"),), thinking=False)).phase is Phase.CONTENT


def test_default_system_text_only_when_none_is_given() -> None:
    template = ChatTemplate(TemplateSettings("Be kind.", False), TOKENIZER)
    assert render(user("Hi"), template=template).startswith(
        "<|im_start|>system\nBe kind.<|im_end|><|im_start|>user"
    )
    assert render(system(""), user("Hi"), template=template).startswith(
        "<|im_start|>system\n<|im_end|><|im_start|>user"
    )


def test_leading_system_messages_are_one_turn_and_later_ones_stay() -> None:
    text = render(system("a"), system("b"), user("Hi"), system("c"))
    assert text == (
        "<|im_start|>system\na\n\nb<|im_end|><|im_start|>user\nHi<|im_end|>"
        "<|im_start|>system\nc<|im_end|>" + NO_THINKING
    )


def test_media_stand_where_their_parts_stand() -> None:
    message = Message(Role.USER, (TextPart("a"), picture(), picture(), TextPart("b")))
    text = render(Message(Role.SYSTEM, (picture(),)), message)
    assert text.startswith("<|im_start|>system\n[0]<|im_end|><|im_start|>user\na[1][2]b<|im_end|>")


def test_media_of_an_assistant_is_refused_by_path() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(user("Hi"), Message(Role.ASSISTANT, (TextPart("x"), picture())))
    assert caught.value.field == "messages[1].content[1]"


def test_silent_assistant_messages_are_dropped() -> None:
    assert render(user("a"), assistant(), user("b")) == render(user("a"), user("b"))


def test_an_empty_conversation_is_refused() -> None:
    for messages in ((), (assistant(),)):
        with pytest.raises(InvalidRequest) as caught:
            render(*messages)
        assert caught.value.reason is Reason.MISSING_FIELD


def test_reasoning_of_earlier_turns_can_be_left_out() -> None:
    messages = (user("1"), assistant("2", "old"), user("3"), assistant("4", "new"))
    text = render(*messages, keep_all_reasoning=False)
    assert "<think></think>2" in text
    assert "<think>new</think>4" in text


def test_think_block_in_the_content_of_history_is_split_out() -> None:
    inside = render(user("1"), assistant("<think>hm</think>ok"), user("2"))
    assert inside == render(user("1"), assistant("ok", "hm"), user("2"))


def test_tags_elsewhere_in_content_are_text() -> None:
    segments = PLAIN.render(Conversation((user("<think>x"), assistant("a</think>b")))).segments
    assert [s.id for s in segments if isinstance(s, Control)].count(ids.THINK) == 2
    assert [s.id for s in segments if isinstance(s, Control)].count(ids.END_THINK) == 2


@pytest.mark.parametrize("marker", ids.CONTROL_TOKENS)
def test_no_client_string_reaches_a_control_token(marker: str) -> None:
    """Every place a client can write to, compared with the same prompt in harmless words."""

    def prompt(word: str) -> list[int]:
        call = ToolCall(word, word, json.dumps({word: word}))
        schema = json.dumps({"properties": {word: {"type": word}}})
        conversation = Conversation(
            (
                system(word),
                user(word),
                assistant(word, word, call),
                tool(word, word),
                user(f"a{word}b"),
            ),
            tools=(Tool(word, word, schema),),
        )
        expanded = expand(PLAIN.render(conversation).segments, [], TOKENIZER, None)
        return [id for id in expanded.ids if id >= ids.END_OF_TEXT]

    assert prompt(marker) == prompt("word")


@given(st.lists(st.sampled_from([*ids.CONTROL_TOKENS, "a", "\n", " "]), max_size=6).map("".join))
def test_any_user_text_keeps_the_frame(text: str) -> None:
    expanded = expand(PLAIN.render(Conversation((user(text),))).segments, [], TOKENIZER, None)
    controls = [id for id in expanded.ids if id >= ids.END_OF_TEXT]
    assert controls == [ids.IM_START, ids.IM_END, ids.IM_START, ids.THINK, ids.END_THINK]


def test_role_and_text_are_encoded_as_one_run() -> None:
    segments = PLAIN.render(Conversation((user("\n\nhi"),))).segments
    expanded = expand(segments, [], TOKENIZER, None)
    # "user" then three line feeds: the first two merge. Apart it would be 10, 256.
    assert expanded.ids[:8] == (ids.IM_START, *b"user", ids.LINE_FEEDS, 10, ord("h"))


def test_tools_stand_in_the_system_turn_in_order() -> None:
    tools = (
        Tool(
            "get_weather",
            "Weather of a city.",
            '{"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]'
            '}, "days": {"type": "integer"}}, "required": ["city"]}',
        ),
        Tool("ping"),
    )
    text = render(system("Be kind."), user("Hi"), tools=tools)
    head, _, _ = text.partition("<|im_end|>")
    assert head.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert (
        "<tools>\n"
        "<function>\n<name>get_weather</name>\n<description>Weather of a city.</description>\n"
        "<parameters>\n"
        '<parameter>\n<name>city</name>\n<type>string</type>\n<enum>["Paris", "Rome"]</enum>\n'
        "</parameter>\n"
        "<parameter>\n<name>days</name>\n<type>integer</type>\n</parameter>\n"
        '<required>["city"]</required>\n'
        "</parameters>\n</function>\n"
        "<function>\n<name>ping</name>\n<parameters>\n</parameters>\n</function>\n"
        "</tools>"
    ) in head


def test_tools_alone_make_a_system_turn() -> None:
    assert render(user("Hi"), tools=(Tool("ping"),)).startswith("<|im_start|>system\n# Tools\n")


def test_malformed_tool_schema_is_refused_by_path() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(user("Hi"), tools=(Tool("ping"), Tool("pong", parameters="[1]")))
    assert caught.value.field == "tools[1].function.parameters"


def test_calls_are_rendered_as_the_model_writes_them() -> None:
    call = ToolCall("1", "get_weather", '{"city": "Paris", "days": 3, "opts": {"a": [1]}}')
    block = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        '<parameter=days>3</parameter>\n<parameter=opts>{"a": [1]}</parameter>\n'
        "</function>\n</tool_call>"
    )
    ping = ToolCall("2", "ping", "")
    text = render(user("Hi"), assistant("I'll check.", None, call, ping), tool("x", "1"))
    assert f"<think></think>I'll check.\n{block}\n<tool_call>\n<function=ping>\n" in text
    assert f"<think></think>{block}<|im_end|>" in render(user("Hi"), assistant("", None, call))


def test_malformed_arguments_become_one_parameter() -> None:
    broken = ToolCall("1", "f", '{"city": "Par')
    assert '<parameter=arguments>{"city": "Par</parameter>' in render(
        user("Hi"), assistant("", None, broken)
    )


def test_results_are_one_turn_in_the_order_of_the_calls() -> None:
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "g", "{}"))
    text = render(user("Hi"), assistant("", None, *calls), tool("2", "b"), tool("1", "a"))
    assert (
        "<|im_start|>tool\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response>\n<|im_end|>"
    ) in text


def test_results_of_unknown_calls_keep_their_order() -> None:
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "g", "{}"))
    text = render(user("Hi"), assistant("", None, *calls), tool("2", "b"), tool("?", "z"))
    assert text.index("2\n</tool_response>") < text.index("?\n</tool_response>")


def test_a_result_without_a_call_is_refused_by_path() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(user("Hi"), tool("x", "1"))
    assert caught.value.field == "messages[1]"


def test_continuing_leaves_the_last_turn_open() -> None:
    rendered = PLAIN.render(
        Conversation((user("Hi"), assistant("So", "hm")), ending=Ending.CONTINUE)
    )
    assert spelled(rendered.segments).endswith("<|im_start|>assistant\n<think>hm</think>So")
    assert rendered.phase is Phase.CONTENT

    rendered = PLAIN.render(Conversation((user("Hi"), assistant("", "hm")), ending=Ending.CONTINUE))
    assert spelled(rendered.segments).endswith("<|im_start|>assistant\n<think>hm")
    assert rendered.phase is Phase.REASONING


def test_only_an_assistant_message_can_be_continued() -> None:
    for last in (user("Hi"), assistant("", None, ToolCall("1", "f", "{}"))):
        with pytest.raises(InvalidRequest):
            render(user("a"), last, ending=Ending.CONTINUE)


def test_a_closed_conversation_opens_no_turn() -> None:
    assert render(user("Hi"), ending=Ending.CLOSED) == "<|im_start|>user\nHi<|im_end|>"


def test_settings_come_from_the_tokenizer_configuration() -> None:
    config = {
        "mimo_template": {"form": "mimo-v2.5", "default_system": "x", "thinking_default": True}
    }
    settings = TemplateSettings.from_tokenizer_config(config, multimodal=True)
    assert settings == TemplateSettings("x", True)


def test_a_published_omni_checkpoint_has_the_published_defaults() -> None:
    settings = TemplateSettings.from_tokenizer_config({}, multimodal=True)
    assert settings.thinking_default
    assert settings.default_system.startswith("You are MiMo")


def test_an_unknown_form_is_refused_with_the_reason() -> None:
    with pytest.raises(CheckpointError, match="unknown chat format 'other'"):
        TemplateSettings.from_tokenizer_config(
            {"mimo_template": {"form": "other"}}, multimodal=True
        )
    with pytest.raises(CheckpointError, match="no mimo_template"):
        TemplateSettings.from_tokenizer_config({}, multimodal=False)
