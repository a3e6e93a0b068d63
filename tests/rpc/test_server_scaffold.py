"""The server scaffold on real gRPC: errors, request ids, health, load, drain."""

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mimo.errors import (
    ConfigError,
    EmbeddingMissing,
    InvalidRequest,
    MimoError,
    Overloaded,
    Reason,
    StartupError,
    Unavailable,
)
from mimo.logs import request_id
from mimo.metrics import Metrics
from mimo.rpc.channel import open_channel
from mimo.rpc.replica import Description, Load
from mimo.rpc.server import NOT_SERVING, REASON_KEY, End, Ops, ServerConfig, Service, serve
from mimo.rpc.status import from_rpc_error
from mimo.v1 import gateway_pb2, gateway_pb2_grpc, replica_pb2, replica_pb2_grpc

ERRORS = [
    InvalidRequest("bad grid", reason=Reason.MEDIA_LIMIT, field="plan.grid_t", limit=4),
    Overloaded("queue is full", retry_after_s=1.5),
    EmbeddingMissing("item 3 is gone", item_index=3),
    Unavailable("lost"),
]

DESCRIPTION = Description(
    component="llm",
    version="0",
    model="toy",
    fingerprint="f" * 64,
    dtype="float32",
    device="cpu",
    hidden_size=8,
    embedding_dtype="bfloat16",
    numeric_profile={"swa_visible": "129"},
    limits={"max_context_tokens": 64},
)


class Scripted(gateway_pb2_grpc.GatewayServicer):
    """Fails, counts or waits as the model name of the request says."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def GetModel(
        self, request: gateway_pb2.GetModelRequest, context: object
    ) -> gateway_pb2.GetModelResponse:
        if request.model.isdigit():
            raise ERRORS[int(request.model)]
        if request.model == "bug":
            raise ZeroDivisionError("secret text")
        return gateway_pb2.GetModelResponse(model=gateway_pb2.Model(name=request_id()))

    async def UploadMedia(
        self, requests: AsyncIterator[gateway_pb2.UploadMediaRequest], context: object
    ) -> gateway_pb2.UploadMediaResponse:
        await anext(requests)
        raise ERRORS[0]

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        for seq in range(200):
            yield gateway_pb2.GenerateResponse(seq=seq)
            if seq == 2 and request.model == "fail":
                raise ERRORS[0]
            if seq == 2:
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise


@dataclass
class Running:
    address: str
    ops: Ops
    servicer: Scripted
    stop: asyncio.Event
    task: asyncio.Task[None]
    metrics: Metrics
    channel: grpc.aio.Channel
    gateway: "gateway_pb2_grpc.GatewayAsyncStub"


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    servicer = Scripted()
    stop = asyncio.Event()
    ready: asyncio.Future[tuple[str, Ops]] = asyncio.get_running_loop().create_future()
    metrics = Metrics("llm")

    @contextlib.asynccontextmanager
    async def load() -> AsyncIterator[Service]:
        yield Service(
            add=lambda server: gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server),
            names=["mimo.v1.Gateway"],
            description=DESCRIPTION,
            load=lambda: Load(queued_work=3.0, predicted_wait_seconds=0.5),
        )

    task = asyncio.create_task(
        serve(
            ServerConfig(drain_seconds=20),
            "127.0.0.1:0",
            metrics,
            load,
            stop=stop,
            on_ready=lambda address, ops: ready.set_result((address, ops)),
        )
    )
    address, ops = await ready
    channel = open_channel(address)
    yield Running(
        address,
        ops,
        servicer,
        stop,
        task,
        metrics,
        channel,
        gateway_pb2_grpc.GatewayStub(channel),
    )
    servicer.release.set()
    await channel.close()
    stop.set()
    await task


async def failure(call: object) -> MimoError:
    with pytest.raises(grpc.RpcError) as caught:
        await call  # type: ignore[misc]
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("index", range(len(ERRORS)))
async def test_an_error_arrives_as_the_same_type_with_its_details(
    running: Running, index: int
) -> None:
    sent = ERRORS[index]
    got = await failure(running.gateway.GetModel(gateway_pb2.GetModelRequest(model=str(index))))
    assert type(got) is type(sent)
    assert (got.message, got.reason, got.field) == (sent.message, sent.reason, sent.field)
    assert got.retry_after_s == sent.retry_after_s
    assert sent.metadata.items() <= got.metadata.items()


async def test_an_unexpected_exception_becomes_internal_without_its_text(running: Running) -> None:
    got = await failure(running.gateway.GetModel(gateway_pb2.GetModelRequest(model="bug")))
    assert got.reason is Reason.INTERNAL
    assert "secret" not in got.message


async def test_a_stream_that_fails_midway_delivers_what_it_had(running: Running) -> None:
    call = running.gateway.Generate(gateway_pb2.GenerateRequest(model="fail"))
    seen = []
    with pytest.raises(grpc.RpcError) as caught:
        async for response in call:
            seen.append(response.seq)
    assert seen == [0, 1, 2]
    assert from_rpc_error(caught.value).reason is Reason.MEDIA_LIMIT


def large_upload() -> Iterator[gateway_pb2.UploadMediaRequest]:
    return (gateway_pb2.UploadMediaRequest(data=bytes(1 << 18)) for _ in range(40))


async def test_a_refusal_reaches_a_caller_that_is_still_uploading(running: Running) -> None:
    for _ in range(5):
        got = await failure(running.gateway.UploadMedia(large_upload()))
        assert got.reason is Reason.MEDIA_LIMIT


async def test_the_request_id_is_bound_and_echoed(running: Running) -> None:
    call = running.gateway.GetModel(
        gateway_pb2.GetModelRequest(), metadata=(("x-request-id", "abc-1"),)
    )
    assert (await call).model.name == "abc-1"
    assert dict(await call.initial_metadata())["x-request-id"] == "abc-1"


async def test_a_request_id_that_is_not_one_is_replaced(running: Running) -> None:
    call = running.gateway.GetModel(
        gateway_pb2.GetModelRequest(), metadata=(("x-request-id", "a b"),)
    )
    assert (await call).model.name.startswith("req_")


async def test_a_cancelled_call_reaches_the_handler(running: Running) -> None:
    call = running.gateway.Generate(gateway_pb2.GenerateRequest())
    async for response in call:
        if response.seq == 2:
            break
    call.cancel()
    await asyncio.wait_for(running.servicer.cancelled.wait(), 10)


async def test_describe_and_load(running: Running) -> None:
    replica = replica_pb2_grpc.ReplicaStub(running.channel)
    described = await replica.Describe(replica_pb2.DescribeRequest())
    assert described.fingerprint == "f" * 64
    assert described.numeric_profile["swa_visible"] == "129"
    watch = replica.WatchLoad(replica_pb2.WatchLoadRequest())
    async for load in watch:
        assert load.queued_work == 3.0
        break
    watch.cancel()


async def test_reflection_lists_our_services(running: Running) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)

    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for response in stub.ServerReflectionInfo(requests()):
        names = {service.name for service in response.list_services_response.service}
    assert {"mimo.v1.Gateway", "mimo.v1.Replica", "grpc.health.v1.Health"} <= names


async def test_metrics_are_served_over_http(running: Running) -> None:
    url = f"http://{running.ops.metrics_address}/metrics"
    body = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    assert 'mimo_replica_serving{component="llm"} 1.0' in body


async def test_a_drain_says_so_first_and_delivers_the_running_stream_whole(
    running: Running,
) -> None:
    async with open_channel(running.ops.address) as ops_channel:
        health = health_pb2_grpc.HealthStub(ops_channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        states = []
        call = running.gateway.Generate(gateway_pb2.GenerateRequest())
        seen = []
        async for response in call:
            seen.append(response.seq)
            if response.seq == 2:
                break
        async for state in watch:
            states.append(state.status)
            if len(states) == 1:
                running.stop.set()
            else:
                break
        assert states == [
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        ]
        refused = await failure(running.gateway.GetModel(gateway_pb2.GetModelRequest()))
        assert refused.reason is Reason.DRAINING
        for _ in range(5):
            refused = await failure(running.gateway.UploadMedia(large_upload()))
            assert refused.reason is Reason.DRAINING
        running.servicer.release.set()
        async for response in call:
            seen.append(response.seq)
        assert seen == list(range(200))
        watch.cancel()
    await asyncio.wait_for(running.task, 10)
    assert running.metrics.value("mimo_drain_aborted_requests_total") == 0


async def test_an_address_in_use_is_one_clear_line(running: Running) -> None:
    @contextlib.asynccontextmanager
    async def load() -> AsyncIterator[Service]:
        yield Service(lambda server: None, [], DESCRIPTION, Load)

    with pytest.raises(ConfigError, match="--address.*cannot be bound"):
        await serve(ServerConfig(), running.address, Metrics("llm"), load)


async def test_a_service_that_ends_is_drained_and_says_why() -> None:
    """The load context raises when it is left; until then everything runs as in any stop."""
    ended = End()
    metrics = Metrics("llm")
    answers: list[asyncio.Task[tuple[int, str]]] = []

    @contextlib.asynccontextmanager
    async def load() -> AsyncIterator[Service]:
        yield Service(lambda server: None, [], DESCRIPTION, Load, ended=ended)
        raise StartupError(ended.reason)

    async def end(address: str) -> tuple[int, str]:
        async with open_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while True:
                asked = health_pb2.HealthCheckRequest(service="readiness")
                call = check(asked, wait_for_ready=True)
                if (await call).status == NOT_SERVING:
                    return NOT_SERVING, dict(await call.trailing_metadata())[REASON_KEY]
                ended.because("the engine stopped")
                ended.because("something else, later")

    def on_ready(address: str, ops: Ops) -> None:
        answers.append(asyncio.create_task(end(ops.address)))

    with pytest.raises(StartupError, match="the engine stopped"):
        await serve(ServerConfig(), "127.0.0.1:0", metrics, load, on_ready=on_ready)
    assert metrics.value("mimo_replica_draining") == 1
    assert await answers[0] == (NOT_SERVING, "the engine stopped")
