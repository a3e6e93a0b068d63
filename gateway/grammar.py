"""What clients may demand of an answer's form, as grammars for the decoder. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.generation import Grammar, GrammarKind
from gateway.prompt.reasoning import Phase
from mimo.errors import InvalidRequest, Reason
from mimo.guidance import with_options

MAX_CHARACTERS = 256 << 10

# A think block may come first; only ids of the tags open and end it, never text that looks so.
_REASONING = {
    Phase.START: "start: (<think> /(.|\\n)*/ </think>)? answer\n",
    Phase.REASONING: "start: /(.|\\n)*/ </think> answer\n",
}


def json_grammar(schema: Mapping[str, Any], field: str, *, strict: bool = True) -> Grammar:
    """A document that fits a JSON schema. Not strict: keywords that cannot be enforced are ignored
    instead of refused."""
    source = {**schema, "x-guidance": {"lenient": not strict}}
    return grammar(GrammarKind.JSON_SCHEMA, json.dumps(source), field)


def choice_grammar(choices: Sequence[str], field: str) -> Grammar:
    """One of these texts."""
    texts = (json.dumps(text, ensure_ascii=False) for text in choices)
    return grammar(GrammarKind.LARK, f"start: {' | '.join(texts)}", field)


def grammar(kind: GrammarKind, source: str, field: str) -> Grammar:
    """``field`` is where the request asks for it. Raises InvalidRequest when it is too large."""
    if len(source) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{field}: longer than {MAX_CHARACTERS >> 10} KiB",
            reason=Reason.GRAMMAR_TOO_COMPLEX,
            field=field,
        )
    return Grammar(kind, source, field)


def behind_reasoning(wanted: Grammar | None, phase: Phase) -> Grammar | None:
    """The grammar of the whole output, whose answer is what was asked for."""
    if wanted is None or phase not in _REASONING:
        return wanted
    match wanted.kind:
        case GrammarKind.JSON_SCHEMA:
            answer = f"%json {with_options(wanted.source)}"
        case GrammarKind.REGEX:
            answer = f"/{_delimited(wanted.source)}/"
        case GrammarKind.LARK:
            answer = f"%lark {{\n{wanted.source}\n}}"
    return Grammar(GrammarKind.LARK, f"{_REASONING[phase]}answer: {answer}\n", wanted.field)


def _delimited(pattern: str) -> str:
    """A pattern as it is written between slashes, on one line."""
    escaped = {"/": r"\/", "\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda found: escaped.get(found[0], found[0]), pattern, flags=re.S)
