"""The HTTP server inside our process: it owns neither signals nor logs."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator

import uvicorn
from starlette.types import ASGIApp

from mimo.errors import ConfigError
from mimo.rpc.server import split_address

KEEP_ALIVE_S = 75  # longer than load balancers keep their side idle
CLOSE_S = 1  # for what a drain has left over
MAX_HEADER_BYTES = 32 << 10
_BACKLOG = 2048


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, address: str, flag: str) -> AsyncIterator[str]:
    """Serve ``app`` while the block runs; gives ``host:port`` with the real port.

    Raises ConfigError naming ``flag`` when the address cannot be bound.
    """
    host, _ = split_address(address, flag)
    listener = _bind(address, flag)
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The process drains both of its faces on a signal; this one is told when it is time."""
        yield


def _bind(address: str, flag: str) -> socket.socket:
    host, port = split_address(address, flag)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"{flag}: {address} cannot be bound: {error.strerror}") from None
