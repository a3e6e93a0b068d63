"""How llguidance reads a JSON schema, wherever in a grammar it stands."""

import json

_DEFAULTS = {"coerce_one_of": True}  # unless the schema says otherwise
# Whatever it says: without a bound on blanks a model may go on emitting them for ever.
_OVERRIDES = {"whitespace_pattern": r"[ \n]{0,16}"}


def with_options(schema: str) -> str:
    """A schema with our options in its ``x-guidance``. What is no schema is returned as it is: who
    compiles it says what is wrong."""
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        return schema
    given = parsed.get("x-guidance", {}) if isinstance(parsed, dict) else None
    if not isinstance(given, dict):
        return schema
    return json.dumps({**parsed, "x-guidance": {**_DEFAULTS, **given, **_OVERRIDES}})
