"""Following a replica over real gRPC: reports, heartbeats, restarts, silence."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway.backends import watch
from gateway.backends.encoders import EncodeTarget, MediaStream, encode_frames
from gateway.backends.language_model import generate_tokens
from gateway.backends.replica import Replica
from gateway.items import ImagePlan
from gateway.routing import ReplicaPool
from gateway.targets import FixedTargets
from mimo.errors import MimoError, Unavailable
from mimo.metrics import Metrics
from mimo.rpc import replica as replica_service
from mimo.rpc.channel import open_channel
from mimo.rpc.interceptors import DrainGate
from mimo.rpc.replica import Description, Load, ReplicaServicer
from mimo.store import EmbeddingKey
from mimo.store.memory_store import MemoryStore
from mimo.v1 import llm_pb2, llm_pb2_grpc, replica_pb2, replica_pb2_grpc, vision_pb2_grpc
from tests.support.fake_leaves import FakeVision
from tests.support.gateway_stack import token_request

PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TICK_S", 0.01)
    monkeypatch.setattr(watch, "RETRY_S", 0.01)
    monkeypatch.setattr(replica_service, "LOAD_INTERVAL_S", 0.005)


@asynccontextmanager
async def serving(servicer: Any, add: Callable[[Any, Any], None]) -> AsyncIterator[Replica]:
    server = grpc.aio.server()
    add(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = open_channel(address)
    try:
        yield Replica(address, channel, time.monotonic)
    finally:
        await channel.close()
        await server.stop(None)


@asynccontextmanager
async def watching(replica: Replica) -> AsyncIterator[None]:
    async def replicas() -> list[Replica]:
        return [replica]

    task = asyncio.create_task(watch.LoadWatch(replicas).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not check():
            await asyncio.sleep(0.005)


class Scripted(replica_pb2_grpc.ReplicaServicer):
    """Reports once a go is given."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(1)

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            await self.go.acquire()
            yield replica_pb2.WatchLoadResponse(
                queued_work=3, running_work=4, work_per_second=2, predicted_wait_seconds=3.5
            )


async def test_reports_arrive_and_silence_is_noticed() -> None:
    servicer = Scripted()
    lost: list[MimoError] = []
    async with (
        serving(servicer, replica_pb2_grpc.add_ReplicaServicer_to_server) as replica,
        watching(replica),
    ):
        with replica.call(lost.append):
            await until(lambda: replica.outstanding == 7.0)
            assert (replica.work_per_second, replica.wait_s) == (2.0, 3.5)
            await until(lambda: bool(lost))
        assert replica.rests
        servicer.go.release()
        await until(lambda: not replica.rests)


async def test_a_loop_that_comes_late_does_not_count_as_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica("a:1", open_channel("127.0.0.1:1"), time.monotonic)
    replica.heard(watch._load_from_proto(replica_pb2.WatchLoadResponse()))
    ticks: list[int] = []
    monkeypatch.setattr(replica, "tick", ticks.append)
    monkeypatch.setattr(watch, "_follow", lambda *_: asyncio.sleep(0))
    pauses = iter([0.0, 0.5, 5.0, 1.0, 0.5])
    looks, now = 0, 0.0

    async def replicas() -> list[Replica]:
        nonlocal now, looks
        looks += 1
        now += next(pauses, 0.0)
        return [replica]

    looking = asyncio.create_task(watch.LoadWatch(replicas, clock=lambda: now).run())
    await until(lambda: looks == 6)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    await replica.channel.close()
    assert len(ticks) == 4  # not those after 5 s and 1 s


async def test_a_replica_with_nothing_to_tell_says_so() -> None:
    description: Any = None
    servicer = ReplicaServicer(description, Load, DrainGate())
    lost: list[MimoError] = []
    async with (
        serving(servicer, replica_pb2_grpc.add_ReplicaServicer_to_server) as replica,
        watching(replica),
    ):
        reports: list[object] = []
        heard = replica.heard
        replica.heard = lambda report: (reports.append(report), heard(report))[1]  # type: ignore
        with replica.call(lost.append):
            await until(lambda: len(reports) >= 5)
        assert len(set(reports)) == 1 and lost == []


async def test_a_process_that_comes_back_starts_with_a_clean_slate() -> None:
    servicer = Scripted()
    async with (
        serving(servicer, replica_pb2_grpc.add_ReplicaServicer_to_server) as replica,
    ):
        for _ in range(9):
            replica.failed()
        assert replica.rests
        async with watching(replica):
            await until(lambda: not replica.rests)


async def test_the_state_that_is_shown_changes_though_nobody_asks() -> None:
    description = Description("vision", "", "m", "fp", "float32", "cpu", 8, "float32")
    servicer = ReplicaServicer(description, Load, DrainGate())
    server = grpc.aio.server()
    replica_pb2_grpc.add_ReplicaServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pool = ReplicaPool("vision", FixedTargets((address,)), Metrics("gateway"))

    def shown(state: str) -> float:
        return pool._metrics.value(
            "mimo_gateway_upstream_endpoints", component="vision", state=state
        )

    watching = asyncio.create_task(pool.watch())
    await until(lambda: shown("connecting") == 1)
    (replica,) = await pool.replicas()
    await until(lambda: replica._report is not None)
    await pool.facts(replica)
    await until(lambda: shown("ready") == 1)
    await server.stop(None)
    await until(lambda: shown("ready") == 0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await pool.close()


async def test_an_encode_on_a_replica_that_falls_silent_is_broken_off() -> None:
    leaf = FakeVision(MemoryStore())
    leaf.hold.clear()
    plan = ImagePlan(2, 2, 2, 2, 1, (1, 2, 2), 1)

    async def pixels() -> AsyncIterator[bytes]:
        yield bytes(12)

    stream: Any = MediaStream("uint8", (1, 2, 2, 3), pixels)  # type: ignore[arg-type]
    async with serving(leaf, vision_pb2_grpc.add_VisionEncoderServicer_to_server) as replica:
        target = EncodeTarget(EmbeddingKey("ab" * 32), "encoder")
        call = asyncio.create_task(encode_frames(replica, target, plan, stream, 30.0))
        await leaf.entered.wait()
        fall_silent(replica)
        with pytest.raises(Unavailable, match="silent"):
            await call
        # Who is cancelled at the same moment does not take it for a reason to go on elsewhere.
        leaf.entered.clear()
        call = asyncio.create_task(encode_frames(replica, target, plan, stream, 30.0))
        await leaf.entered.wait()
        fall_silent(replica)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


class Frozen(llm_pb2_grpc.LanguageModelServicer):
    """Says one token and no more."""

    async def GenerateTokens(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        yield llm_pb2.GenerateTokensResponse(tokens=llm_pb2.GeneratedTokens(ids=[5]))
        await asyncio.Event().wait()


async def test_a_sequence_on_a_replica_that_falls_silent_is_broken_off() -> None:
    adds = llm_pb2_grpc.add_LanguageModelServicer_to_server
    async with serving(Frozen(), adds) as replica:
        events = generate_tokens(replica, token_request(), 30.0)
        assert await anext(events)
        fall_silent(replica)
        with pytest.raises(Unavailable, match="silent"):
            await anext(events)


async def test_a_deadline_that_passes_as_a_replica_falls_silent_is_a_deadline() -> None:
    adds = llm_pb2_grpc.add_LanguageModelServicer_to_server
    async with serving(Frozen(), adds) as replica:
        events = generate_tokens(replica, token_request(), 30.0)
        assert await anext(events)
        reading = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        fall_silent(replica)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await events.aclose()


async def test_a_decoder_without_progress_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.backends.language_model.STALL_S", 0.05)
    adds = llm_pb2_grpc.add_LanguageModelServicer_to_server
    async with serving(Frozen(), adds) as replica:
        events = generate_tokens(replica, token_request(), 30.0)
        assert await anext(events)
        with pytest.raises(Unavailable, match="no progress"):
            await anext(events)


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b""])
async def test_bytes_that_are_no_answer_are_the_replicas_fault(garbage: bytes) -> None:
    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(self._babble)

        async def _babble(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
            yield garbage

    def add(handler: Any, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((handler,))

    async with serving(Handler(), add) as replica:
        with pytest.raises(Unavailable, match="garbage"):
            async for _ in generate_tokens(replica, token_request(), 30.0):
                pass


async def test_a_failure_that_nobody_explains_is_the_replicas_fault() -> None:
    class Broken(llm_pb2_grpc.LanguageModelServicer):
        async def GenerateTokens(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            await context.abort(grpc.StatusCode.INTERNAL, "RST_STREAM")
            yield

    adds = llm_pb2_grpc.add_LanguageModelServicer_to_server
    async with serving(Broken(), adds) as replica:
        with pytest.raises(Unavailable, match="INTERNAL"):
            async for _ in generate_tokens(replica, token_request(), 30.0):
                pass


def fall_silent(replica: Replica) -> None:
    replica.heard(watch._load_from_proto(replica_pb2.WatchLoadResponse()))
    for _ in range(3):
        replica.tick(3)
