"""What a client says: messages, tools, and how the next turn shall begin."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

from gateway.items import MediaPart


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made earlier. ``arguments`` is the JSON text as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``reasoning`` and ``tool_calls`` belong to the assistant, ``tool_call_id`` to
    the answer of a tool."""

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. ``parameters`` is its JSON schema as the client spelled it."""

    name: str
    description: str = ""
    parameters: str = ""


class Ending(Enum):
    """What follows the last message of the prompt."""

    NEW_TURN = "new_turn"  # an assistant turn is opened
    CONTINUE = "continue"  # the last message is an assistant's and stays open
    CLOSED = "closed"  # nothing


@dataclass(frozen=True, slots=True)
class Conversation:
    """``thinking`` None means the template's own default; ``keep_all_reasoning`` False keeps the
    reasoning of earlier turns only after the last user message."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    keep_all_reasoning: bool = True
    ending: Ending = Ending.NEW_TURN

    def media_parts(self) -> Iterator[tuple[str, MediaPart]]:
        """All media parts with their field path, in message order: the order of media indices."""
        for i, message in enumerate(self.messages):
            for j, part in enumerate(message.parts):
                if not isinstance(part, TextPart):
                    yield f"messages[{i}].content[{j}]", part
