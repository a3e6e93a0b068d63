"""The only gRPC server scaffold: ports, health, reflection, metrics, signals, drain.

A process answers its ops port from its first moment, so that a probe sees the truth while weights
load. Order of a stop: readiness goes down, new calls are refused as DRAINING, running calls finish
within the drain time, then everything closes and the process exits with 0.
"""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from mimo import logs
from mimo.config import option, parse
from mimo.errors import ConfigError, StartupError
from mimo.metrics import Metrics
from mimo.rpc.channel import MAX_MESSAGE_BYTES
from mimo.rpc.interceptors import CallInterceptor, DrainGate
from mimo.rpc.replica import Description, Load, ReplicaServicer
from mimo.v1 import replica_pb2, replica_pb2_grpc

logger = logging.getLogger(__name__)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

WIRE_VERSION = "v1"

REASON_KEY = "x-mimo-reason"  # trailing metadata of a health check that fails for a known reason
REASON_SHOWN_S = 1.0  # how long a process that cannot go on answers at least, so that one can ask

_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every 20 s even without calls; fewer than that would close their connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options every process has. Port 0 means a free one."""

    model: str = option("", help="checkpoint directory; models/mimo-tiny of the checkout if there")
    served_model_name: str = option("", help="name in answers; the directory's name by default")
    address: str = option("127.0.0.1:0", help="gRPC address of the service")
    store: str = option("redis://127.0.0.1:6379", help="URL of the embedding store")
    ops_address: str = option("127.0.0.1:0", help="gRPC address of health")
    metrics_address: str = option("127.0.0.1:0", help="HTTP address of /metrics")
    drain_seconds: float = option(30.0, help="time running calls get after SIGTERM", at_least=0)
    log_level: str = option(
        "info", help="least severe level logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("json", help="form of log lines", choices=("json", "text"))


ConfigT = TypeVar("ConfigT", bound=ServerConfig)


class End(asyncio.Event):
    """Set by a service that cannot go on. ``reason``: one line, once it is set."""

    reason = ""

    def because(self, reason: str) -> None:
        """The first reason counts."""
        if not self.is_set():
            self.reason = reason
            self.set()


@dataclass(frozen=True)
class Service:
    """A loaded service, ready to be served.

    ``add`` registers its servicers on a server; ``names`` are their full protobuf names. A service
    without a description is nobody's replica and does not answer as one. Larger messages than
    ``max_receive_bytes`` are refused by gRPC itself, with RESOURCE_EXHAUSTED. ``ended`` is set by a
    service that cannot go on; the process then drains and stops.
    """

    add: Callable[[grpc.aio.Server], None]
    names: Sequence[str]
    description: Description | None = None
    load: Callable[[], Load] = Load
    max_receive_bytes: int = MAX_MESSAGE_BYTES
    ended: End = field(default_factory=End)


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # its package has no types
    """grpc.health.v1. Out of service for a known ``reason``, it tells that in trailing metadata."""

    reason = ""

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        response = await super().Check(request, context)
        if self.reason and response.status == NOT_SERVING:
            context.set_trailing_metadata(((REASON_KEY, self.reason),))
        return response


class Ops:
    """Health and metrics of a process, up before and after its service is."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._health = Health()
        self._server: grpc.aio.Server | None = None
        self._http: Callable[[], None] = lambda: None
        self.address = ""
        self.metrics_address = ""

    async def start(self) -> None:
        """Raises ConfigError when an address cannot be bound."""
        self._server = grpc.aio.server(options=_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = bind(self._server, self._config.ops_address, "--ops-address")
        await self._server.start()
        await self._set({"liveness": SERVING, "startup": NOT_SERVING, "readiness": NOT_SERVING})
        host, port = split_address(self._config.metrics_address, "--metrics-address")
        try:
            http, thread = start_http_server(port, host, self._metrics.registry)
        except OSError as error:
            raise ConfigError(f"--metrics-address: {host}:{port}: {error.strerror}") from None
        self.metrics_address = f"{host}:{http.server_port}"

        def stop_http() -> None:
            http.shutdown()
            http.server_close()
            thread.join()

        self._http = stop_http

    async def set_ready(self, ready: bool, reason: str = "") -> None:
        self._health.reason = reason
        await self._set({"startup": SERVING} if ready else {})
        await self._set({"readiness": SERVING if ready else NOT_SERVING})
        self._metrics.set("mimo_replica_serving", float(ready))

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        self._http()
        if self._server is not None:
            await self._server.stop(grace=0.2)

    async def _set(self, states: dict[str, health_pb2.HealthCheckResponse.ServingStatus]) -> None:
        for name, state in states.items():
            await self._health.set(name, state)


class ServiceServer:
    """The service port of a process: its servicers, Replica, health and reflection."""

    def __init__(self, service: Service, gate: DrainGate) -> None:
        self._health = Health()
        self._names = [*service.names]
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(gate)],
            options=[*_OPTIONS, ("grpc.max_receive_message_length", service.max_receive_bytes)],
        )
        service.add(self._server)
        if service.description is not None:
            replica = ReplicaServicer(service.description, service.load, gate)
            replica_pb2_grpc.add_ReplicaServicer_to_server(replica, self._server)
            self._names.append(replica_pb2.DESCRIPTOR.services_by_name["Replica"].full_name)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )

    async def start(self, address: str) -> str:
        """Bind and serve; returns the address with its real port."""
        bound = bind(self._server, address, "--address")
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, SERVING)
        return bound

    async def announce_stop(self, reason: str) -> None:
        """Health says NOT_SERVING from now on; calls still run."""
        self._health.reason = reason
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        await self._server.stop(grace=0.2)


async def serve(
    config: ServerConfig,
    address: str,
    metrics: Metrics,
    load: Callable[[], AbstractAsyncContextManager[Service]],
    *,
    gate: DrainGate | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[str, Ops], None] | None = None,
) -> None:
    """Load a service, serve it until SIGTERM, SIGINT, ``stop`` or its own end, then drain.

    ``load`` is an async context manager: entering it loads (off the event loop), leaving it frees.
    A ``gate`` given by the caller also counts calls that come in by another door. ``on_ready``
    receives the service address and the ops ports. Raises StartupError when loading or binding
    fails.
    """
    started = time.monotonic()
    gate = gate or DrainGate()
    stop = stop or asyncio.Event()
    ops = Ops(config, metrics)
    async with _signals(stop), contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(ops.stop)
        await ops.start()
        service = await _enter_unless_stopped(stack, load(), stop)
        if service is None:
            return
        server = ServiceServer(service, gate)
        bound = await server.start(address)
        _set_build_info(metrics, service.description)
        await ops.set_ready(True)
        metrics.set("mimo_startup_seconds", time.monotonic() - started, phase="total")
        logger.info(
            "ready",
            extra={"address": bound, "ops": ops.address, "metrics": ops.metrics_address},
        )
        if on_ready is not None:
            on_ready(bound, ops)
        await _first_of(stop, service.ended)
        await drain(config, metrics, ops, gate, server, service.ended.reason)


async def drain(
    config: ServerConfig,
    metrics: Metrics,
    ops: Ops,
    gate: DrainGate,
    server: ServiceServer,
    reason: str = "",
) -> None:
    """Take a process out of service without cutting a running call short.

    With a ``reason``, because it cannot go on; whoever asks for its health hears it.
    """
    began = time.monotonic()
    metrics.set("mimo_replica_draining", 1)
    logger.info("draining", extra={"in_flight": gate.in_flight, "reason": reason})
    await ops.set_ready(False, reason)
    await server.announce_stop(reason)
    aborted = await gate.close_and_wait(config.drain_seconds)
    if reason:
        await asyncio.sleep(REASON_SHOWN_S)
    metrics.inc("mimo_drain_aborted_requests_total", aborted)
    await server.stop()
    metrics.observe("mimo_drain_seconds", time.monotonic() - began)
    logger.info("stopped", extra={"aborted": aborted})


def run_process(
    component: str,
    config_class: type[ConfigT],
    body: Callable[[ConfigT, Metrics], Coroutine[Any, Any, None]],
) -> int:
    """``main`` of every process: read the options, configure logs, run ``body`` to its end.

    Returns the exit status. A StartupError is one line on stderr and status 1.
    """
    program = f"mimo-{component}"
    try:
        config = parse(config_class, program=program)
        logs.configure(component, level=config.log_level, form=config.log_format)
        asyncio.run(body(config, Metrics(component)))
    except StartupError as error:
        print(f"{program}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Host and port of ``host:port``. Raises ConfigError naming the flag."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag}: {address!r} is not host:port")
    return host, int(port)


def bind(server: grpc.aio.Server, address: str, flag: str) -> str:
    """Bind a server; returns ``host:port`` with the real port. Raises ConfigError."""
    host, _ = split_address(address, flag)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"{flag}: {address} cannot be bound; is another process using it?")
    return f"{host}:{port}"


def _set_build_info(metrics: Metrics, description: Description | None) -> None:
    profile = description.numeric_profile if description else {}
    metrics.set(
        "mimo_build_info",
        1,
        version=version("mimo-serve"),
        encoder_fingerprint=description.fingerprint if description else "",
        numeric_profile=",".join(f"{name}={value}" for name, value in sorted(profile.items())),
        wire_version=WIRE_VERSION,
    )


@contextlib.asynccontextmanager
async def _signals(stop: asyncio.Event) -> AsyncIterator[None]:
    """SIGTERM and SIGINT set ``stop`` while the block runs."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: tests
        for number in numbers:
            loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)


async def _enter_unless_stopped(
    stack: contextlib.AsyncExitStack,
    loading: AbstractAsyncContextManager[Service],
    stop: asyncio.Event,
) -> Service | None:
    """The loaded service, or None when the process was told to stop before it was loaded."""
    service = await stack.enter_async_context(loading)
    return None if stop.is_set() else service


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until any of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
