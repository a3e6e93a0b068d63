"""How tools and earlier calls read in the prompt.

A parameter's value is raw text between its tags; objects and arrays are JSON. The tags of a call
are ordinary text except ``<tool_call>`` and its end, which are control tokens where the tokenizer
has them: those come from literals, everything of the client's from ``Text``.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from gateway.conversation import Tool, ToolCall
from gateway.prompt.segments import Segment, Text
from mimo.errors import InvalidRequest, Reason

Literal = Callable[[str], list[Segment]]

CALL_FORMAT = """

Call a function by writing exactly this, with nothing after the last block:

<tool_call>
<function=NAME>
<parameter=KEY>VALUE</parameter>
</function>
</tool_call>

- VALUE stands as it is and may span several lines; objects and arrays are JSON.
- Give every required parameter, and only parameters that are listed.
- Several calls are several blocks. Reason before the first block, never inside or after one.
- Without need for a function, answer as usual."""


def render_tools(tools: Sequence[Tool], literal: Literal) -> list[Segment]:
    """The section of the system turn that declares the functions, in the client's order.

    Raises InvalidRequest when a tool's parameters are not a JSON object.
    """
    described = "\n".join(_function(tool, number) for number, tool in enumerate(tools))
    return [
        *literal("# Tools\n\nThese functions are available:\n\n<tools>\n"),
        Text(described),
        *literal("\n</tools>" + CALL_FORMAT),
    ]


def render_call(call: ToolCall, literal: Literal) -> list[Segment]:
    """A call as the model would have written it."""
    parameters = "".join(
        f"<parameter={key}>{_spell(value)}</parameter>\n"
        for key, value in _arguments(call.arguments).items()
    )
    return [
        *literal("<tool_call>\n"),
        Text(f"<function={call.name}>\n{parameters}</function>\n"),
        *literal("</tool_call>"),
    ]


def _function(tool: Tool, number: int) -> str:
    lines = ["<function>", f"<name>{tool.name}</name>"]
    if tool.description:
        lines.append(f"<description>{tool.description}</description>")
    try:
        schema = _object(tool.parameters)
    except ValueError:
        raise InvalidRequest(
            f"tools[{number}]: parameters must be a JSON object",
            reason=Reason.INVALID_TYPE,
            field=f"tools[{number}].function.parameters",
        ) from None
    properties = schema.pop("properties", {})
    schema.pop("type", None)  # always "object"
    lines.append("<parameters>")
    for name, declaration in properties.items() if isinstance(properties, dict) else ():
        lines += ["<parameter>", f"<name>{name}</name>"]
        facts = declaration if isinstance(declaration, dict) else {"schema": declaration}
        lines += [f"<{key}>{_spell(value)}</{key}>" for key, value in facts.items()]
        lines.append("</parameter>")
    lines += [f"<{key}>{_spell(value)}</{key}>" for key, value in schema.items()]
    lines += ["</parameters>", "</function>"]
    return "\n".join(lines)


def _arguments(text: str) -> dict[str, Any]:
    """Arguments of an earlier call. One truncated call must not poison a conversation for good, so
    what is not a JSON object becomes the single parameter ``arguments``."""
    try:
        return _object(text)
    except ValueError:
        return {"arguments": text}


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
