"""The many ways in which clients ask for structured output."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.api.schema import ChatFields
from gateway.generation import Grammar, GrammarKind
from gateway.grammar import choice_grammar, grammar, json_grammar
from mimo.errors import InvalidRequest, Reason

Build = Callable[[Any, str], Grammar]


def requested_grammar(fields: ChatFields) -> Grammar | None:
    """Raises InvalidRequest for a demand that is incomplete, and for more than one."""
    found = _from_response_format(fields)
    for path, build in _SPELLINGS.items():
        value = _value(fields, path)
        if value is None or value is False or value == []:
            continue
        if found is not None:
            raise InvalidRequest(f"{path} and {found.field} exclude each other", field=path)
        found = build(value, path)
    return found


def _from_response_format(fields: ChatFields) -> Grammar | None:
    wanted = fields.response_format
    match wanted.type:
        case "json_object":
            return json_grammar({"type": "object"}, "response_format")
        case "json_schema":
            field = "response_format.json_schema"
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise InvalidRequest(
                    f"{field}.schema is missing",
                    reason=Reason.MISSING_FIELD,
                    field=f"{field}.schema",
                )
            schema, strict = wanted.json_schema.schema_, bool(wanted.json_schema.strict)
            return json_grammar(schema, f"{field}.schema", strict=strict)
    return None


def _schema(value: Any, field: str) -> Grammar:
    """A schema, or the text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"{field}: not a JSON schema", reason=Reason.GRAMMAR_INVALID, field=field
        )
    return json_grammar(value, field)


def _any_object(value: Any, field: str) -> Grammar:
    return json_grammar({"type": "object"}, field)


def _regex(value: Any, field: str) -> Grammar:
    return grammar(GrammarKind.REGEX, value, field)


def _lark(value: Any, field: str) -> Grammar:
    return grammar(GrammarKind.LARK, value, field)


_SPELLINGS: dict[str, Build] = {
    "structured_outputs.json": _schema,
    "structured_outputs.json_object": _any_object,
    "structured_outputs.regex": _regex,
    "structured_outputs.choice": choice_grammar,
    "structured_outputs.grammar": _lark,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": choice_grammar,
    "guided_grammar": _lark,
    "regex": _regex,
}


def _value(fields: ChatFields, path: str) -> Any:
    """``json`` is called ``json_`` here, because every model has a method of that name."""
    value: Any = fields
    for name in path.split("."):
        value = getattr(value, "json_" if name == "json" else name, None)
    return value
