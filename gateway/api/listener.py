"""The HTTP server inside our process: it owns neither signals nor logs."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator
from typing import cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mimo.errors import ConfigError
from mimo.rpc.server import split_address

HEAD_S = 10  # for the whole head of a request, from its first byte or the connection's opening
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
            http=_Protocol,
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


class _Protocol(H11Protocol):
    """Closes a connection on which the head of a request does not come to its end in time.

    uvicorn measures nothing but the pause after an answer, and that only until the next byte.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _time_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


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
