"""The chat format of MiMo-V2.5, written by hand.

ChatML without line feeds between turns; a ``<think>`` block opens every assistant turn; tools are
XML in the system turn. The server's own words may hold control tokens, a client's words never do,
and a segment's type tells them apart: there is no template language in which the two could mix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.conversation import Conversation, Ending, Message, Role, TextPart
from gateway.prompt.reasoning import Phase
from gateway.prompt.segments import Media, Segment, Text, join_text
from gateway.prompt.tokenizer import Tokenizer
from gateway.prompt.tools import render_call, render_tools
from mimo.errors import CheckpointError, InvalidRequest, Reason

FORM = "mimo-v2.5"


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """What a checkpoint may decide about its chat format."""

    default_system: str
    thinking_default: bool

    @classmethod
    def from_tokenizer_config(
        cls, config: Mapping[str, Any], *, multimodal: bool
    ) -> "TemplateSettings":
        """Read ``mimo_template {form, default_system, thinking_default}``.

        Published checkpoints have no such object; the omni ones are known to use this form. Raises
        CheckpointError for any other form.
        """
        template = config.get("mimo_template")
        if template is None and multimodal:
            return cls("You are MiMo, a helpful AI assistant engineered by Xiaomi.", True)
        if template is None:
            raise CheckpointError(
                "tokenizer_config.json has no mimo_template and the model is not a multimodal "
                "MiMo-V2.5: its chat format is unknown"
            )
        if template.get("form") != FORM:
            raise CheckpointError(
                f"unknown chat format {template.get('form')!r} in mimo_template.form; "
                f"this version renders {FORM!r}"
            )
        return cls(
            str(template.get("default_system", "")), bool(template.get("thinking_default", True))
        )


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt before encoding, and where the model's output will begin."""

    segments: tuple[Segment, ...]
    phase: Phase


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message with its place in the request: for error paths and for the indices of its media."""

    index: int
    message: Message
    first_media: int

    @property
    def segments(self) -> list[Segment]:
        """The message's parts in order, nothing between them."""
        segments: list[Segment] = []
        media = self.first_media
        for part in self.message.parts:
            if isinstance(part, TextPart):
                segments.append(Text(part.text))
            else:
                segments.append(Media(media))
                media += 1
        return segments


class ChatTemplate:
    """Renders conversations. Raises InvalidRequest with the path of the offending message."""

    def __init__(self, settings: TemplateSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._literal = tokenizer.literal
        for token in ("<|im_start|>", "<|im_end|>", "<think>", "</think>"):
            tokenizer.control_id(token)

    def render(self, conversation: Conversation) -> Rendered:
        turns = _number(conversation.messages)
        _validate(turns, conversation.ending)
        system, rest = self._split_system(turns)
        segments: list[Segment] = self._render_system(system, conversation)
        segments += self._render_turns(rest, conversation)
        phase = Phase.START
        if conversation.ending is Ending.NEW_TURN:
            thinking = conversation.thinking
            if thinking is None:
                thinking = self._settings.thinking_default
            segments += self._literal("<|im_start|>assistant\n")
            if not thinking:
                segments += self._literal("<think></think>")
                phase = Phase.CONTENT
        elif conversation.ending is Ending.CONTINUE:
            open_turn, phase = self._render_open(turns[-1])
            segments += open_turn
        return Rendered(tuple(join_text(segments)), phase)

    def _split_system(self, turns: list[_Turn]) -> tuple[list[_Turn], list[_Turn]]:
        """The leading system messages, and all that follows."""
        count = 0
        while count < len(turns) and turns[count].message.role is Role.SYSTEM:
            count += 1
        return turns[:count], turns[count:]

    def _render_system(self, system: list[_Turn], conversation: Conversation) -> list[Segment]:
        """One turn: the leading system messages, or the default text, then the tools."""
        content: list[Segment] = []
        for turn in system:
            if turn is not system[0]:
                content.append(Text("\n\n"))
            content += turn.segments
        if not system:
            content += self._literal(self._settings.default_system)
        if conversation.tools:
            if content:
                content.append(Text("\n\n"))
            content += render_tools(conversation.tools, self._literal)
        if not system and not content:
            return []
        return self._turn("system", content)

    def _render_turns(self, turns: list[_Turn], conversation: Conversation) -> list[Segment]:
        if conversation.ending is Ending.CONTINUE:
            turns = turns[:-1]
        last_user = max((t.index for t in turns if t.message.role is Role.USER), default=-1)
        segments: list[Segment] = []
        for run in _runs(turns):
            match run[0].message.role:
                case Role.TOOL:
                    segments += self._turn("tool", self._tool_results(run, turns))
                case Role.ASSISTANT:
                    keep = conversation.keep_all_reasoning or run[0].index > last_user
                    segments += self._turn("assistant", self._assistant(run[0], keep))
                case role:
                    segments += self._turn(role.value, run[0].segments)
        return segments

    def _assistant(self, turn: _Turn, keep_reasoning: bool) -> list[Segment]:
        reasoning, content = _split_think(turn.message)
        segments = [
            *self._literal("<think>"),
            Text(reasoning if keep_reasoning else ""),
            *self._literal("</think>"),
            Text(content),
        ]
        for number, call in enumerate(turn.message.tool_calls):
            if number or content:
                segments.append(Text("\n"))
            segments += render_call(call, self._literal)
        return segments

    def _render_open(self, turn: _Turn) -> tuple[list[Segment], Phase]:
        """The last assistant message without its end, for the model to go on from."""
        reasoning, content = _split_think(turn.message)
        segments = [*self._literal("<|im_start|>assistant\n<think>"), Text(reasoning)]
        if not content:
            return segments, Phase.REASONING
        return [*segments, *self._literal("</think>"), Text(content)], Phase.CONTENT

    def _tool_results(self, run: list[_Turn], turns: list[_Turn]) -> list[Segment]:
        """Results in the order of the calls, when every one is known to answer a call."""
        calls = next(
            turn.message.tool_calls
            for turn in reversed(turns)
            if turn.index < run[0].index and turn.message.tool_calls
        )
        position = {call.id: number for number, call in enumerate(calls)}
        if all(turn.message.tool_call_id in position for turn in run):
            run = sorted(run, key=lambda turn: position[turn.message.tool_call_id or ""])
        segments: list[Segment] = []
        for turn in run:
            segments += self._literal("<tool_response>\n")
            segments += turn.segments
            segments += self._literal("\n</tool_response>\n")
        return segments

    def _turn(self, role: str, content: list[Segment]) -> list[Segment]:
        return [*self._literal(f"<|im_start|>{role}\n"), *content, *self._literal("<|im_end|>")]


def _number(messages: tuple[Message, ...]) -> list[_Turn]:
    """Messages with their places. Assistant messages that say nothing are dropped."""
    turns: list[_Turn] = []
    media = 0
    for index, message in enumerate(messages):
        silent = not (message.text or message.reasoning or message.tool_calls)
        num_media = sum(not isinstance(part, TextPart) for part in message.parts)
        if message.role is not Role.ASSISTANT or not silent or num_media:
            turns.append(_Turn(index, message, media))
        media += num_media
    return turns


def _validate(turns: list[_Turn], ending: Ending) -> None:
    if not turns:
        raise InvalidRequest(
            "messages holds nothing to answer", reason=Reason.MISSING_FIELD, field="messages"
        )
    called = False
    for turn in turns:
        message, path = turn.message, f"messages[{turn.index}]"
        if message.role is Role.ASSISTANT:
            for number, part in enumerate(message.parts):
                if not isinstance(part, TextPart):
                    raise InvalidRequest(
                        f"{path}.content[{number}]: an assistant message holds no media",
                        field=f"{path}.content[{number}]",
                    )
            called = called or bool(message.tool_calls)
        elif message.role is Role.TOOL and not called:
            raise InvalidRequest(
                f"{path}: a tool message must follow an assistant message with tool calls",
                field=path,
            )
    if ending is Ending.CONTINUE:
        last = turns[-1]
        if last.message.role is not Role.ASSISTANT or last.message.tool_calls:
            raise InvalidRequest(
                "only a final assistant message without tool calls can be continued",
                field=f"messages[{last.index}]",
            )


def _runs(turns: list[_Turn]) -> Iterator[list[_Turn]]:
    """Neighbouring tool messages together, every other message alone."""
    run: list[_Turn] = []
    for turn in turns:
        if run and (turn.message.role is not Role.TOOL or run[-1].message.role is not Role.TOOL):
            yield run
            run = []
        run.append(turn)
    if run:
        yield run


def _split_think(message: Message) -> tuple[str, str]:
    """Reasoning and content of an assistant message.

    Clients that keep the answer as one string send the think block inside the content; tags in
    text are plain text everywhere else.
    """
    text = message.text
    if message.reasoning is None and text.startswith("<think>") and "</think>" in text:
        reasoning, content = text.removeprefix("<think>").split("</think>", 1)
        return reasoning, content
    return message.reasoning or "", text
