"""Where the replicas of a component are: a fixed list, a DNS name, or a file that may change."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mimo.errors import ConfigError

DNS_INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


class Targets(Protocol):
    """A list of ``host:port`` that may change over time."""

    async def addresses(self) -> tuple[str, ...]:
        """The current list. A source that cannot be read keeps the last list it gave."""


def parse_targets(text: str, flag: str) -> Targets:
    """Read ``host:port,…``, ``dns:///name:port`` or ``file:PATH``. Raises ConfigError."""
    if text.startswith("file:"):
        return FileTargets(Path(text.removeprefix("file:")))
    if text.startswith("dns:///"):
        name, port = _split(text.removeprefix("dns:///"), flag)
        return DnsTargets(name, port)
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    if not addresses:
        raise ConfigError(f"{flag}: no address given")
    for address in addresses:
        _split(address, flag)
    return FixedTargets(addresses)


class FixedTargets:
    """A list that never changes."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    async def addresses(self) -> tuple[str, ...]:
        return self._addresses


class DnsTargets:
    """Every address of a name, looked up again every few seconds."""

    def __init__(
        self, name: str, port: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._port = name, port
        self._clock = clock
        self._expires = float("-inf")
        self._addresses: tuple[str, ...] = ()
        self._lookup: asyncio.Task[None] | None = None

    async def addresses(self) -> tuple[str, ...]:
        """Waits for the first lookup, and for none while there is a list."""
        if self._lookup is None and self._clock() >= self._expires:
            self._lookup = asyncio.create_task(self._look_up())
        if self._lookup is not None and not self._addresses:
            await asyncio.shield(self._lookup)
        return self._addresses

    async def _look_up(self) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._name, self._port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            logger.warning("name lookup failed", extra={"target": self._name, "error": error})
        else:
            self._addresses = tuple(
                sorted({_join(str(address[0]), self._port) for *_, address in found})
            )
        finally:
            self._expires = self._clock() + DNS_INTERVAL_S
            self._lookup = None


class FileTargets:
    """A JSON list in a file that is replaced atomically when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._addresses: tuple[str, ...] = ()
        self._complaint = ""  # the latest, made once

    async def addresses(self) -> tuple[str, ...]:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp != self._stamp:
                self._addresses = _read(self._path)
                self._stamp = stamp
                self._complaint = ""
        except (OSError, ValueError) as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                extra = {"path": str(self._path), "error": self._complaint}
                logger.warning("cannot read the target file; its last list stands", extra=extra)
        return self._addresses


def _read(path: Path) -> tuple[str, ...]:
    """Raises ValueError when the file does not hold a JSON list of strings."""
    parsed = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(parsed, list) or not all(isinstance(entry, str) for entry in parsed):
        raise ValueError("not a JSON list of addresses")
    return tuple(parsed)


def _split(address: str, flag: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag}: {address!r} is not host:port")
    return host, int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
