"""The decoder process: load the model, wire the parts, serve."""

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator

from mimo.errors import StartupError
from mimo.leaf.process import run_leaf
from mimo.metrics import LLM, Metrics
from mimo.rpc.replica import Load
from mimo.rpc.server import End, Service
from mimo.store import open_store
from mimo.v1 import llm_pb2, llm_pb2_grpc
from services.llm.embeddings import EmbeddingPool
from services.llm.engine.loop import Engine
from services.llm.engine.meter import Meter
from services.llm.loading import load
from services.llm.memory import MIB
from services.llm.servicer import LanguageModelServicer
from services.llm.settings import LlmSettings


def main() -> int:
    return run_leaf(LLM, LlmSettings, llm_service)


@contextlib.asynccontextmanager
async def llm_service(settings: LlmSettings, metrics: Metrics) -> AsyncIterator[Service]:
    """Load the decoder off the event loop, start its engine and put it behind its servicer.

    Raises StartupError when the model, the device or an option does not fit, and at the end when
    the engine died or hangs.
    """
    async with contextlib.aclosing(open_store(settings.store, metrics)) as store:
        loaded = await asyncio.to_thread(load, settings, metrics)
        loop = asyncio.get_running_loop()
        end = End()
        engine = Engine(
            loaded.core,
            meter=Meter(metrics, loaded.prefill_rate),
            max_waiting=settings.max_waiting,
            max_step_s=settings.max_step_seconds,
            on_failure=end.because,
        )
        embeddings = EmbeddingPool(store, max_bytes=settings.embedding_pool_mib * MIB)
        servicer = LanguageModelServicer(engine, embeddings, loaded.facts, loaded.grammars)
        engine.start(loop)

        def lose(reason: str) -> None:
            engine.give_up(reason)
            end.because(reason)

        if loaded.ranks is not None:
            loaded.ranks.watch(lambda reason: loop.call_soon_threadsafe(lose, reason))
        try:
            yield Service(
                add=functools.partial(llm_pb2_grpc.add_LanguageModelServicer_to_server, servicer),
                names=[llm_pb2.DESCRIPTOR.services_by_name["LanguageModel"].full_name],
                description=loaded.description,
                load=lambda: _replica_load(engine),
                ended=end,
            )
        finally:
            await engine.stop()
            if loaded.ranks is not None:
                await asyncio.to_thread(loaded.ranks.stop)
        if end.is_set():
            raise StartupError(end.reason)


def _replica_load(engine: Engine) -> Load:
    load = engine.load()
    return Load(
        queued_work=load.num_waiting,
        running_work=load.num_running,
        work_per_second=load.ends_per_second,
        predicted_wait_seconds=load.predicted_wait_s,
        service_seconds=load.service_s,
    )


if __name__ == "__main__":
    sys.exit(main())
