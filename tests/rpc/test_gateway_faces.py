"""Both public faces of one gateway, over real gRPC and HTTP, before stand-ins for the leaves."""

import asyncio
import base64
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from gateway.__main__ import Addresses, run
from gateway.backends.replica import ReplicaState
from gateway.config import GatewayConfig
from gateway.routing import ReplicaPool
from gateway.targets import FixedTargets
from gateway.vitals import keep_acquainted
from mimo.errors import ConfigError, InvalidRequest, MimoError, Overloaded, Reason, StartupError
from mimo.metrics import Metrics
from mimo.rpc.interceptors import DrainGate
from mimo.rpc.replica import Description
from mimo.rpc.server import Service, ServiceServer
from mimo.rpc.status import from_rpc_error
from mimo.store.memory_store import MemoryStore
from mimo.v1 import gateway_pb2, gateway_pb2_grpc, replica_pb2, replica_pb2_grpc
from tests.support import byte_model
from tests.support.faces import sse_chunks
from tests.support.fake_leaves import (
    FakeAudio,
    FakeDecoder,
    FakeVision,
    serve_audio,
    serve_decoder,
    serve_vision,
)
from tests.support.gateway_stack import NOBODY, OK
from tests.support.media import gradient, image_file, tone, wav_file

# Media workers take a second to start: one gateway for the module, in the module's loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[2]
PICTURE = image_file(gradient(32, 64))
SOUND = wav_file(tone(0.5))


@dataclass
class Running:
    """A gateway, what is behind it, and a client for each of its faces."""

    addresses: Addresses
    metrics: Metrics
    vision: FakeVision
    audio: FakeAudio
    decoder: FakeDecoder
    stop: asyncio.Event
    task: "asyncio.Task[None]"
    http: httpx.AsyncClient
    stub: "gateway_pb2_grpc.GatewayAsyncStub"

    async def chat(self, *content: Any, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": list(content)}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **fields})

    async def generate(self, *parts: Any, **fields: Any) -> list[gateway_pb2.GenerateResponse]:
        request = gateway_pb2.GenerateRequest(messages=[user(*parts)], **fields)
        return [response async for response in self.stub.Generate(request)]


def user(*parts: Any) -> gateway_pb2.Message:
    content = [
        gateway_pb2.ContentPart(text=part)
        if isinstance(part, str)
        else gateway_pb2.ContentPart(**part)
        for part in parts
    ]
    return gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=content)


def inline(kind: str, data: bytes) -> dict[str, Any]:
    return {kind: gateway_pb2.MediaInput(inline=data)}


def image_url(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def input_audio(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


@contextlib.asynccontextmanager
async def running_gateway(model: Path) -> AsyncIterator[Running]:
    async with contextlib.AsyncExitStack() as stack:
        store = MemoryStore()
        vision, audio, decoder = FakeVision(store), FakeAudio(store), FakeDecoder(store, OK)
        config = GatewayConfig(
            model=str(model),
            address="127.0.0.1:0",
            rest_address="127.0.0.1:0",
            vision=await stack.enter_async_context(serve_vision(vision)),
            audio=await stack.enter_async_context(serve_audio(audio)),
            llm=await stack.enter_async_context(serve_decoder(decoder)),
            store="memory://",
            media_workers=1,
            drain_seconds=20,
        )
        stop = asyncio.Event()
        metrics = Metrics("gateway")
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(run(config, metrics, stop=stop, on_ready=ready.set_result))
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        addresses = ready.result()
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{addresses.rest}", timeout=60)
        )
        # A client that knows nothing of our limits.
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(addresses.grpc))
        stub = gateway_pb2_grpc.GatewayStub(channel)
        yield Running(addresses, metrics, vision, audio, decoder, stop, task, http, stub)
        decoder.hold.set()
        stop.set()
        await task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path) -> AsyncIterator[Running]:
    async with running_gateway(model) as running:
        yield running


@pytest.fixture
def gateway(shared: Running) -> Running:
    """The module's gateway, with its decoder as it was in the beginning."""
    shared.decoder.hold.set()
    shared.decoder.holding.clear()
    shared.decoder.cancelled.clear()
    return shared


async def failure(call: Any) -> MimoError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def content(responses: Sequence[gateway_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.content for response in responses)


# ── one answer, two faces ──


async def test_both_faces_give_the_same_answer(gateway: Running) -> None:
    rest = (await gateway.chat({"type": "text", "text": "hi"})).json()
    responses = await gateway.generate("hi")
    assert [response.seq for response in responses] == list(range(len(responses)))
    assert responses[0].WhichOneof("event") == "started"
    assert rest["choices"][0]["message"]["content"] == content(responses) == "ok"
    assert rest["choices"][0]["finish_reason"] == "stop"
    usage, summary = rest["usage"], responses[-1].summary
    assert usage["prompt_tokens"] == summary.prompt.prompt_tokens
    assert usage["completion_tokens"] == summary.completion_tokens == 3
    assert rest["mimo"]["model_fingerprint"] == summary.model_fingerprint == "llm"
    assert rest["mimo"]["speculation"] == {"drafted": [3, 2], "accepted": [2, 1]}


async def test_both_faces_take_pictures_and_sound(gateway: Running) -> None:
    rest = (await gateway.chat(image_url(PICTURE), input_audio(SOUND), "what?")).json()
    responses = await gateway.generate(inline("image", PICTURE), inline("audio", SOUND), "what?")
    details, prompt = rest["usage"]["prompt_tokens_details"], responses[-1].summary.prompt
    assert details["image_tokens"] == prompt.image_tokens == 2
    assert details["audio_tokens"] == prompt.audio_tokens == 4
    assert [item["modality"] for item in rest["mimo"]["items"]] == ["image", "audio"]
    assert [item.tokens for item in responses[-1].summary.items] == [2, 4]
    first, second = gateway.decoder.starts[-2:]
    assert first.prompt_ids == second.prompt_ids
    assert [item.key for item in first.items] == [item.key for item in second.items]


async def test_a_stream_in_chunks(gateway: Running) -> None:
    response = await gateway.chat("hi", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = sse_chunks(response.content)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert (text, chunks[-1]["choices"][0]["finish_reason"]) == ("ok", "stop")
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert last["mimo"]["request_id"] == response.headers["x-request-id"]


async def test_tokens_are_counted_alike(gateway: Running) -> None:
    body = {"messages": [{"role": "user", "content": [image_url(PICTURE), "hi"]}]}
    rest = (await gateway.http.post("/v1/tokenize", json=body)).json()
    request = gateway_pb2.CountTokensRequest(messages=[user(inline("image", PICTURE), "hi")])
    counted = await gateway.stub.CountTokens(request)
    assert rest["count"] == counted.prompt.prompt_tokens
    assert rest["max_model_len"] == counted.max_context_tokens == 4096
    assert rest["items"][0]["tokens"] == counted.items[0].tokens == 2


async def test_the_model_is_described(gateway: Running) -> None:
    (card,) = (await gateway.http.get("/v1/models")).json()["data"]
    model = (await gateway.stub.GetModel(gateway_pb2.GetModelRequest(model="tiny"))).model
    assert card["id"] == model.name == "tiny"
    assert dict(model.fingerprints) == {"vision": "encoder", "audio": "encoder", "llm": "llm"}
    listed = await gateway.stub.ListModels(gateway_pb2.ListModelsRequest())
    assert list(listed.models) == [model]
    unknown = await failure(gateway.stub.GetModel(gateway_pb2.GetModelRequest(model="x")))
    assert (unknown.reason, unknown.field) == (Reason.MODEL_NOT_FOUND, "model")


async def test_a_gateway_is_nobodys_replica(gateway: Running) -> None:
    async with grpc.aio.insecure_channel(gateway.addresses.grpc) as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        assert (await failure(stub.Describe(replica_pb2.DescribeRequest()))).code == "UNIMPLEMENTED"


# ── errors ──


async def test_an_error_names_the_field_in_each_faces_own_words(gateway: Running) -> None:
    broken = PICTURE[:60]
    rest = await gateway.chat({"type": "text", "text": "hi"}, image_url(broken))
    error = rest.json()["error"]
    assert (rest.status_code, error["code"]) == (400, "invalid_media")
    assert error["param"] == "messages[0].content[1]"
    rpc = await failure(gateway.generate("hi", inline("image", broken)))
    assert (rpc.reason, rpc.field) == (Reason.MEDIA_CORRUPT, "messages[0].parts[1]")


async def test_overload_says_when_to_come_back(gateway: Running) -> None:
    for stream in (False, True):
        gateway.decoder.errors.append(Overloaded("full", retry_after_s=3))
        rest = await gateway.chat("hi", stream=stream)
        assert (rest.status_code, rest.headers["retry-after"]) == (503, "3")
        assert rest.json()["error"]["code"] == "overloaded"
    gateway.decoder.errors.append(Overloaded("full", retry_after_s=3))
    rpc = await failure(gateway.generate("hi"))
    assert isinstance(rpc, Overloaded) and rpc.retry_after_s == 3


async def test_a_failure_in_the_middle_is_told_inside_the_stream(gateway: Running) -> None:
    gateway.decoder.deaths.append((1, InvalidRequest("no more")))
    body = (await gateway.chat("hi", stream=True)).content
    *chunks, last = sse_chunks(body)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "o"]
    assert last["error"]["message"] == "no more"


async def test_a_deadline_is_the_clients_to_shorten(gateway: Running) -> None:
    gateway.decoder.hold.clear()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-request-timeout-ms": "1000"}
    rest = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    assert (rest.status_code, rest.headers["x-should-retry"]) == (504, "false")
    assert rest.json()["error"]["code"] == "timeout"


# ── large bodies and uploads ──


async def test_a_message_that_is_too_large_is_told_about_uploads(gateway: Running) -> None:
    large = wav_file(tone(1.0)) + bytes(9 << 20)
    error = await failure(gateway.generate(inline("audio", large)))
    assert (error.reason, error.code) == (Reason.REQUEST_TOO_LARGE, "INVALID_ARGUMENT")
    assert "UploadMedia" in error.message


async def test_a_body_that_is_too_large_is_seen_to_be(gateway: Running) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(65):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"}
    url = "/v1/chat/completions"
    rest = await gateway.http.post(url, content=pieces(), headers=headers)
    assert (rest.status_code, rest.json()["error"]["code"]) == (413, "request_too_large")


async def test_an_upload_by_one_face_serves_the_other(gateway: Running) -> None:
    by_rest = (await gateway.http.post("/v1/media", content=PICTURE)).json()["media_ref"]
    source = {"image": gateway_pb2.MediaInput(media_ref=by_rest)}
    assert content(await gateway.generate(source)) == "ok"

    large = wav_file(tone(120.0))  # more than one message may hold by itself
    assert len(large) > 4 << 20

    async def chunks() -> AsyncIterator[gateway_pb2.UploadMediaRequest]:
        for offset in range(0, len(large), 1 << 20):
            yield gateway_pb2.UploadMediaRequest(data=large[offset : offset + (1 << 20)])

    by_rpc = await gateway.stub.UploadMedia(chunks())
    assert by_rpc.bytes == len(large) and by_rpc.expires_in_seconds == 3600
    url = f"media:{by_rpc.media_ref}"
    rest = await gateway.chat({"type": "audio_url", "audio_url": {"url": url}})
    assert rest.json()["usage"]["prompt_tokens_details"]["audio_tokens"] > 500


async def test_an_upload_is_found_under_its_own_salt(gateway: Running) -> None:
    async def chunks() -> AsyncIterator[gateway_pb2.UploadMediaRequest]:
        yield gateway_pb2.UploadMediaRequest(data=SOUND[:99], cache_salt="mine")
        yield gateway_pb2.UploadMediaRequest(data=SOUND[99:])

    reference = (await gateway.stub.UploadMedia(chunks())).media_ref
    part = {"audio": gateway_pb2.MediaInput(media_ref=reference)}
    assert content(await gateway.generate(part, cache_salt="mine")) == "ok"
    assert (await failure(gateway.generate(part))).reason is Reason.MEDIA_NOT_FOUND
    asked = gateway_pb2.CountTokensRequest(messages=[user(part)], cache_salt="mine")
    assert (await gateway.stub.CountTokens(asked)).prompt.audio_tokens == 4


async def test_an_upload_nobody_made_is_unknown(gateway: Running) -> None:
    unknown = "media_" + "0" * 64
    rest = await gateway.chat({"type": "image_url", "image_url": f"media:{unknown}"})
    error = rest.json()["error"]
    assert (rest.status_code, error["code"]) == (400, "media_not_found")
    assert error["param"] == "messages[0].content[0]"
    rpc = await failure(gateway.generate({"image": gateway_pb2.MediaInput(media_ref=unknown)}))
    assert (rpc.code, rpc.reason) == ("NOT_FOUND", Reason.MEDIA_NOT_FOUND)


async def test_a_wrong_digest_is_refused(gateway: Running) -> None:
    async def chunks() -> AsyncIterator[gateway_pb2.UploadMediaRequest]:
        yield gateway_pb2.UploadMediaRequest(data=PICTURE, sha256=b"0" * 32)

    error = await failure(gateway.stub.UploadMedia(chunks()))
    assert (error.reason, error.field) == (Reason.MEDIA_ENCODING, "sha256")


# ── leaving and draining ──


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_stops_the_decoder(gateway: Running, stream: bool) -> None:
    gateway.decoder.hold.clear()
    call = asyncio.create_task(gateway.chat("hi", stream=stream))
    await gateway.decoder.holding.wait()
    call.cancel()
    await asyncio.wait_for(gateway.decoder.cancelled.wait(), 10)


async def test_a_cancelled_call_stops_the_decoder(gateway: Running) -> None:
    gateway.decoder.hold.clear()
    call = gateway.stub.Generate(gateway_pb2.GenerateRequest(messages=[user("hi")]))
    async for response in call:
        if response.WhichOneof("event") == "delta":
            break
    await gateway.decoder.holding.wait()
    call.cancel()
    await asyncio.wait_for(gateway.decoder.cancelled.wait(), 10)


async def test_both_faces_drain_together_and_deliver_what_they_began(model: Path) -> None:
    async with running_gateway(model) as gateway:
        gateway.decoder.hold.clear()
        rest = asyncio.create_task(gateway.chat("hi", stream=True))
        await gateway.decoder.holding.wait()
        call = gateway.stub.Generate(gateway_pb2.GenerateRequest(messages=[user("hi")]))
        arriving = aiter(call)
        responses = [await anext(arriving) for _ in range(2)]
        assert (await gateway.http.get("/readyz")).status_code == 200

        gateway.stop.set()
        while (await gateway.http.get("/readyz")).status_code == 200:
            await asyncio.sleep(0)
        refused = await gateway.chat("hi")
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.json()["error"]["code"] == "service_unavailable"
        assert (await failure(gateway.generate("hi"))).reason is Reason.DRAINING
        assert not rest.done()

        gateway.decoder.hold.set()
        responses += [response async for response in arriving]
        assert content(responses) == "ok" and responses[-1].WhichOneof("event") == "summary"
        assert sse_chunks((await rest).content)[-1]["choices"][0]["finish_reason"] == "stop"
        await asyncio.wait_for(gateway.task, 30)
        assert gateway.metrics.value("mimo_drain_aborted_requests_total") == 0
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient() as late:
            await late.get(f"http://{gateway.addresses.rest}/healthz")


async def start_process(*flags: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "gateway", *flags)
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)


async def test_a_process_ends_with_0_on_sigterm(model: Path) -> None:
    process = await start_process(
        *("--model", str(model), "--store", "memory://", "--media-workers", "1"),
        *("--address", "127.0.0.1:0", "--rest-address", "127.0.0.1:0"),
        *("--vision", NOBODY, "--audio", NOBODY, "--llm", NOBODY),
    )
    try:
        assert process.stderr is not None
        entry: dict[str, Any] = {}
        while entry.get("message") != "REST ready":
            entry = json.loads(await process.stderr.readline())
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{entry['address']}/readyz")).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, rest = await process.communicate()
        assert process.returncode == 0, rest.decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


# ── starting ──


@pytest.mark.parametrize("face", ["rest", "grpc"])
async def test_an_address_in_use_is_named(gateway: Running, model: Path, face: str) -> None:
    config = GatewayConfig(
        model=str(model),
        rest_address=gateway.addresses.rest if face == "rest" else "127.0.0.1:0",
        address=gateway.addresses.grpc if face == "grpc" else "127.0.0.1:0",
        store="memory://",
        media_workers=1,
    )
    flag = "--rest-address" if face == "rest" else "--address"
    with pytest.raises(ConfigError, match=f"^{flag}: .* cannot be bound"):
        await run(config, Metrics("gateway"))


async def test_a_model_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--model"):
        await run(GatewayConfig(model=str(tmp_path)), Metrics("gateway"))


async def test_a_gateway_that_cannot_start_says_why_and_exits_with_1(tmp_path: Path) -> None:
    process = await start_process("--model", str(tmp_path))
    _, said = await process.communicate()
    assert process.returncode == 1
    (line,) = said.decode().splitlines()
    assert line.startswith("mimo-gateway: --model")


# ── vitals ──


async def start_replica(gate: DrainGate, address: str = "127.0.0.1:0") -> tuple[ServiceServer, str]:
    description = Description("llm", "0", "fake", "f", "float32", "cpu", 8, "float32")
    server = ServiceServer(Service(lambda _: None, (), description), gate)
    return server, await server.start(address)


async def test_upstreams_that_come_and_go_are_followed_without_a_call() -> None:
    metrics = Metrics("gateway")

    async def until(state: ReplicaState) -> None:
        name = "mimo_gateway_upstream_endpoints"
        while not metrics.value(name, component="llm", state=state):
            await asyncio.sleep(0.01)

    gate = DrainGate()
    server, address = await start_replica(gate)
    pool = ReplicaPool("llm", FixedTargets((address,)), metrics)
    following = [asyncio.create_task(each) for each in (pool.watch(), keep_acquainted([pool]))]
    await until(ReplicaState.READY)
    await gate.close_and_wait(0)
    await until(ReplicaState.DRAINING)
    await server.stop()
    await until(ReplicaState.FAILING)
    server, _ = await start_replica(DrainGate(), address)
    await until(ReplicaState.READY)
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    await pool.close()
    await server.stop()


async def test_metrics_tell_what_is_running(gateway: Running) -> None:
    async with httpx.AsyncClient() as client:
        url = f"http://{gateway.addresses.metrics}/metrics"
        text = (await client.get(url)).text
        while text.count('state="ready"} 1.0') < 3:
            await asyncio.sleep(0.05)
            text = (await client.get(url)).text
    for line in ('mimo_build_info{component="gateway"', "mimo_gateway_event_loop_lag_seconds"):
        assert line in text
