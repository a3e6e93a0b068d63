"""Puts the parts of a gateway together, and takes them apart again."""

import ipaddress
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.embedding import Embedder
from gateway.held import HeldBytes
from gateway.media.decoder import MediaDecoder
from gateway.media.fetch import Fetcher, FetchPolicy
from gateway.media.limits import Limits
from gateway.media.workers import WorkerPool
from gateway.model import Model
from gateway.pipeline import MediaServices, Pipeline
from gateway.planning import MediaPlanner
from gateway.routing import ReplicaPool
from gateway.targets import parse_targets
from gateway.uploads import Uploads
from gateway.vitals import LoopLag
from mimo.errors import ConfigError
from mimo.metrics import AUDIO, LLM, VISION, Metrics
from mimo.store import open_store


@dataclass(frozen=True, slots=True)
class Assembly:
    """A gateway without its faces. ``pools`` are the upstreams it needs, by component; ``memory``
    is what requests of both faces may hold; ``lag`` is how far its event loop is behind, once it
    runs."""

    pipeline: Pipeline
    uploads: Uploads
    pools: dict[str, ReplicaPool]
    memory: HeldBytes
    lag: LoopLag


@asynccontextmanager
async def assemble(
    config: GatewayConfig, model: Model, metrics: Metrics
) -> AsyncIterator[Assembly]:
    """Start the media workers and open what needs opening. Raises ConfigError for bad targets and
    networks."""
    async with AsyncExitStack() as stack:
        store = open_store(config.store, metrics)
        stack.push_async_callback(store.aclose)
        uploads = Uploads(store)
        components = (VISION, AUDIO, LLM) if model.processor else (LLM,)
        pools: dict[str, ReplicaPool] = {}
        for component in components:
            targets = parse_targets(getattr(config, component), f"--{component}")
            pools[component] = ReplicaPool(component, targets, metrics)
            stack.push_async_callback(pools[component].close)
        media: MediaServices | None = None
        if model.processor is not None:
            limits = Limits()
            workers = WorkerPool(config.media_workers)
            stack.push_async_callback(workers.close)
            await workers.start()
            fetcher = Fetcher(fetch_policy(config))
            stack.callback(fetcher.close)
            decoder = MediaDecoder(workers, model.processor, limits)
            planner = MediaPlanner(
                decoder, model.processor, limits, fetcher, uploads, store, metrics
            )
            embedder = Embedder(
                pools[VISION], pools[AUDIO], store, decoder, planner, model.processor, metrics
            )
            media = MediaServices(planner, embedder)
        memory, lag = HeldBytes(), LoopLag(metrics)
        pipeline = Pipeline(
            model,
            pools[LLM],
            media,
            metrics,
            max_timeout_s=config.request_timeout_seconds,
            memory=memory,
            lag=lag,
        )
        yield Assembly(pipeline, uploads, pools, memory, lag)


def fetch_policy(config: GatewayConfig) -> FetchPolicy:
    """Raises ConfigError for what is no network."""
    try:
        denied = tuple(map(ipaddress.ip_network, _listed(config.media_denied_networks)))
    except ValueError as error:
        raise ConfigError(f"--media-denied-networks: {error}") from None
    domains = _listed(config.media_domains)
    return FetchPolicy(allow_http=config.allow_http_media, domains=domains or None, denied=denied)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip().lower() for part in text.split(",") if part.strip())
