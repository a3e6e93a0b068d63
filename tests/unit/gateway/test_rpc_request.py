"""The public protobuf messages as the pipeline's types, and back."""

import json
import math
from typing import Any

import pytest

from gateway.bounds import MAX_PARTS
from gateway.conversation import Ending, Message, Role, TextPart
from gateway.generation import (
    CachePolicy,
    ChoiceFinished,
    EmbeddingCache,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    ItemReady,
    SamplingParams,
    Speculation,
    TokenLogprob,
    TopLogprob,
)
from gateway.items import MediaOptions, MediaPart, MediaUrl, Modality
from gateway.rpc.events import event_to_proto, model_to_proto
from gateway.rpc.request import conversation, generation_request
from mimo.errors import InvalidRequest, Reason
from mimo.v1 import encoding_pb2, gateway_pb2
from tests.support.faces import PICTURE, STARTED, SUMMARY, catalog, said, stopped, thought

HI = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[gateway_pb2.ContentPart(text="hi")])
ANSWER = gateway_pb2.Message(
    role=gateway_pb2.ROLE_ASSISTANT,
    parts=[gateway_pb2.ContentPart(text="so")],
    reasoning="why",
)


def parse(**fields: Any) -> GenerationRequest:
    request = gateway_pb2.GenerateRequest(**{"messages": [HI], **fields})
    return generation_request(request, "req_1", 60.0)


def refusal(**fields: Any) -> tuple[Reason, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value.reason, caught.value.field


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": gateway_pb2.SamplingParams(**fields)}


def part(**fields: Any) -> gateway_pb2.Message:
    content = gateway_pb2.ContentPart(**fields)
    return gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[content])


def medium(kind: str, **fields: Any) -> gateway_pb2.Message:
    return part(**{kind: gateway_pb2.MediaInput(**fields)})


# ── requests ──


def test_a_minimal_request_leaves_everything_to_the_model() -> None:
    request = parse()
    assert request == GenerationRequest("req_1", request.conversation, timeout_s=60.0)
    assert request.conversation.messages == (Message(Role.USER, (TextPart("hi"),)),)
    assert request.conversation.thinking is None


def test_every_field_arrives() -> None:
    request = parse(
        messages=[HI, ANSWER],
        continue_final_message=True,
        reasoning=gateway_pb2.ReasoningOptions(enabled=False),
        speculation=gateway_pb2.SpeculationOptions(enabled=True, max_draft_tokens=2),
        cache=gateway_pb2.CacheOptions(
            prefix=False, embeddings=gateway_pb2.EMBEDDING_CACHE_MODE_BYPASS
        ),
        n=2,
        stop=["a", "", "b"],
        stop_token_ids=[3],
        top_logprobs=2,
        priority=-1000,
        return_token_ids=True,
        cache_salt="mine",
        sampling=gateway_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.75,
            top_k=40,
            min_p=0.25,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            max_tokens=5,
            min_tokens=2,
            seed=(1 << 64) - 1,
            logit_bias={7: -100.0},
            ignore_eos=True,
            bad_words=["no"],
        ),
    )
    assert request.conversation.ending is Ending.CONTINUE
    assert request.conversation.thinking is False
    assert request.conversation.messages[1].reasoning == "why"
    assert request.speculation == Speculation(True, 2)
    assert request.cache == CachePolicy(False, EmbeddingCache.BYPASS)
    assert (request.n, request.stop, request.stop_token_ids) == (2, ("a", "b"), (3,))
    assert (request.top_logprobs, request.priority, request.return_token_ids) == (2, -100, True)
    assert len(request.tenant_salt) == 32
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.25,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        max_tokens=5,
        min_tokens=2,
        seed=(1 << 64) - 1,
        logit_bias={7: -100.0},
        ignore_eos=True,
        bad_words=("no",),
    )


@pytest.mark.parametrize(
    "fields, path",
    [
        (sampling(temperature=2.5), "sampling.temperature"),
        (sampling(temperature=math.nan), "sampling.temperature"),
        (sampling(top_p=1.5), "sampling.top_p"),
        (sampling(min_p=-1), "sampling.min_p"),
        (sampling(presence_penalty=3), "sampling.presence_penalty"),
        (sampling(frequency_penalty=math.inf), "sampling.frequency_penalty"),
        (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=math.nan), "sampling.repetition_penalty"),
        (sampling(max_tokens=0), "sampling.max_tokens"),
        (sampling(max_tokens=2, min_tokens=3), "sampling.min_tokens"),
        (sampling(logit_bias={7: 101}), "sampling.logit_bias"),
        (sampling(logit_bias={7: math.nan}), "sampling.logit_bias"),
        (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
        (sampling(bad_words=["x"] * 65), "sampling.bad_words"),
        (sampling(bad_words=["x", "y" * 257]), "sampling.bad_words[1]"),
        ({"n": 9}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", "y" * 257]}, "stop[1]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"messages": [HI] * 2049}, "messages"),
        ({"messages": [gateway_pb2.Message()]}, "messages[0].role"),
        ({"messages": [HI, gateway_pb2.Message(role=77)]}, "messages[1].role"),  # type: ignore[arg-type]
        ({"continue_final_message": True}, "continue_final_message"),
        ({"cache": gateway_pb2.CacheOptions(embeddings=77)}, "cache.embeddings"),  # type: ignore[arg-type]
        (
            {"speculation": gateway_pb2.SpeculationOptions(max_draft_tokens=17)},
            "speculation.max_draft_tokens",
        ),
        ({"media": gateway_pb2.MediaOptions(fps=-1)}, "media"),
        ({"media": gateway_pb2.MediaOptions(exif=77)}, "media.exif"),  # type: ignore[arg-type]
        (
            {"messages": [medium("image", url="u", options={"max_pixels": 0})]},
            "messages[0].parts[0].image.options",
        ),
    ],
)
def test_a_value_out_of_bounds_is_named(fields: dict[str, Any], path: str) -> None:
    assert refusal(**fields) == (Reason.INVALID_VALUE, path)


def test_all_messages_together_have_a_bounded_number_of_parts() -> None:
    half = gateway_pb2.Message(
        role=gateway_pb2.ROLE_USER, parts=[gateway_pb2.ContentPart(text="")] * (MAX_PARTS // 2)
    )
    assert parse(messages=[half, half])
    assert refusal(messages=[half, half, HI]) == (Reason.TOO_MANY_MEDIA, "messages")


@pytest.mark.parametrize(
    "fields, path",
    [
        ({"messages": []}, "messages"),
        ({"messages": [part()]}, "messages[0].parts[0]"),
        ({"messages": [HI, medium("video")]}, "messages[1].parts[0].video"),
    ],
)
def test_what_is_missing_is_named(fields: dict[str, Any], path: str) -> None:
    assert refusal(**fields) == (Reason.MISSING_FIELD, path)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"json_schema": '{"type": "array"}'}, GrammarKind.JSON_SCHEMA),
        ({"regex": "a+"}, GrammarKind.REGEX),
        ({"lark": 'start: "a"'}, GrammarKind.LARK),
    ],
)
def test_an_output_format_is_a_grammar(form: dict[str, str], kind: GrammarKind) -> None:
    grammar = parse(output_format=gateway_pb2.OutputFormat(**form)).grammar
    ((name, source),) = form.items()
    assert grammar == Grammar(kind, source, f"output_format.{name}")


def test_a_json_object_is_the_schema_of_any_object() -> None:
    grammar = parse(output_format=gateway_pb2.OutputFormat(json_object=True)).grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.source)["type"] == "object"
    assert parse(output_format=gateway_pb2.OutputFormat(json_object=False)).grammar is None
    assert parse().grammar is None


def test_a_grammar_may_not_be_endless() -> None:
    form = gateway_pb2.OutputFormat(regex="a" * (1 << 19))
    assert refusal(output_format=form) == (Reason.GRAMMAR_TOO_COMPLEX, "output_format.regex")


def test_top_p_of_nothing_is_greedy() -> None:
    params = parse(**sampling(top_p=0, temperature=1)).sampling
    assert (params.temperature, params.top_p) == (0.0, None)


@pytest.mark.parametrize(
    "kind, modality",
    [("image", Modality.IMAGE), ("video", Modality.VIDEO), ("audio", Modality.AUDIO)],
)
def test_media_from_each_source(kind: str, modality: Modality) -> None:
    def source(**fields: Any) -> object:
        asked = conversation([medium(kind, **fields)], gateway_pb2.MediaOptions(), None)
        ((_, found),) = asked.media_parts()
        assert found.modality is modality
        return found.source

    assert source(inline=b"xyz") == b"xyz"
    assert source(url="https://a.b/c") == MediaUrl("https://a.b/c")
    assert source(media_ref="media_1") == MediaUrl("media:media_1")


def test_options_of_a_part_override_those_of_the_request() -> None:
    base = gateway_pb2.MediaOptions(
        fps=2, max_pixels=4000, use_audio_track=False, exif=gateway_pb2.EXIF_MODE_IGNORE
    )
    own = gateway_pb2.MediaOptions(num_frames=4, exif=gateway_pb2.EXIF_MODE_APPLY)
    asked = conversation([medium("video", url="u", options=own)], base, None)
    ((_, found),) = asked.media_parts()
    expected = MediaOptions(max_pixels=4000, num_frames=4, use_audio_track=False, exif=True)
    assert found == MediaPart(Modality.VIDEO, MediaUrl("u"), expected)


# ── events ──


def event(of: Any, *, with_reasoning: bool = True) -> gateway_pb2.GenerateResponse | None:
    return event_to_proto(of, 5, "tiny", with_reasoning=with_reasoning)


def test_the_first_and_the_last_event() -> None:
    first, last = event(STARTED), event(SUMMARY)
    assert first is not None and last is not None and first.seq == last.seq == 5
    assert (first.started.request_id, first.started.model) == ("req_test", "tiny")
    assert first.started.prompt.prompt_tokens == 9
    summary = last.summary
    assert (summary.prompt.image_tokens, summary.prompt.cached_tokens) == (2, 3)
    assert (summary.completion_tokens, summary.reasoning_tokens) == (4, 1)
    assert (summary.timings.queue_ms, summary.timings.total_ms) == (1.0, 20.0)
    assert list(summary.speculation.drafted) == [3, 2]
    assert list(summary.speculation.accepted) == [2, 1]
    assert summary.items[0].cache == encoding_pb2.CACHE_OUTCOME_MISS
    assert summary.model_fingerprint == "0123456789abcdef"


def test_a_ready_item() -> None:
    ready = event(ItemReady(PICTURE))
    assert ready is not None
    item = ready.media_ready.item
    assert (item.index, item.tokens, item.encode_ms, item.bytes) == (0, 2, 5.0, 90)
    assert item.modality == encoding_pb2.MODALITY_IMAGE


def test_text_with_logprobs_and_ids() -> None:
    logprob = TokenLogprob(72, b"H", -0.5, (TopLogprob(7, b"\xc3", -2.0),))
    sent = event(said("H", 1, logprobs=(logprob,), token_ids=(72,)))
    assert sent is not None
    delta = sent.delta
    assert (delta.choice_index, delta.content, list(delta.token_ids)) == (1, "H", [72])
    assert (delta.logprobs[0].token, delta.logprobs[0].top[0].token) == (b"H", b"\xc3")


def test_reasoning_can_be_left_out() -> None:
    sent = event(thought("why"))
    assert sent is not None and sent.delta.reasoning == "why"
    assert event(thought("why"), with_reasoning=False) is None


@pytest.mark.parametrize(
    "finished, stop",
    [
        (stopped(stop_string="."), "stop_string"),
        (stopped(stop_token_id=0), "stop_token_id"),
        (stopped(), None),
    ],
)
def test_what_stopped_a_choice(finished: ChoiceFinished, stop: str | None) -> None:
    sent = event(finished)
    assert sent is not None and sent.choice_finished.WhichOneof("stop") == stop
    assert sent.choice_finished.reason == gateway_pb2.CHOICE_FINISH_REASON_STOP


@pytest.mark.parametrize("reason", FinishReason)
def test_every_reason_to_finish_travels(reason: FinishReason) -> None:
    sent = event(ChoiceFinished(0, reason))
    assert sent is not None
    name = gateway_pb2.ChoiceFinishReason.Name(sent.choice_finished.reason)
    assert name == f"CHOICE_FINISH_REASON_{reason.name}"


def test_the_model_card() -> None:
    model = model_to_proto(catalog().card, {"llm": "f"})
    assert (model.name, model.max_context_tokens, model.created) == ("tiny", 4096, 1_700_000_000)
    assert len(model.inputs) == 3 and dict(model.fingerprints) == {"llm": "f"}
