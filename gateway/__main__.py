"""The gateway process: read the model, put the parts together, open both faces."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gateway.api.guard import LOCAL_HOSTS
from gateway.api.listener import listening
from gateway.app import create_app
from gateway.assembly import Assembly, assemble
from gateway.catalog import Catalog
from gateway.config import GatewayConfig
from gateway.metering import CallMeter
from gateway.model import Model
from gateway.rpc.servicer import MAX_RECEIVE_BYTES, GatewayServicer
from gateway.vitals import keep_acquainted
from mimo.checkpoint.directory import model_directory
from mimo.errors import MimoError, StartupError
from mimo.metrics import GATEWAY, Metrics
from mimo.rpc.interceptors import DrainGate
from mimo.rpc.server import Ops, Service, run_process, serve, split_address
from mimo.v1 import gateway_pb2, gateway_pb2_grpc

logger = logging.getLogger(__name__)


def main() -> int:
    return run_process(GATEWAY, GatewayConfig, run)


@dataclass(frozen=True, slots=True)
class Addresses:
    """``host:port`` of every door, with real ports."""

    rest: str
    grpc: str
    ops: str
    metrics: str


async def run(
    config: GatewayConfig,
    metrics: Metrics,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[Addresses], None] = lambda _: None,
) -> None:
    """Serve both faces until SIGTERM, SIGINT or ``stop``; then drain them together.

    Raises StartupError when the model, an address or an option does not fit.
    """
    gate = DrainGate()
    rest = ""

    @contextlib.asynccontextmanager
    async def load() -> AsyncIterator[Service]:
        nonlocal rest
        model = await asyncio.to_thread(
            lambda: Model.open(model_directory(config.model), config.served_model_name)
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                parts = await stack.enter_async_context(assemble(config, model, metrics))
            except MimoError as error:
                raise StartupError(error.message) from error
            pools = parts.pools.values()
            await stack.enter_async_context(
                _in_background(keep_acquainted(pools), parts.lag.run(), *(p.watch() for p in pools))
            )
            catalog = Catalog(model, created=int(time.time()))
            faces = Faces(config, parts, catalog, metrics, gate)
            rest = await stack.enter_async_context(faces.rest())
            yield faces.grpc()

    def ready(address: str, ops: Ops) -> None:
        logger.info("REST ready", extra={"address": rest, "grpc": address})
        on_ready(Addresses(rest, address, ops.address, ops.metrics_address))

    await serve(config, config.address, metrics, load, gate=gate, stop=stop, on_ready=ready)


@dataclass(frozen=True, slots=True)
class Faces:
    """The two ways to talk to one pipeline. They share a gate, so they drain together."""

    config: GatewayConfig
    parts: Assembly
    catalog: Catalog
    metrics: Metrics
    gate: DrainGate

    def rest(self) -> contextlib.AbstractAsyncContextManager[str]:
        """Listens while entered; gives the address."""
        host, _ = split_address(self.config.rest_address, "--rest-address")
        app = create_app(
            self.parts.pipeline,
            self.catalog,
            self.parts.uploads,
            CallMeter(self.metrics, "rest"),
            self.gate,
            hosts=LOCAL_HOSTS | {host} | _listed(self.config.hosts),
            origins=_listed(self.config.cors_origins),
            memory=self.parts.memory,
        )
        return listening(app, self.config.rest_address, "--rest-address")

    def grpc(self) -> Service:
        servicer = GatewayServicer(
            self.parts.pipeline,
            self.catalog,
            self.parts.uploads,
            CallMeter(self.metrics, "grpc"),
            self.parts.memory,
        )
        return Service(
            add=lambda server: gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server),
            names=[gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name],
            max_receive_bytes=MAX_RECEIVE_BYTES,
        )


@contextlib.asynccontextmanager
async def _in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless work beside the block."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _listed(text: str) -> frozenset[str]:
    return frozenset(part.strip().lower() for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(main())
