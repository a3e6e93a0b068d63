"""The decoder process: load the model, wire the parts, serve."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable

from mimo import logs
from mimo.config import parse
from mimo.errors import StartupError
from mimo.metrics import LLM, Metrics
from mimo.rpc.replica import Load
from mimo.rpc.server import Service, exit_status, serve
from mimo.store import open_store
from mimo.v1 import llm_pb2, llm_pb2_grpc
from services.llm.embeddings import EmbeddingPool
from services.llm.engine.loop import Engine
from services.llm.engine.meter import Meter
from services.llm.loading import load
from services.llm.memory import MIB
from services.llm.servicer import LanguageModelServicer
from services.llm.settings import LlmSettings

PROGRAM = "mimo-llm"


def main() -> int:
    return exit_status(PROGRAM, _serve)


def _serve() -> None:
    settings = parse(LlmSettings, program=PROGRAM)
    logs.configure(LLM, level=settings.log_level, form=settings.log_format)
    asyncio.run(run(settings, Metrics(LLM)))


async def run(settings: LlmSettings, metrics: Metrics) -> None:
    """Serve until told to stop. Raises StartupError when the engine died instead."""
    stop = asyncio.Event()
    failed = asyncio.Event()

    def on_failure() -> None:
        failed.set()
        stop.set()

    def service() -> contextlib.AbstractAsyncContextManager[Service]:
        return llm_service(settings, metrics, on_failure)

    await serve(settings, settings.address, metrics, service, stop=stop)
    if failed.is_set():
        raise StartupError("the engine stopped on an error; the log says which")


@contextlib.asynccontextmanager
async def llm_service(
    settings: LlmSettings, metrics: Metrics, on_failure: Callable[[], None] = lambda: None
) -> AsyncIterator[Service]:
    """Load the decoder off the event loop, start its engine and put it behind its servicer.

    Raises StartupError when the model, the device or an option does not fit.
    """
    store = open_store(settings.store, metrics)
    loaded = await asyncio.to_thread(load, settings, metrics)
    engine = Engine(
        loaded.core,
        meter=Meter(metrics, loaded.prefill_rate),
        max_waiting=settings.max_waiting,
        on_failure=on_failure,
    )
    embeddings = EmbeddingPool(store, max_bytes=settings.embedding_pool_mib * MIB)
    servicer = LanguageModelServicer(engine, embeddings, loaded.facts)
    engine.start(asyncio.get_running_loop())
    try:
        yield Service(
            add=lambda server: llm_pb2_grpc.add_LanguageModelServicer_to_server(servicer, server),
            names=[llm_pb2.DESCRIPTOR.services_by_name["LanguageModel"].full_name],
            description=loaded.description,
            load=lambda: _replica_load(engine),
        )
    finally:
        await engine.stop()
        await store.aclose()


def _replica_load(engine: Engine) -> Load:
    load = engine.load()
    return Load(
        queued_work=load.waiting_tokens,
        running_work=load.num_running,
        work_per_second=load.tokens_per_second,
        predicted_wait_seconds=load.predicted_wait_s,
    )


if __name__ == "__main__":
    sys.exit(main())
