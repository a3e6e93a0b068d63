"""How commands talk to people: one console, errors in one line."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer
from rich.console import Console

from mimo.errors import MimoError, StartupError

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

P = ParamSpec("P")


def say(text: str) -> None:
    """Print a line as it is: nothing in it is markup."""
    console.print(text, markup=False)


def fail_with_one_line(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose start-up and request errors are one line and exit status 1."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (StartupError, MimoError) as error:
            errors.print(f"mimo: {error}", markup=False)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapped
