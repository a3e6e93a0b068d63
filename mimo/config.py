"""Configuration: frozen dataclasses filled once from flags and environment. Flag beats environment.

A field ``max_batch`` is the flag ``--max-batch`` and the variable ``MIMO_MAX_BATCH``. Unknown flags
and unknown ``MIMO_`` variables are errors, so that a typo never becomes a default. This is the only
module that reads the environment.
"""

import argparse
import dataclasses
import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from mimo.errors import ConfigError

PREFIX = "MIMO_"

# Read by other parts of the system (test harness, training), never by a service.
FOREIGN_VARIABLES = frozenset({"MIMO_TEST_REDIS_URL", "MIMO_TRAIN_DIR"})

# What Kubernetes adds to a pod's environment for every Service.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP)|$)")

ConfigT = TypeVar("ConfigT")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    choices: Sequence[str] = (),
    at_least: float | None = None,
) -> Any:
    """A configuration field with its help text and the values that ``parse`` lets pass.

    Without a default the option is required.
    """
    metadata = {"help": help, "choices": tuple(choices), "at_least": at_least}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse(
    config: type[ConfigT],
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    program: str | None = None,
) -> ConfigT:
    """Build ``config`` from ``argv`` over ``env``; both default to the process's own.

    Raises ConfigError naming the flag or variable. ``--help`` prints every option with its
    variable and default, and exits.
    """
    env = os.environ if env is None else env
    argv = sys.argv[1:] if argv is None else argv
    fields = {f.name: f for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(config)
    parser = _Parser(
        prog=program,
        description=config.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, field in fields.items():
        parser.add_argument(
            _flag(name),
            dest=name,
            default=None,
            metavar=_metavar(hints[name], field.metadata.get("choices", ())),
            nargs="?" if hints[name] is bool else None,
            const="true" if hints[name] is bool else None,
            help=_help(field),
        )
    flags = vars(parser.parse_args(list(argv)))
    texts: dict[str, tuple[str, str]] = {}
    known = {_variable(name): name for name in fields}
    for variable, text in env.items():
        if variable in known:
            texts[known[variable]] = (text, variable)
        elif variable.startswith(PREFIX) and variable not in FOREIGN_VARIABLES:
            raise ConfigError(f"unknown environment variable {variable}{_advice(variable, known)}")
    for name, text in flags.items():
        if text is not None:
            texts[name] = (text, _flag(name))
    values = {
        name: _convert(text, hints[name], source, fields[name])
        for name, (text, source) in texts.items()
    }
    for name, field in fields.items():
        if (
            name not in values
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ):
            raise ConfigError(f"{_flag(name)} (or {_variable(name)}) is required")
    try:
        return config(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _advice(variable: str, known: Collection[str]) -> str:
    if _SERVICE_LINK.search(variable):
        return "; Kubernetes sets it for a Service of that name unless enableServiceLinks is false"
    likely = difflib.get_close_matches(variable, known, 1)
    return f"; did you mean {likely[0]}?" if likely else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    if field.default is dataclasses.MISSING:
        default = "required"
    elif field.default is None or field.default == "":
        default = "default: none"
    else:
        default = f"default: {field.default}"
    return f"{text} ({default}; {_variable(field.name)})"


def _metavar(hint: Any, choices: Sequence[str]) -> str:
    if choices:
        return "|".join(choices)
    return {int: "N", float: "X", bool: "true|false"}.get(_plain(hint), "TEXT")


def _plain(hint: Any) -> Any:
    """The type inside ``X | None``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _convert(text: str, hint: Any, source: str, field: dataclasses.Field[Any]) -> Any:
    kind = _plain(hint)
    choices = field.metadata.get("choices", ())
    if choices and text not in choices:
        raise ConfigError(f"{source}: {text!r} is not one of {', '.join(choices)}")
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{source}: {text!r} is not true or false")
        return text.lower() in ("true", "1")
    if kind in (int, float):
        return _number(text, kind, source, field.metadata.get("at_least"))
    if kind is str:
        return text
    raise TypeError(f"configuration fields are str, int, float or bool; {source} is {hint}")


def _number(text: str, kind: type[int] | type[float], source: str, least: float | None) -> float:
    try:
        value = kind(text)
    except ValueError:
        name = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{source}: {text!r} is not {name}") from None
    if least is not None and not value >= least:  # so that nan is refused too
        raise ConfigError(f"{source}: {text} is not at least {least:g}")
    return value
