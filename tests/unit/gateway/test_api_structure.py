"""Structured output: every spelling of a demand, and what it becomes behind reasoning."""

import json
from typing import Any

import pytest

from gateway.api.request import parse_chat
from gateway.generation import Grammar, GrammarKind
from gateway.grammar import behind_reasoning
from gateway.prompt.reasoning import Phase
from mimo.errors import InvalidRequest, Reason

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse(**fields: Any) -> Grammar | None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(body, "request", 60.0).request.grammar


def refusal(**fields: Any) -> tuple[Reason, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value.reason, caught.value.field


@pytest.mark.parametrize(
    ("fields", "field", "lenient"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "response_format.json_schema.schema",
            False,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema.schema",
            True,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", False),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", False),
        ({"guided_json": SCHEMA}, "guided_json", False),
    ],
)
def test_a_schema_by_any_name(fields: dict[str, Any], field: str, lenient: bool) -> None:
    grammar = parse(**fields)
    assert grammar is not None
    assert (grammar.kind, grammar.field) == (GrammarKind.JSON_SCHEMA, field)
    assert json.loads(grammar.source) == SCHEMA | {"x-guidance": {"lenient": lenient}}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"grammar": "start: x"}}, GrammarKind.LARK, "start: x"),
        ({"guided_grammar": "start: x"}, GrammarKind.LARK, "start: x"),
        ({"guided_choice": ["a", 'é"\n']}, GrammarKind.LARK, r'start: "a" | "é\"\n"'),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.LARK, 'start: "a"'),
    ],
)
def test_other_grammars_by_any_name(fields: dict[str, Any], kind: GrammarKind, source: str) -> None:
    grammar = parse(**fields)
    assert grammar is not None
    assert (grammar.kind, grammar.source) == (kind, source)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}],
)
def test_no_demand_is_no_grammar(fields: dict[str, Any]) -> None:
    assert parse(**fields) is None


def test_any_object() -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        grammar = parse(**fields)
        assert grammar is not None and json.loads(grammar.source)["type"] == "object"


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            Reason.MISSING_FIELD,
            "response_format.json_schema.schema",
        ),
        (
            {"guided_regex": "a", "regex": "b"},
            Reason.INVALID_VALUE,
            "regex",
        ),
        ({"guided_json": "no schema"}, Reason.GRAMMAR_INVALID, "guided_json"),
        ({"guided_json": "[" * 99_999}, Reason.GRAMMAR_INVALID, "guided_json"),
        ({"regex": "a" * (1 << 19)}, Reason.GRAMMAR_TOO_COMPLEX, "regex"),
        ({"response_format": {"type": "xml"}}, Reason.INVALID_VALUE, "response_format.type"),
    ],
)
def test_a_demand_that_makes_no_sense_is_refused(
    fields: dict[str, Any], reason: Reason, field: str
) -> None:
    assert refusal(**fields) == (reason, field)


def test_reasoning_comes_before_the_answer() -> None:
    regex = Grammar(GrammarKind.REGEX, "a/b\\/c\nd\\\\/e", "regex")
    assert behind_reasoning(regex, Phase.CONTENT) == regex
    assert behind_reasoning(None, Phase.START) is None
    wrapped = behind_reasoning(regex, Phase.START)
    assert wrapped is not None
    assert wrapped.kind is GrammarKind.LARK
    assert wrapped.source == (
        "start: (<think> /(.|\\n)*/ </think>)? answer\nanswer: /a\\/b\\/c\\nd\\\\\\/e/\n"
    )
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}', "guided_json")
    wrapped = behind_reasoning(schema, Phase.REASONING)
    assert wrapped is not None
    beginning, _, source = wrapped.source.partition("%json ")
    assert beginning == "start: /(.|\\n)*/ </think> answer\nanswer: "
    assert json.loads(source) == {
        "type": "null",
        "x-guidance": {"coerce_one_of": True, "whitespace_pattern": r"[ \n]{0,16}"},
    }
