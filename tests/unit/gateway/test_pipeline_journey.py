"""The pipeline from a request to its events, over fake leaves behind real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from gateway.attempts import MAX_ATTEMPTS
from gateway.backends.replica import ReportedLoad
from gateway.conversation import Conversation, Message, Role, TextPart
from gateway.generation import (
    CachePolicy,
    ChoiceFinished,
    Delta,
    EmbeddingCache,
    FinishReason,
    GenerationRequest,
    ItemReady,
    PromptUsage,
    SamplingParams,
    SpeculationReport,
    TextKind,
)
from gateway.held import HeldBytes, Hold
from gateway.items import MediaOptions, MediaPart, MediaUrl, Modality
from gateway.media.workers import WorkerPool
from gateway.model import Model
from gateway.pipeline import Pipeline
from mimo.errors import (
    DeadlineExceeded,
    EmbeddingMissing,
    InvalidRequest,
    MimoError,
    NotFound,
    Overloaded,
    Reason,
    Unavailable,
)
from mimo.store import Outcome, parse_key
from mimo.store.memory_store import MemoryStore
from mimo.v1 import llm_pb2
from tests.support import byte_model as ids
from tests.support.gateway_stack import Stack, ask, open_stack, started, summary, text
from tests.support.media import gradient, image_file, numbered_frames, tone, video_file, wav_file

# Media workers take a second to start: one pool for the module, in the module's loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PICTURE = image_file(gradient(32, 64))  # two tokens
SOUND = wav_file(tone(0.5))  # 12000 samples, 51 mel frames, 4 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = tmp_path_factory.mktemp("model")
    return Model.open(ids.write(directory), "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(2)
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.attempts.PAUSE_S", 0.0)


@pytest_asyncio.fixture(loop_scope="module")
async def stack(model: Model, workers: WorkerPool) -> AsyncIterator[Stack]:
    async with open_stack(model, workers) as opened:
        yield opened


def outcomes(stack_events: object) -> list[Outcome | None]:
    return [item.cache for item in summary(stack_events).items]  # type: ignore[arg-type]


# ── text ──


async def test_text_alone_needs_no_encoder(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers, down=["vision", "audio"]) as stack:
        events = await stack.run(ask("Hi"))
    assert text(events) == "ok"
    # im_start, "user\nHi", im_end, im_start, "assistant\n", think, end of think
    assert started(events).prompt == PromptUsage(text_tokens=1 + 7 + 1 + 1 + 10 + 2)
    assert events[-2] == ChoiceFinished(0, FinishReason.STOP)
    done = summary(events)
    assert (done.completion_tokens, done.reasoning_tokens) == (3, 0)
    assert done.prompt.cached_tokens == 3
    assert done.speculation == SpeculationReport((3, 2), (2, 1))
    assert done.model_fingerprint == "llm"


async def test_the_decoder_gets_ids_defaults_and_bans(stack: Stack) -> None:
    await stack.run(ask("Hi", tenant_salt=b"salt", priority=3))
    (start,) = stack.decoders[0].starts
    assert bytes(start.prompt_ids[1:8]) == b"user\nHi"
    assert start.sampling.temperature == 0
    assert start.sampling.max_tokens == 256
    assert start.sampling.repetition_penalty == 1
    assert list(start.sampling.stop_token_ids) == [ids.END_OF_TEXT, ids.IM_END]
    assert {ids.IMAGE_PAD, ids.IM_START, ids.TOOL_RESPONSE} <= set(start.sampling.banned_token_ids)
    assert not start.sampling.HasField("num_logprobs")
    assert (start.cache_salt, start.priority, start.cache.prefix) == (b"salt", 3, True)
    assert not start.speculation.HasField("enabled")


async def test_a_seed_is_drawn_when_none_is_given(stack: Stack) -> None:
    await stack.run(ask("Hi"))
    await stack.run(ask("Hi", sampling=SamplingParams(seed=7)))
    assert stack.decoders[0].starts[0].sampling.seed > 0
    assert stack.decoders[0].starts[1].sampling.seed == 7


async def test_max_tokens_is_what_the_context_leaves(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers, limits={"max_context_tokens": 30}) as stack:
        await stack.run(ask("Hi", sampling=SamplingParams(max_tokens=100)))
        assert stack.decoders[0].starts[0].sampling.max_tokens == 30 - 22


async def test_min_tokens_moves_the_default_end_but_not_the_contexts(
    model: Model, workers: WorkerPool
) -> None:
    assert model.defaults.max_tokens < 300
    async with open_stack(model, workers, limits={"max_context_tokens": 400}) as stack:
        await stack.run(ask("hi", sampling=SamplingParams(min_tokens=300)))
        sent = stack.decoders[0].starts[-1].sampling
        assert (sent.min_tokens, sent.max_tokens) == (300, 300)
        with pytest.raises(InvalidRequest, match="has room for") as caught:
            await stack.run(ask("hi", sampling=SamplingParams(min_tokens=400)))
        assert caught.value.field == "min_tokens"
        assert len(stack.decoders[0].starts) == 1


async def test_choices_run_on_one_replica_with_one_seed(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers, num_decoders=3) as stack:
        events = await stack.run(ask("Hi", n=3))
        starts = [start for decoder in stack.decoders for start in decoder.starts]
        busy = [decoder for decoder in stack.decoders if decoder.starts]
    assert len(busy) == 1
    assert sorted(start.choice_index for start in starts) == [0, 1, 2]
    assert len({start.sampling.seed for start in starts}) == 1
    assert [text(events, choice) for choice in range(3)] == ["ok"] * 3
    assert summary(events).completion_tokens == 9


async def test_reasoning_is_split_and_counted(model: Model, workers: WorkerPool) -> None:
    script = [[ids.THINK, *b"hm"], [ids.END_THINK, *b"ok", ids.IM_END]]
    async with open_stack(model, workers, script=script) as stack:
        message = Message(Role.USER, (TextPart("Hi"),))
        request = GenerationRequest("r", Conversation((message,), thinking=True))
        events = await stack.run(request)
    assert text(events, kind=TextKind.REASONING) == "hm"
    assert text(events) == "ok"
    assert summary(events).reasoning_tokens == 2
    assert summary(events).completion_tokens == 7


async def test_a_stop_string_cancels_the_call(model: Model, workers: WorkerPool) -> None:
    script = [[*b"one,two"], [*b"three"]]
    async with open_stack(model, workers, script=script) as stack:
        stack.decoders[0].hold.clear()
        events = await stack.run(ask("Hi", stop=(",t",)))
        await asyncio.wait_for(stack.decoders[0].cancelled.wait(), 5)
    assert text(events) == "one"
    assert events[-2] == ChoiceFinished(0, FinishReason.STOP, stop_string=",t")
    assert summary(events).completion_tokens == len("one,t")


async def test_the_end_at_max_tokens_is_length(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers, script=[[*b"abc"]]) as stack:
        events = await stack.run(ask("Hi"))
    assert events[-2] == ChoiceFinished(0, FinishReason.LENGTH)


async def test_only_stop_ids_the_client_named_are_reported(
    model: Model, workers: WorkerPool
) -> None:
    async with open_stack(model, workers, script=[[*b"a!"]]) as stack:
        events = await stack.run(ask("Hi", stop_token_ids=(ord("!"),)))
    assert events[-2] == ChoiceFinished(0, FinishReason.STOP, stop_token_id=ord("!"))


async def test_logprobs_and_ids_arrive_when_asked_for(stack: Stack) -> None:
    events = await stack.run(ask("Hi", top_logprobs=1, return_token_ids=True))
    deltas = [event for event in events if isinstance(event, Delta)]
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert [(entry.token, entry.logprob, len(entry.top)) for entry in logprobs] == [
        (b"o", -0.5, 1),
        (b"k", -0.5, 1),
    ]
    assert [id for delta in deltas for id in delta.token_ids] == [*b"ok", ids.IM_END]


async def test_closing_the_stream_cancels_the_decoder(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers) as stack:
        stack.decoders[0].hold.clear()
        async with aclosing(stack.pipeline.generate(ask("Hi"))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        await asyncio.wait_for(stack.decoders[0].cancelled.wait(), 5)


# ── refused before any work ──


async def test_an_over_long_prompt_never_reaches_an_encoder(
    model: Model, workers: WorkerPool
) -> None:
    async with open_stack(model, workers, limits={"max_context_tokens": 28}) as stack:
        with pytest.raises(InvalidRequest) as caught:
            await stack.run(ask("Hi", PICTURE, SOUND))
        assert stack.vision[0].targets == stack.audio.targets == stack.decoders[0].starts == []
    error = caught.value
    assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "messages")
    # 22 as above, two delimiters each; 2 tokens of picture, 4 of sound
    expected = {"limit": "28", "text": "26", "image": "2", "video": "0", "audio": "4"}
    assert error.metadata == expected


async def test_media_without_an_encoder_names_the_modality(
    model: Model, workers: WorkerPool
) -> None:
    async with open_stack(model, workers, down=["vision"]) as stack:
        with pytest.raises(Unavailable, match="image input is unavailable") as caught:
            await stack.run(ask(MediaPart(Modality.IMAGE, PICTURE)))
        assert caught.value.metadata["modality"] == "image"
        assert stack.media_decoder.jobs == []
        # What the client left open is known only after planning.
        with pytest.raises(Unavailable, match="image input is unavailable"):
            await stack.run(ask(PICTURE))
        assert text(await stack.run(ask(SOUND))) == "ok"


async def test_no_decoder_is_unavailable(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers, down=["llm"]) as stack:
        with pytest.raises(Unavailable, match="no language model"):
            await stack.run(ask(PICTURE))
        assert stack.media_decoder.jobs == stack.vision[0].targets == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sampling": SamplingParams(logit_bias={ids.IMAGE_PAD: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(logit_bias={100_000: 1.0})}, "logit_bias"),
        ({"stop_token_ids": (100_000,)}, "stop_token_ids"),
    ],
)
async def test_unknown_and_reserved_ids_are_refused(
    stack: Stack, options: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await stack.run(ask("Hi", **options))
    assert caught.value.field == field


async def test_a_broken_picture_names_its_part(stack: Stack) -> None:
    broken = PICTURE[: len(PICTURE) // 2]
    with pytest.raises(InvalidRequest) as caught:
        await stack.run(ask("a", PICTURE, broken))
    assert caught.value.field == "messages[0].content[2]"
    assert stack.vision[0].targets == []


async def test_a_text_only_model_refuses_media(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers) as stack:
        pipeline = Pipeline(model, stack.pools["llm"], None, stack.metrics)
        stack.pipeline = pipeline
        assert text(await stack.run(ask("Hi"))) == "ok"
        with pytest.raises(InvalidRequest) as caught:
            await stack.run(ask(MediaPart(Modality.IMAGE, PICTURE)))
    assert caught.value.reason is Reason.MEDIA_MODALITY


async def test_too_many_items_are_refused_before_they_are_read(stack: Stack) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await stack.run(ask(*[PICTURE] * 65))
    assert caught.value.reason is Reason.TOO_MANY_MEDIA
    assert stack.media_decoder.jobs == []


async def test_an_unknown_upload_is_not_found(stack: Stack) -> None:
    reference = "media:media_" + "0" * 64
    with pytest.raises(NotFound) as caught:
        await stack.run(ask(MediaPart(None, MediaUrl(reference))))
    assert caught.value.reason is Reason.MEDIA_NOT_FOUND
    assert caught.value.field == "messages[0].content[0]"


async def test_counting_plans_and_needs_nobody(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers, down=["vision", "audio", "llm"]) as stack:
        counted = await stack.pipeline.count(ask("Hi", PICTURE))
    assert counted.prompt == PromptUsage(text_tokens=24, image_tokens=2)
    assert [(item.modality, item.tokens) for item in counted.items] == [(Modality.IMAGE, 2)]


# ── embeddings ──


async def test_a_picture_is_encoded_once_and_then_found(stack: Stack) -> None:
    first = await stack.run(ask("Look: ", PICTURE))
    assert outcomes(first) == [Outcome.MISS]
    (item,) = summary(first).items
    assert (item.tokens, item.encode_ms, item.bytes) == (2, 5.0, len(PICTURE))
    assert [event.item for event in first if isinstance(event, ItemReady)] == [item]
    assert stack.media_decoder.jobs == ["plan", "decode_image"]

    second = await stack.run(ask("Look again: ", PICTURE))
    assert outcomes(second) == [Outcome.HIT]
    assert len(stack.vision[0].targets) == 1
    # The plan was remembered with the picture's digest: nothing is decoded.
    assert stack.media_decoder.jobs == ["plan", "decode_image"]
    assert text(second) == "ok"


async def test_the_encoder_gets_the_pixels_at_source_size(stack: Stack) -> None:
    await stack.run(ask(PICTURE))
    (upload,) = stack.vision[0].uploads
    assert (upload.dtype, upload.shape) == ("uint8", (1, 32, 64, 3))
    assert bytes(upload.data) == gradient(32, 64).tobytes()


class HoldingFetcher:
    """Has the picture at once, and says what it takes in memory."""

    async def fetch(self, url: str, *, hold: Hold, **_: object) -> bytes:
        hold(len(PICTURE))
        return PICTURE


async def test_what_is_fetched_counts_until_the_answer_is_over(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = stack.pipeline._media
    assert media is not None
    monkeypatch.setattr(media.planner, "_fetcher", HoldingFetcher())
    monkeypatch.setattr(stack.pipeline, "_memory", HeldBytes(len(PICTURE) * 3 // 2))
    request = ask(MediaPart(Modality.IMAGE, MediaUrl("https://example.org/a.png")))
    async with aclosing(stack.pipeline.generate(request)) as events:
        await anext(events)
        with pytest.raises(Overloaded):
            await stack.run(request)
    assert await stack.run(request)
    assert (await stack.pipeline.count(request)).prompt.image_tokens == 2
    two = ask(*(MediaPart(Modality.IMAGE, MediaUrl("https://example.org/a.png")),) * 2)
    with pytest.raises(InvalidRequest) as caught:
        await stack.run(two)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


async def test_equal_pixels_in_two_files_share_an_embedding(stack: Stack) -> None:
    await stack.run(ask(PICTURE))
    events = await stack.run(ask(image_file(gradient(32, 64), "BMP")))
    assert outcomes(events) == [Outcome.HIT]
    assert len(stack.vision[0].targets) == 1


async def test_another_size_of_the_same_picture_is_another_embedding(stack: Stack) -> None:
    await stack.run(ask(PICTURE))
    large = MediaPart(None, PICTURE, MediaOptions(min_pixels=32 * 32 * 8))
    assert outcomes(await stack.run(ask(large))) == [Outcome.MISS]


async def test_a_plan_outlives_the_encoder_it_was_made_with(
    model: Model, workers: WorkerPool
) -> None:
    store = MemoryStore()
    async with open_stack(model, workers, store=store) as stack:
        await stack.run(ask(PICTURE))
    async with open_stack(model, workers, store=store, fingerprint="next") as stack:
        assert outcomes(await stack.run(ask(PICTURE))) == [Outcome.MISS]
        assert stack.media_decoder.jobs == ["decode_image"]
        assert stack.vision[0].targets[0].encoder_fingerprint == "next"


async def test_dispatched_work_is_counted_once(stack: Stack) -> None:
    await stack.run(ask(PICTURE))
    await stack.run(ask(PICTURE))

    def value(name: str) -> float:
        return stack.metrics.value(f"mimo_gateway_dispatched_{name}", component="vision")

    assert value("requests_total") == 1
    assert value("work_total") == 8  # patches: two tokens of 2 x 2
    assert value("work_squared_total") == 64
    assert stack.metrics.value("mimo_gateway_held_work", component="vision") == 0


async def test_tenants_do_not_share_embeddings(stack: Stack) -> None:
    await stack.run(ask(PICTURE, tenant_salt=b"a"))
    assert outcomes(await stack.run(ask(PICTURE, tenant_salt=b"b"))) == [Outcome.MISS]
    assert outcomes(await stack.run(ask(PICTURE, tenant_salt=b"a"))) == [Outcome.HIT]


async def test_an_uploaded_file_is_as_good_as_an_inline_one(stack: Stack) -> None:
    upload = await stack.uploads.add(PICTURE, b"")
    await stack.run(ask(PICTURE))
    url = MediaUrl(f"media:{upload.reference}")
    assert outcomes(await stack.run(ask(MediaPart(Modality.IMAGE, url)))) == [Outcome.HIT]


async def test_requests_at_the_same_time_share_one_encode(stack: Stack) -> None:
    stack.vision[0].hold.clear()
    first = asyncio.create_task(stack.run(ask(PICTURE)))
    await stack.vision[0].entered.wait()
    second = asyncio.create_task(stack.run(ask(PICTURE, PICTURE)))
    await asyncio.wait_for(_decoder_calls(stack, 2), 5)
    stack.vision[0].hold.set()
    assert outcomes(await first) == [Outcome.MISS]
    assert outcomes(await second) == [Outcome.JOINED, Outcome.JOINED]
    assert len(stack.vision[0].targets) == 1


async def test_one_of_two_waiters_may_leave(stack: Stack) -> None:
    stack.vision[0].hold.clear()
    first = asyncio.create_task(stack.run(ask(PICTURE)))
    await stack.vision[0].entered.wait()
    second = asyncio.create_task(stack.run(ask(PICTURE)))
    await asyncio.wait_for(_decoder_calls(stack, 2), 5)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    stack.vision[0].hold.set()
    assert outcomes(await second) == [Outcome.JOINED]
    assert stack.vision[0].num_cancelled == 0


async def test_a_hasty_request_does_not_take_a_patient_one_with_it(stack: Stack) -> None:
    """The encode that both wait for has the deadline of the one that started it."""
    stack.vision[0].hold.clear()
    hasty = asyncio.create_task(stack.run(ask(PICTURE, timeout_s=0.5)))
    await stack.vision[0].entered.wait()
    patient = asyncio.create_task(stack.run(ask(PICTURE)))
    with pytest.raises(DeadlineExceeded):
        await hasty
    while len(stack.vision[0].targets) < 2:
        await asyncio.sleep(0.01)
    stack.vision[0].hold.set()
    assert text(await patient) == "ok"


async def test_a_picture_is_not_decoded_for_an_encoder_without_room(stack: Stack) -> None:
    for replica in await stack.pools["vision"].replicas():
        replica.heard(ReportedLoad(1e6, 1.0, 1e6))
    with pytest.raises(Overloaded):
        await stack.run(ask(PICTURE))
    assert "decode_image" not in stack.media_decoder.jobs


async def test_nothing_is_planned_for_a_decoder_without_room(stack: Stack) -> None:
    for replica in await stack.pools["llm"].replicas():
        replica.heard(ReportedLoad(100.0, 0.0, 20.0))
    with pytest.raises(Overloaded) as caught:
        await stack.run(ask(PICTURE, timeout_s=10.0))
    assert caught.value.retry_after_s == 20.0
    assert stack.media_decoder.jobs == []


async def test_a_place_that_is_too_late_gets_no_answer_and_no_decoder(stack: Stack) -> None:
    with stack.pipeline.place(1.0) as place:
        place.deadline -= 1.0
        with pytest.raises(DeadlineExceeded):
            async for _ in stack.pipeline.generate(ask("hi"), place):
                pass
    assert stack.decoders[0].starts == []


async def test_a_conversation_stays_with_its_decoder(model: Model, workers: WorkerPool) -> None:
    async with open_stack(model, workers, num_decoders=2) as stack:
        first = "a long beginning that is worth remembering " * 4
        await stack.run(ask(first))
        home = next(decoder for decoder in stack.decoders if decoder.starts)
        for turn in range(4):
            await stack.run(ask(first + "and more of it " * turn))
        assert len(home.starts) == 5


async def test_bypass_encodes_again_and_replaces_the_entry(stack: Stack) -> None:
    policy = CachePolicy(embeddings=EmbeddingCache.BYPASS)
    await stack.run(ask(PICTURE))
    assert outcomes(await stack.run(ask(PICTURE, cache=policy))) == [Outcome.BYPASS]
    assert [(t.bypass, t.attempt) for t in stack.vision[0].targets] == [(False, 0), (True, 0)]


async def test_the_decoder_starts_while_an_item_is_pending(stack: Stack) -> None:
    stack.vision[0].hold.clear()
    running = asyncio.create_task(stack.run(ask(PICTURE)))
    await asyncio.wait_for(stack.decoders[0].entered.wait(), 5)
    await stack.vision[0].entered.wait()
    (item,) = stack.decoders[0].starts[0].items
    assert item.state == llm_pb2.ITEM_STATE_PENDING
    stack.vision[0].hold.set()
    assert text(await running) == "ok"
    assert stack.decoders[0].items == [{0: "pending"}]


async def test_without_a_store_the_embedding_travels_in_the_stream(stack: Stack) -> None:
    stack.vision[0].inline = True
    events = await stack.run(ask(PICTURE))
    assert text(events) == "ok"
    assert stack.decoders[0].items == [{0: bytes(2 * 8 * 4)}]


async def test_a_lost_entry_is_encoded_again_once(stack: Stack) -> None:
    await stack.run(ask(PICTURE))
    stack.decoders[0].lost = [0]
    events = await stack.run(ask(PICTURE))
    assert text(events) == "ok"
    assert outcomes(events) == [Outcome.REPAIRED]
    last = stack.vision[0].targets[-1]
    assert (last.bypass, last.inline, last.attempt) == (True, True, 1)
    assert (
        stack.metrics.value(
            "mimo_gateway_redispatched_total", component="llm", reason="embedding_missing"
        )
        == 1
    )


async def test_choices_share_one_repair(stack: Stack) -> None:
    await stack.run(ask(PICTURE))
    stack.decoders[0].lost = [0, 0]
    events = await stack.run(ask(PICTURE, n=2))
    assert [text(events, choice) for choice in (0, 1)] == ["ok", "ok"]
    assert len(stack.vision[0].targets) == 2


async def test_an_entry_that_stays_lost_is_an_error(stack: Stack) -> None:
    stack.decoders[0].lost = [0, 0]
    with pytest.raises(EmbeddingMissing):
        await stack.run(ask(PICTURE))


async def test_an_encoder_that_breaks_the_plan_is_not_believed(stack: Stack) -> None:
    part = MediaPart(None, PICTURE)
    await stack.run(ask(part))
    key = parse_key(stack.vision[0].targets[0].key)
    manifest = await stack.store.peek(key)
    assert manifest is not None and manifest.shape == (2, 8)
    # The encoder announces one width and makes another.
    for replica in await stack.pools["vision"].replicas():
        object.__setattr__(await replica.facts(), "hidden_size", 4)
    with pytest.raises(Unavailable, match="image input"):
        await stack.run(ask(part))
    assert len(stack.vision[0].targets) == 1 + MAX_ATTEMPTS


async def test_encoders_and_decoders_of_a_sound(stack: Stack) -> None:
    events = await stack.run(ask("Listen: ", SOUND))
    (upload,) = stack.audio.uploads
    assert (upload.dtype, upload.shape) == ("float32", (12000,))
    assert summary(events).items[0].tokens == 4
    assert stack.vision[0].targets == []


async def test_a_video_with_sound_is_two_items(stack: Stack) -> None:
    clip = video_file(numbered_frames(60, 32, 32), rate=30, sound=tone(2.0))
    events = await stack.run(ask(MediaPart(Modality.VIDEO, clip)))
    items = summary(events).items
    assert [(item.index, item.modality) for item in items] == [
        (0, Modality.VIDEO),
        (0, Modality.AUDIO),
    ]
    (upload,) = stack.vision[0].uploads
    assert upload.shape[0] == 2  # 2 s at 1 frame a second
    frames = np.frombuffer(upload.data, np.uint8).reshape(upload.shape)
    assert [round(float(frame.mean())) for frame in frames] == pytest.approx([0, 90], abs=2)
    assert len(stack.audio.uploads) == 1
    start = stack.decoders[0].starts[0]
    for span in start.spans:
        pad = {1: ids.IMAGE_PAD, 2: ids.AUDIO_PAD, 3: ids.VIDEO_PAD}[
            start.items[span.item_index].modality
        ]
        covered = start.prompt_ids[span.prompt_offset : span.prompt_offset + span.length]
        assert set(covered) == {pad}

    assert outcomes(await stack.run(ask(MediaPart(Modality.VIDEO, clip)))) == [Outcome.HIT] * 2


# ── failures on the way ──


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=3), Unavailable("gone")])
async def test_a_full_or_lost_encoder_is_passed_over(
    model: Model, workers: WorkerPool, error: MimoError
) -> None:
    async with open_stack(model, workers, num_vision=2) as stack:
        errors = [error]  # of whichever is called first
        for leaf in stack.vision:
            leaf.errors = errors
        assert text(await stack.run(ask(PICTURE))) == "ok"
        attempts = sorted(target.attempt for leaf in stack.vision for target in leaf.targets)
        assert attempts == [0, 1]

        errors += [error] * MAX_ATTEMPTS
        with pytest.raises(type(error)):
            await stack.run(ask(image_file(gradient(32, 96))))


async def test_a_decoder_that_dies_is_continued_elsewhere(
    model: Model, workers: WorkerPool
) -> None:
    script = [[*b"one"], [*b"two"], [*b"three"], [ids.IM_END]]
    async with open_stack(model, workers, num_decoders=2, script=script) as stack:
        deaths = [(2, Unavailable("gone"))]  # of whichever is called first
        for decoder in stack.decoders:
            decoder.deaths = deaths
        first = await stack.run(ask("Hi", PICTURE))
        assert text(first) == "onetwothree"
        assert summary(first).completion_tokens == len("onetwothree") + 1
        starts = sorted(
            (start for decoder in stack.decoders for start in decoder.starts),
            key=lambda start: len(start.prior_output_ids),
        )
    assert [bytes(start.prior_output_ids) for start in starts] == [b"", b"onetwo"]
    assert starts[0].sampling.seed == starts[1].sampling.seed


async def test_a_decoder_that_dies_before_its_last_word_has_finished(
    model: Model, workers: WorkerPool
) -> None:
    async with open_stack(model, workers) as stack:
        stack.decoders[0].script.append([])  # dies between the end token and the finish
        stack.decoders[0].deaths = [(3, Unavailable("gone"))]
        events = await stack.run(ask("Hi"))
    assert text(events) == "ok"
    assert events[-2] == ChoiceFinished(0, FinishReason.STOP)


async def test_the_only_decoder_is_waited_for(stack: Stack) -> None:
    stack.decoders[0].deaths = [(1, Unavailable("gone"))]
    assert text(await stack.run(ask("Hi"))) == "ok"
    assert [bytes(s.prior_output_ids) for s in stack.decoders[0].starts] == [b"", b"o"]


async def test_a_decoder_that_keeps_dying_is_unavailable(stack: Stack) -> None:
    stack.decoders[0].deaths = [(1, Unavailable("gone"))] * MAX_ATTEMPTS
    with pytest.raises(Unavailable, match="no llm replica can take the request"):
        await stack.run(ask("Hi"))


async def test_a_refusal_of_the_decoder_is_not_tried_elsewhere(
    model: Model, workers: WorkerPool
) -> None:
    async with open_stack(model, workers, num_decoders=2) as stack:
        for decoder in stack.decoders:
            decoder.errors = [InvalidRequest("no", field="sampling")]
        with pytest.raises(InvalidRequest, match="no"):
            await stack.run(ask("Hi"))
        assert sum(len(decoder.starts) for decoder in stack.decoders) == 1


async def test_a_failed_encode_ends_the_decoders_call(stack: Stack) -> None:
    stack.vision[0].hold.clear()
    stack.vision[0].errors = [InvalidRequest("plan and frames disagree")]
    running = asyncio.create_task(stack.run(ask("Hi", PICTURE)))
    await asyncio.wait_for(stack.decoders[0].entered.wait(), 5)
    stack.vision[0].hold.set()
    with pytest.raises(InvalidRequest, match="disagree") as caught:
        await running
    assert caught.value.field == "messages[0].content[1]"
    await asyncio.wait_for(stack.decoders[0].cancelled.wait(), 5)


async def test_the_deadline_says_where_the_time_went(stack: Stack) -> None:
    stack.vision[0].hold.clear()
    with pytest.raises(DeadlineExceeded) as caught:
        await stack.run(ask(PICTURE, timeout_s=0.5))
    assert caught.value.metadata["stage"] == "encode"


async def test_fingerprints_are_those_that_can_be_reached(
    model: Model, workers: WorkerPool
) -> None:
    async with open_stack(model, workers, down=["audio"]) as stack:
        assert await stack.pipeline.fingerprints() == {"vision": "encoder", "llm": "llm"}


async def _decoder_calls(stack: Stack, count: int) -> None:
    """Until the decoder has been called so many times."""
    while len(stack.decoders[0].starts) < count:
        stack.decoders[0].entered.clear()
        await stack.decoders[0].entered.wait()
