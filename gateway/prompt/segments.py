"""What a rendered conversation is made of, before media become placeholder spans."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Control:
    """One control token, by id."""

    id: int


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is encoded without control tokens, whoever wrote it."""

    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """The place of one medium: the index of its part among all media parts of the request."""

    index: int


Segment = Control | Text | Media


def join_text(segments: list[Segment]) -> list[Segment]:
    """Merge neighbouring texts, drop empty ones.

    A run must be encoded at once: "user\\n" and "\\n\\nhello" encoded apart give other ids than
    their concatenation, and the model was trained on the latter.
    """
    joined: list[Segment] = []
    for is_text, run in itertools.groupby(segments, lambda segment: isinstance(segment, Text)):
        if not is_text:
            joined += run
        elif text := "".join(segment.text for segment in run if isinstance(segment, Text)):
            joined.append(Text(text))
    return joined
