"""Structured logs: one JSON object a line on stderr, carrying the request id of the running call.

``bind_request_id`` is set by the RPC interceptors and the gateway; everything logged inside that
task then carries it. Logs hold counts, digests and timings, never media, prompts or keys.
"""

import contextvars
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def request_id() -> str:
    """The id of the request this task works for, or an empty string."""
    return _request_id.get()


@contextmanager
def bind_request_id(value: str) -> Iterator[None]:
    """Everything logged inside the block carries this request id."""
    token = _request_id.set(value)
    try:
        yield
    finally:
        # A generator may be closed by another task than began it, with nothing to restore.
        with suppress(ValueError):
            _request_id.reset(token)


def configure(component: str, *, level: str = "info", form: str = "json") -> None:
    """Send this process's logs to stderr. ``form`` is ``json`` or ``text`` (for people)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component) if form == "json" else TextFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """``{"ts", "level", "component", "logger", "message", "request_id", …extras}``."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id():
            entry["request_id"] = current
        entry.update(extras(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One readable line: time, component, level, message, extras."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        words = [f"{name}={value}" for name, value in extras(record).items()]
        if current := request_id():
            words.append(f"request_id={current}")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {self._component} {record.levelname.lower()}: {record.getMessage()}"
        if words:
            line += "  " + " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def extras(record: logging.LogRecord) -> dict[str, object]:
    """The ``extra=`` fields of a log call."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _timestamp(created: float) -> str:
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
        + f".{int(created % 1 * 1000):03d}Z"
    )
