"""Events as OpenAI objects: the order of chunks, and that both forms tell the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.api.answer import AnswerHead, CompletionBuilder, Shown, new_answer_id
from gateway.api.chunks import ChunkBuilder
from gateway.generation import (
    ChoiceFinished,
    Event,
    FinishReason,
    ItemReady,
    TokenLogprob,
    TopLogprob,
)
from tests.support.faces import PICTURE, SCRIPT, STARTED, SUMMARY, said, stopped, thought

HEAD = AnswerHead("chatcmpl-x", "tiny", 1_700_000_000, "req_1")
HE = TokenLogprob(72, b"H\xc3", -0.5, (TopLogprob(72, b"H\xc3", -0.5), TopLogprob(7, b"x", -2.0)))


def completion(events: Sequence[Event], n: int = 1, **shown: bool) -> dict[str, Any]:
    builder = CompletionBuilder(HEAD, n, Shown(**shown))
    for event in events:
        builder.add(event)
    return builder.build()


def chunks(events: Sequence[Event], n: int = 1, **shown: bool) -> list[dict[str, Any]]:
    builder = ChunkBuilder(HEAD, n, Shown(**shown))
    return [chunk for event in events for chunk in builder.chunks(event)]


def deltas(sent: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any], str | None]]:
    choices = [choice for chunk in sent for choice in chunk["choices"]]
    return [(each["index"], each["delta"], each["finish_reason"]) for each in choices]


EVENTS: list[Event] = [step for step in SCRIPT if not isinstance(step, Exception)]  # type: ignore[misc]


# ── whole ──


def test_a_completion() -> None:
    assert completion(EVENTS) == {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_0123456789",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 4,
            "total_tokens": 13,
            "prompt_tokens_details": {
                "text_tokens": 7,
                "image_tokens": 2,
                "video_tokens": 0,
                "audio_tokens": 0,
                "cached_tokens": 3,
            },
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
        "mimo": {
            "request_id": "req_1",
            "timings_ms": {
                "queue": 1.0,
                "fetch": 0.0,
                "decode_media": 0.0,
                "encode": 0.0,
                "store": 0.0,
                "prefill": 0.0,
                "first_token": 0.0,
                "total": 20.0,
            },
            "items": [
                {
                    "index": 0,
                    "modality": "image",
                    "tokens": 2,
                    "cache": "miss",
                    "encode_ms": 5.0,
                    "bytes": 90,
                }
            ],
            "speculation": {"drafted": (3, 2), "accepted": (2, 1)},
            "model_fingerprint": "0123456789abcdef",
        },
    }


def test_reasoning_is_sent_under_both_names_unless_excluded() -> None:
    events = [STARTED, thought("why"), said("so"), stopped(), SUMMARY]
    message = completion(events)["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "why"
    assert "reasoning" not in completion(events, reasoning=False)["choices"][0]["message"]


def test_an_empty_answer_is_an_empty_string() -> None:
    whole = completion([STARTED, stopped(), SUMMARY], logprobs=True)["choices"][0]
    assert whole["message"]["content"] == ""
    assert whole["logprobs"] == {"content": [], "refusal": None}


def test_logprobs_hold_bytes_and_ids_are_shown_on_request() -> None:
    events = [STARTED, said("H", logprobs=(HE,), token_ids=(72, 9)), stopped(), SUMMARY]
    choice = completion(events, logprobs=True, token_ids=True)["choices"][0]
    assert choice["token_ids"] == [72, 9]
    assert choice["logprobs"]["content"] == [
        {
            "token": "H\ufffd",
            "logprob": -0.5,
            "bytes": [72, 195],
            "top_logprobs": [
                {"token": "H\ufffd", "logprob": -0.5, "bytes": [72, 195]},
                {"token": "x", "logprob": -2.0, "bytes": [120]},
            ],
        }
    ]


def test_what_stopped_it_is_named() -> None:
    def reason(**fields: Any) -> Any:
        return completion([STARTED, stopped(**fields), SUMMARY])["choices"][0].get("stop_reason")

    assert reason(stop_string="END") == "END"
    assert reason(stop_token_id=0) == 0
    assert reason() is None


# ── streamed ──


def test_role_first_then_text_then_the_finish_with_the_report() -> None:
    sent = chunks(EVENTS)
    assert deltas(sent) == [
        (0, {"role": "assistant", "content": ""}, None),
        (0, {"content": "Hel"}, None),
        (0, {"content": "lo"}, None),
        (0, {}, "stop"),
    ]
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in sent)
    shared = ("id", "object", "created", "model")
    assert {tuple(chunk[name] for name in shared) for chunk in sent} == {
        ("chatcmpl-x", "chat.completion.chunk", 1_700_000_000, "tiny")
    }
    assert sent[-1]["mimo"] == completion(EVENTS)["mimo"]
    assert sent[-1]["system_fingerprint"] == "fp_0123456789"
    assert not any("mimo" in chunk for chunk in sent[:-1])


def test_usage_comes_last_on_a_chunk_of_its_own() -> None:
    *before, last = chunks(EVENTS, stream_usage=True)
    assert all(chunk["usage"] is None and "mimo" not in chunk for chunk in before)
    assert last["choices"] == []
    assert last["usage"] == completion(EVENTS)["usage"]
    assert last["mimo"] == completion(EVENTS)["mimo"]


def test_nothing_is_sent_before_the_decoder_works() -> None:
    builder = ChunkBuilder(HEAD, 1, Shown())
    assert list(builder.chunks(STARTED)) == []
    assert list(builder.chunks(ItemReady(PICTURE))) == []
    assert len(list(builder.chunks(said("x")))) == 2


def test_several_choices_begin_in_index_order_and_finish_once_each() -> None:
    events = [
        *(STARTED, said("b", 1), said("a", 0), stopped(1), said("A", 0)),
        *(ChoiceFinished(0, FinishReason.LENGTH), ChoiceFinished(2, FinishReason.STOP), SUMMARY),
    ]
    sent = chunks(events, n=3)
    assert [(index, delta) for index, delta, _ in deltas(sent)[:3]] == [
        (index, {"role": "assistant", "content": ""}) for index in range(3)
    ]
    assert deltas(sent)[3:] == [
        (1, {"content": "b"}, None),
        (0, {"content": "a"}, None),
        (1, {}, "stop"),
        (0, {"content": "A"}, None),
        (0, {}, "length"),
        (2, {}, "stop"),
    ]
    assert [index for index, chunk in enumerate(sent) if "mimo" in chunk] == [len(sent) - 1]


def test_ids_and_logprobs_without_text_wait_for_the_next_chunk() -> None:
    events = [
        *(STARTED, thought("hm", token_ids=(1,)), said("H", logprobs=(HE,), token_ids=(2,))),
        *(said("", token_ids=(3,)), stopped(), SUMMARY),
    ]
    sent = chunks(events, reasoning=False, logprobs=True, token_ids=True)
    ids = [chunk["choices"][0].get("token_ids") for chunk in sent]
    assert ids == [None, [1, 2], [3]]
    assert [delta for _, delta, _ in deltas(sent)][1:] == [{"content": "H"}, {}]
    assert len(sent[1]["choices"][0]["logprobs"]["content"]) == 1
    assert sent[2]["choices"][0]["logprobs"] is None


def test_deltas_hold_nothing_but_strings() -> None:
    events = [STARTED, thought("a", token_ids=(1,)), said("b", logprobs=(HE,)), stopped(), SUMMARY]
    for _, delta, _ in deltas(chunks(events, logprobs=True, token_ids=True)):
        assert all(isinstance(value, str) for value in delta.values())


def test_both_forms_tell_the_same() -> None:
    events = [
        *(STARTED, thought("wh"), thought("y"), said("s", logprobs=(HE,), token_ids=(1, 2))),
        *(said("o", token_ids=(3,)), stopped(stop_string="."), SUMMARY),
    ]
    whole = completion(events, logprobs=True, token_ids=True)["choices"][0]
    sent = chunks(events, logprobs=True, token_ids=True)
    choices = [chunk["choices"][0] for chunk in sent]

    def joined(name: str) -> str:
        return "".join(choice["delta"].get(name, "") for choice in choices)

    assert joined("content") == whole["message"]["content"]
    assert joined("reasoning") == joined("reasoning_content") == whole["message"]["reasoning"]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert sum((choice.get("token_ids", []) for choice in choices), []) == whole["token_ids"]
    assert choices[-1]["stop_reason"] == whole["stop_reason"]


def test_an_unknown_outcome_is_null() -> None:
    summary = replace(SUMMARY, items=(replace(PICTURE, cache=None),))
    assert completion([*EVENTS[:-1], summary])["mimo"]["items"][0]["cache"] is None


def test_answer_ids_differ() -> None:
    assert new_answer_id().startswith("chatcmpl-")
    assert new_answer_id() != new_answer_id()
