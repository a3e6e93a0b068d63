"""Which part of the output is reasoning: decided by the ids of the think tags, never by text."""

from dataclasses import dataclass
from enum import Enum

from gateway.prompt.tokenizer import Tokenizer


class Phase(Enum):
    """Where the output stands. The renderer decides the first one."""

    START = "start"  # thinking is on and the model may open a think block itself
    REASONING = "reasoning"
    CONTENT = "content"


class Channel(Enum):
    """Where a token's text goes."""

    REASONING = "reasoning"
    CONTENT = "content"
    HELD = "held"  # a leading blank: content, unless a think block opens next
    DROPPED = "dropped"  # a tag; takes the blanks held before it with it


@dataclass(frozen=True, slots=True)
class ThinkTags:
    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ThinkTags":
        """Raises CheckpointError when the tokenizer lacks a tag."""
        return cls(tokenizer.control_id("<think>"), tokenizer.control_id("</think>"))


class ReasoningSplitter:
    """Routes ids to channels, one at a time.

    A think block opens the answer or does not open at all; a stray tag later on vanishes.
    """

    def __init__(self, tokenizer: Tokenizer, tags: ThinkTags, phase: Phase) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        self._phase = phase
        self._content_begun = False

    def route(self, id: int) -> Channel:
        if id == self._tags.end:
            self._phase = Phase.CONTENT
            return Channel.DROPPED
        if id == self._tags.begin:
            if not self._content_begun:
                self._phase = Phase.REASONING
            return Channel.DROPPED
        if self._phase is Phase.REASONING:
            return Channel.REASONING
        if self._phase is Phase.START and not self._tokenizer.token_bytes(id).strip():
            return Channel.HELD
        self._phase = Phase.CONTENT
        self._content_begun = True
        return Channel.CONTENT
