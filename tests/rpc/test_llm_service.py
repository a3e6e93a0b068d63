"""The decoder process on real gRPC: a tiny checkpoint from disk, an in-memory store."""

import asyncio
import json
import logging
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import save_file
from torch import Tensor

from mimo.errors import (
    CheckpointError,
    ConfigError,
    EmbeddingMismatch,
    EmbeddingMissing,
    Internal,
    InvalidRequest,
    MimoError,
    Overloaded,
    Reason,
    Unavailable,
    Unimplemented,
)
from mimo.metrics import LLM, Metrics
from mimo.nn.interop import from_torch
from mimo.rpc.channel import open_channel
from mimo.rpc.status import from_rpc_error
from mimo.rpc.tensors import chunk_to_proto, header_to_proto
from mimo.store import EmbeddingKey, Lookup, Manifest
from mimo.store.memory_store import MemoryStore
from mimo.tensor import split
from mimo.v1 import encoding_pb2, llm_pb2, llm_pb2_grpc, replica_pb2, replica_pb2_grpc
from models import tokenizer
from services.llm import __main__ as program
from services.llm import loading
from services.llm.memory import available_bytes
from services.llm.settings import LlmSettings
from tests.support import golden_decoder, tiny
from tests.support.serving import serving

GREEDY = golden_decoder.golden()["variants"]["chain_vis7"]["greedy"]
IMAGES, AUDIO = (rows.float() for rows in golden_decoder.media_rows().split((3, 2)))
KEYS = [EmbeddingKey("a" * 64), EmbeddingKey("b" * 64)]
FINGERPRINT = "f" * 64


@dataclass
class Running:
    stub: "llm_pb2_grpc.LanguageModelAsyncStub"
    replica: "replica_pb2_grpc.ReplicaAsyncStub"
    store: MemoryStore
    metrics: Metrics

    async def put(self, index: int, rows: Tensor, fingerprint: str = FINGERPRINT) -> Manifest:
        tensor = from_torch(rows)
        manifest = Manifest.describe(
            KEYS[index], tensor, encoder_fingerprint=fingerprint, encode_ms=1.0
        )
        await self.store.put(manifest, tensor, replace=True)
        return manifest

    async def put_all(self) -> list[Manifest]:
        return [await self.put(0, IMAGES), await self.put(1, AUDIO)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "toy"
    directory.mkdir()
    config = golden_decoder.config("chain_vis7") | {
        "max_position_embeddings": 256,
        "image_token_id": golden_decoder.IMAGE_PAD,
        "processor_config": {"audio_token_id": golden_decoder.AUDIO_PAD},
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor.float().contiguous()
        for name, tensor in golden_decoder.weights("chain_vis7").items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def spelling_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    vocabulary = tokenizer.build()
    size = vocabulary.get_vocab_size()
    directory = tiny.write_decoder(tmp_path_factory.mktemp("spelling"), vocab_size=size)
    vocabulary.save(str(directory / "tokenizer.json"))
    end = {"eos_token_id": [vocabulary.token_to_id("<|im_end|>")]}
    (directory / "generation_config.json").write_text(json.dumps(end))
    return directory


@pytest.fixture
async def running(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    """The parameter, if any, names the checkpoint."""
    checkpoint = request.getfixturevalue(getattr(request, "param", "checkpoint"))
    async with serving_decoder(monkeypatch, settings_of(checkpoint)) as running:
        yield running


def settings_of(checkpoint: Path, **changes: Any) -> LlmSettings:
    values = {"block_size": 4, "kv_memory_mib": 8, "max_running": 8, "max_step_tokens": 32}
    return LlmSettings(model=str(checkpoint), device="cpu", **values | changes)


@asynccontextmanager
async def serving_decoder(
    monkeypatch: pytest.MonkeyPatch, settings: LlmSettings
) -> AsyncIterator[Running]:
    store = MemoryStore()
    monkeypatch.setattr(program, "open_store", lambda url, metrics: store)
    metrics = Metrics(LLM)
    async with (
        serving(settings, metrics, program.llm_service) as address,
        open_channel(address) as channel,
    ):
        stub = llm_pb2_grpc.LanguageModelStub(channel)
        yield Running(stub, replica_pb2_grpc.ReplicaStub(channel), store, metrics)


def sampling(**changes: Any) -> llm_pb2.Sampling:
    values = {"max_tokens": 12, "top_p": 1.0, "repetition_penalty": 1.0, **changes}
    return llm_pb2.Sampling(**values)


def item(index: int, state: int = llm_pb2.ITEM_STATE_STORED, **changes: Any) -> llm_pb2.MediaItem:
    modality = (encoding_pb2.MODALITY_IMAGE, encoding_pb2.MODALITY_AUDIO)[index]
    values = {
        "modality": modality,
        "key": KEYS[index],
        "embedding": header_to_proto("float32", ((3, 2)[index], 32)),
        "state": state,
        "encoder_fingerprint": FINGERPRINT,
        **changes,
    }
    return llm_pb2.MediaItem(**values)


def golden_start(**changes: Any) -> llm_pb2.GenerateTokensRequest:
    spans = [(1, 4, 1, 0), (0, 5, 2, 0), (1, 11, 1, 1), (0, 12, 1, 2)]
    values = {
        "prompt_ids": golden_decoder.prompt_ids().tolist(),
        "items": [item(0), item(1)],
        "spans": [
            llm_pb2.Span(item_index=i, prompt_offset=offset, length=length, row_offset=row)
            for i, offset, length, row in spans
        ],
        "sampling": sampling(),
        **changes,
    }
    return llm_pb2.GenerateTokensRequest(start=llm_pb2.GenerateTokensStart(**values))


def text_start(prompt_ids: Sequence[int] = (3, 10, 17), **changes: Any) -> Any:
    return golden_start(**{"prompt_ids": prompt_ids, "items": [], "spans": [], **changes})


def ready(index: int, digest: bytes = b"") -> llm_pb2.GenerateTokensRequest:
    message = llm_pb2.ItemReady(item_index=index, manifest_digest=digest)
    return llm_pb2.GenerateTokensRequest(item_ready=message)


def chunks(index: int, rows: Tensor, chunk_bytes: int = 100) -> list[llm_pb2.GenerateTokensRequest]:
    return [
        llm_pb2.GenerateTokensRequest(
            item_chunk=llm_pb2.ItemChunk(item_index=index, chunk=chunk_to_proto(chunk))
        )
        for chunk in split(from_torch(rows), chunk_bytes)
    ]


async def generate(running: Running, *messages: Any) -> list[llm_pb2.GenerateTokensResponse]:
    return [response async for response in running.stub.GenerateTokens(iter(messages))]


def ids_of(responses: Sequence[llm_pb2.GenerateTokensResponse]) -> list[int]:
    return [token_id for response in responses for token_id in response.tokens.ids]


async def failure(running: Running, *messages: Any) -> MimoError:
    with pytest.raises(grpc.RpcError) as caught:
        await generate(running, *messages)
    return from_rpc_error(caught.value)


async def test_stored_items_give_the_golden_continuation(running: Running) -> None:
    await running.put_all()
    responses = await generate(running, golden_start())
    assert [response.WhichOneof("event") for response in responses[:2]] == ["started", "tokens"]
    assert ids_of(responses) == GREEDY
    finished = responses[-1].finished
    assert finished.reason == llm_pb2.FINISH_REASON_LENGTH
    assert (finished.prompt_tokens, finished.completion_tokens) == (20, 12)
    assert sum(finished.accepted) > 0
    assert finished.first_token_ms > 0
    description = await running.replica.Describe(replica_pb2.DescribeRequest())
    assert responses[0].started.fingerprint == description.fingerprint
    assert description.hidden_size == 32


async def test_token_events_are_numbered_without_gaps(running: Running) -> None:
    responses = await generate(running, text_start(sampling=sampling(max_tokens=30)))
    position = 0
    for tokens in (response.tokens for response in responses if response.HasField("tokens")):
        assert tokens.first_index == position
        position += len(tokens.ids)
    assert position == 30


async def test_speculation_off_changes_no_token(running: Running) -> None:
    await running.put_all()
    responses = await generate(running, golden_start(speculation={"enabled": False}))
    assert ids_of(responses) == GREEDY
    assert not responses[-1].finished.drafted


async def test_pending_and_inline_items_arrive_in_any_order(running: Running) -> None:
    manifest = await running.put(0, IMAGES)
    items = [item(0, llm_pb2.ITEM_STATE_PENDING), item(1, llm_pb2.ITEM_STATE_INLINE)]
    first = [*chunks(1, AUDIO), ready(0, manifest.digest)]
    second = [ready(0, manifest.digest), *chunks(1, AUDIO)]
    for messages in (first, second):
        assert ids_of(await generate(running, golden_start(items=items), *messages)) == GREEDY


async def test_started_is_sent_while_an_item_is_still_missing(running: Running) -> None:
    manifests = await running.put_all()
    call = running.stub.GenerateTokens()
    await call.write(golden_start(items=[item(0, llm_pb2.ITEM_STATE_PENDING), item(1)]))
    assert (await call.read()).HasField("started")
    await call.write(ready(0, manifests[0].digest))
    await call.done_writing()
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    assert ids_of(responses) == GREEDY


async def test_a_resumed_call_continues_where_the_first_broke_off(running: Running) -> None:
    await running.put_all()
    options = {"sampling": sampling(temperature=1.0, seed=7, top_p=0.9)}
    whole = ids_of(await generate(running, golden_start(**options)))
    resumed = await generate(running, golden_start(prior_output_ids=whole[:5], **options))
    assert ids_of(resumed) == whole[5:]
    assert resumed[1].tokens.first_index == 5
    assert resumed[-1].finished.completion_tokens == 12
    over = await generate(running, golden_start(prior_output_ids=whole, **options))
    assert [response.WhichOneof("event") for response in over] == ["finished"]


async def test_a_repeated_prompt_comes_from_the_cache_unless_told_otherwise(
    running: Running,
) -> None:
    await running.put_all()
    policies = [{}, {}, {"cache": {"prefix": False}}, {"cache_salt": b"another tenant"}]
    answers = [await generate(running, golden_start(**policy)) for policy in policies]
    assert all(ids_of(responses) == GREEDY for responses in answers)
    assert [responses[0].started.cached_tokens for responses in answers] == [0, 16, 0, 0]
    assert [responses[-1].finished.cached_tokens for responses in answers] == [0, 16, 0, 0]
    cached = running.metrics.value("mimo_llm_prompt_tokens_total", source="cached")
    computed = running.metrics.value("mimo_llm_prompt_tokens_total", source="computed")
    assert (cached, computed) == (16, 4 * 20 - 16)
    assert running.metrics.value("mimo_llm_kv_blocks", pool="full", state="cached") > 0


async def test_choices_of_one_seed_differ_and_repeat(running: Running) -> None:
    def start(choice: int) -> Any:
        return text_start(sampling=sampling(temperature=1.5, seed=3), choice_index=choice)

    answers = [ids_of(await generate(running, start(choice))) for choice in (0, 1, 0)]
    assert answers[0] == answers[2] != answers[1]


async def test_a_stop_id_is_output_and_named(running: Running) -> None:
    await running.put_all()
    responses = await generate(running, golden_start(sampling=sampling(stop_token_ids=[GREEDY[4]])))
    assert ids_of(responses) == GREEDY[:5]
    finished = responses[-1].finished
    assert finished.reason == llm_pb2.FINISH_REASON_STOP
    assert finished.stop_token_id == GREEDY[4]
    ignored = sampling(stop_token_ids=[GREEDY[4]], ignore_stop=True)
    assert ids_of(await generate(running, golden_start(sampling=ignored))) == GREEDY


async def test_logprobs_come_with_each_token(running: Running) -> None:
    responses = await generate(running, text_start(sampling=sampling(num_logprobs=2)))
    for tokens in (response.tokens for response in responses if response.HasField("tokens")):
        assert len(tokens.logprobs) == len(tokens.ids)
        for logprobs in tokens.logprobs:
            assert len(logprobs.top_ids) == 2
            best, second = logprobs.top_logprobs
            assert 0 > best >= second
            assert best >= logprobs.logprob


async def test_an_absent_entry_names_the_item(running: Running) -> None:
    await running.put(0, IMAGES)
    error = await failure(running, golden_start())
    assert isinstance(error, EmbeddingMissing)
    assert error.metadata["item_index"] == "1"


@pytest.mark.parametrize(
    ("change", "which"),
    [
        ({"manifest_digest": b"\x01" * 32}, "manifest"),
        ({"encoder_fingerprint": "0" * 64}, "encoder_fingerprint"),
        ({"embedding": header_to_proto("bfloat16", (2, 32))}, "dtype"),
    ],
)
async def test_an_entry_that_is_not_what_was_announced_names_the_difference(
    running: Running, change: dict[str, Any], which: str
) -> None:
    await running.put_all()
    error = await failure(running, golden_start(items=[item(0), item(1, **change)]))
    assert isinstance(error, EmbeddingMismatch)
    assert (error.metadata["item_index"], error.metadata["which"]) == ("1", which)


async def test_an_entry_of_another_length_is_a_mismatch(running: Running) -> None:
    await running.put_all()
    await running.put(0, IMAGES[:2])
    error = await failure(running, golden_start())
    assert isinstance(error, EmbeddingMismatch)
    assert error.metadata["which"] == "shape"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.MEDIA_CORRUPT, InvalidRequest),
        (Reason.REQUEST_TOO_LARGE, InvalidRequest),
        (Reason.DRAINING, Unavailable),
        (Reason.UPSTREAM_LOST, Unavailable),
        (Reason.OVERLOADED, Overloaded),
        (Reason.CAPACITY, Overloaded),
        (Reason.CONCURRENCY, Overloaded),
        (Reason.EMBEDDING_MISSING, EmbeddingMissing),
        (Reason.INTERNAL, Internal),
    ],
)
async def test_an_item_that_fails_elsewhere_ends_the_request_with_its_reason(
    running: Running, reason: Reason, kind: type[MimoError]
) -> None:
    await running.put(1, AUDIO)
    failed = llm_pb2.ItemFailed(item_index=0, reason=reason, message="not a picture")
    error = await failure(
        running,
        golden_start(items=[item(0, llm_pb2.ITEM_STATE_PENDING), item(1)]),
        llm_pb2.GenerateTokensRequest(item_failed=failed),
    )
    assert type(error) is kind
    assert (error.reason, error.message) == (reason, "not a picture")


async def test_a_reason_that_nobody_knows_blames_nobody_outside(running: Running) -> None:
    await running.put(1, AUDIO)
    failed = llm_pb2.ItemFailed(item_index=0, reason="BAD_WEATHER")
    error = await failure(
        running,
        golden_start(items=[item(0, llm_pb2.ITEM_STATE_PENDING), item(1)]),
        llm_pb2.GenerateTokensRequest(item_failed=failed),
    )
    assert isinstance(error, Internal)


async def test_a_bug_while_an_item_is_taken_in_ends_the_request_and_is_logged(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await running.put(1, AUDIO)
    get = running.store.get

    async def get_or_break(key: EmbeddingKey) -> Lookup:
        if key == KEYS[0]:
            raise ZeroDivisionError
        return await get(key)

    monkeypatch.setattr(running.store, "get", get_or_break)
    start = golden_start(items=[item(0, llm_pb2.ITEM_STATE_PENDING), item(1)])
    with caplog.at_level(logging.ERROR):
        error = await failure(running, start, ready(0))
    assert isinstance(error, Internal)
    logged = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert ZeroDivisionError in logged


async def test_a_call_that_never_sends_its_item_ends(running: Running) -> None:
    await running.put(1, AUDIO)
    error = await failure(
        running, golden_start(items=[item(0, llm_pb2.ITEM_STATE_PENDING), item(1)])
    )
    assert isinstance(error, EmbeddingMissing)


async def test_a_damaged_chunk_is_the_callers_fault(running: Running) -> None:
    await running.put(1, AUDIO)
    (message,) = chunks(0, IMAGES)[:1]
    message.item_chunk.chunk.crc32c ^= 1
    start = golden_start(items=[item(0, llm_pb2.ITEM_STATE_INLINE), item(1)])
    assert isinstance(await failure(running, start, message), InvalidRequest)


def _without_spans(start: llm_pb2.GenerateTokensStart) -> None:
    del start.spans[:]


def _overlapping(start: llm_pb2.GenerateTokensStart) -> None:
    start.spans[1].prompt_offset = 4


def _off_the_pads(start: llm_pb2.GenerateTokensStart) -> None:
    start.spans[0].prompt_offset = 3


def _pad_left_over(start: llm_pb2.GenerateTokensStart) -> None:
    start.prompt_ids[0] = golden_decoder.IMAGE_PAD


def _row_beyond(start: llm_pb2.GenerateTokensStart) -> None:
    start.spans[3].row_offset = 3


def _image_row_unused(start: llm_pb2.GenerateTokensStart) -> None:
    start.items[0].embedding.shape[0] = 4


def _wrong_width(start: llm_pb2.GenerateTokensStart) -> None:
    start.items[0].embedding.shape[1] = 31


def _unknown_item(start: llm_pb2.GenerateTokensStart) -> None:
    start.spans[0].item_index = 2


def _unknown_id(start: llm_pb2.GenerateTokensStart) -> None:
    start.prompt_ids[0] = 61


def _no_tokens_wanted(start: llm_pb2.GenerateTokensStart) -> None:
    start.sampling.max_tokens = 0


def _bias_beyond(start: llm_pb2.GenerateTokensStart) -> None:
    start.sampling.logit_bias[61] = 1.0


@pytest.mark.parametrize(
    "spoil",
    [
        _without_spans,
        _overlapping,
        _off_the_pads,
        _pad_left_over,
        _row_beyond,
        _image_row_unused,
        _wrong_width,
        _unknown_item,
        _unknown_id,
        _no_tokens_wanted,
        _bias_beyond,
    ],
)
async def test_a_contradictory_start_is_refused(
    running: Running, spoil: Callable[[llm_pb2.GenerateTokensStart], None]
) -> None:
    await running.put_all()
    message = golden_start()
    spoil(message.start)
    assert isinstance(await failure(running, message), InvalidRequest)


async def test_a_prompt_beyond_the_context_says_the_limit(running: Running) -> None:
    error = await failure(running, text_start([1] * 256))
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert error.metadata["limit"] == "256"


@pytest.mark.parametrize("running", ["spelling_checkpoint"], indirect=True)
async def test_a_grammar_shapes_the_answer_and_ends_it(running: Running) -> None:
    start = text_start(grammar={"regex": "(red|green) [0-9]{4}"}, sampling=sampling(max_tokens=40))
    responses = await generate(running, start)
    answer = tokenizer.build().decode(ids_of(responses))
    assert re.fullmatch("(red|green) [0-9]{4}", answer)
    finished = responses[-1].finished
    assert finished.reason == llm_pb2.FINISH_REASON_STOP
    assert not finished.HasField("stop_token_id")
    start.start.prior_output_ids.extend(ids_of(responses)[:3])
    assert ids_of(await generate(running, start)) == ids_of(responses)[3:]
    start.start.prior_output_ids[0] = tokenizer.build().token_to_id("x")
    assert (await failure(running, start)).field == "prior_output_ids"


@pytest.mark.parametrize("running", ["spelling_checkpoint"], indirect=True)
async def test_a_grammar_that_makes_no_sense_is_refused(running: Running) -> None:
    error = await failure(running, text_start(grammar={"json_schema": '{"not": {}}'}))
    assert (error.reason, error.field) == (Reason.GRAMMAR_INVALID, "grammar")


async def test_without_a_tokenizer_there_are_no_grammars(running: Running) -> None:
    assert isinstance(await failure(running, text_start(grammar={"regex": "a"})), Unimplemented)


async def test_the_first_message_must_be_a_start(running: Running) -> None:
    assert isinstance(await failure(running, ready(0)), InvalidRequest)


async def test_a_cancelled_call_frees_its_blocks(running: Running) -> None:
    call = running.stub.GenerateTokens(iter([text_start(sampling=sampling(max_tokens=250))]))
    await call.read()
    call.cancel()
    await generate(running, text_start())
    await generate(running, text_start())
    assert running.metrics.value("mimo_llm_requests_finished_total", reason="abort") == 1
    assert running.metrics.value("mimo_llm_requests", state="running") == 0


async def test_many_calls_at_once_answer_as_one_by_one(running: Running) -> None:
    starts = [text_start([n, 2 * n], sampling=sampling(max_tokens=20)) for n in range(1, 20)]
    alone = [ids_of(await generate(running, start)) for start in starts]
    together = await asyncio.gather(*(generate(running, start) for start in starts))
    assert [ids_of(responses) for responses in together] == alone


async def test_load_is_watched(running: Running) -> None:
    async for load in running.replica.WatchLoad(replica_pb2.WatchLoadRequest()):
        assert load.predicted_wait_seconds == 0
        assert not load.draining
        break


async def test_embeddings_beyond_the_pool_are_refused(running: Running, checkpoint: Path) -> None:
    size = (1 << 29) // 128 + 1
    error = await failure(
        running,
        golden_start(items=[item(0), item(1, embedding=header_to_proto("float32", (size, 32)))]),
    )
    assert isinstance(error, Overloaded)
    assert error.reason is Reason.CAPACITY


async def test_what_each_request_receives_itself_is_counted_for_each(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = AUDIO[:1].expand(6000, -1).contiguous()  # more than half of the pool
    start = golden_start(
        prompt_ids=[golden_decoder.AUDIO_PAD, 3, *[golden_decoder.IMAGE_PAD] * 3],
        items=[
            item(0, llm_pb2.ITEM_STATE_PENDING),
            item(1, llm_pb2.ITEM_STATE_PENDING, embedding=header_to_proto("float32", (6000, 32))),
        ],
        spans=[
            llm_pb2.Span(item_index=1, length=1),
            llm_pb2.Span(item_index=0, prompt_offset=2, length=3),
        ],
    )
    messages = [start, *chunks(1, sound, 1 << 20)]
    settings = settings_of(checkpoint, embedding_pool_mib=1)
    async with serving_decoder(monkeypatch, settings) as running:
        call = running.stub.GenerateTokens()
        for message in messages:
            await call.write(message)
        assert (await call.read()).HasField("started")  # its sound has arrived, its picture has not
        error = await failure(running, *messages)
        assert isinstance(error, Overloaded)
        assert error.reason is Reason.OVERLOADED
        call.cancel()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0", "model": 3}'),
        ("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'),
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "<|im_end|>"}'),
        ("generation_config.json", '{"eos_token_id": [1, null]}'),
        ("generation_config.json", '{"eos_token_id": 1000000}'),
    ],
)
def test_a_damaged_file_of_the_model_is_named(
    spelling_checkpoint: Path, tmp_path: Path, name: str, content: str
) -> None:
    directory = shutil.copytree(spelling_checkpoint, tmp_path / "damaged")
    (directory / name).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(str(directory / name))):
        loading.load(settings_of(directory), Metrics(LLM))


def test_a_model_that_cannot_fit_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LlmSettings(model=str(checkpoint), device="cpu", kv_memory_mib=64)
    monkeypatch.setattr(loading, "available_bytes", lambda device: 1000)
    with pytest.raises(CheckpointError, match="GiB"):
        loading.load(settings, Metrics(LLM))
    monkeypatch.setattr(loading, "available_bytes", lambda device: 10 << 20)
    with pytest.raises(ConfigError, match="--kv-memory-mib 64"):
        loading.load(settings, Metrics(LLM))


def test_host_memory_is_known() -> None:
    assert 0 < available_bytes("cpu") < 1 << 50
