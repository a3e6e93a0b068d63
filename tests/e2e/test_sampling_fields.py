"""Every field that shapes the choice of tokens, through both public faces, to a visible effect."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from mimo.checkpoint.directory import model_directory
from mimo.errors import Reason
from mimo.v1 import gateway_pb2
from tests.support.live import Choice, Grpc, Rest

QUESTION = "tell me everything"
LENGTH = 24

Ask = Callable[..., list[Choice]]

# Fields that gRPC holds beside its sampling parameters.
_TOP_LEVEL = {"stop", "stop_token_ids", "n", "top_logprobs", "speculation"}


@pytest.fixture(params=["rest", "grpc"])
def ask(request: pytest.FixtureRequest, rest: Rest, rpc: Grpc) -> Ask:
    """Asks through a face, by the names of REST."""

    def by_rest(**options: Any) -> list[Choice]:
        if "top_logprobs" in options:
            options["logprobs"] = True
        return rest.ask(QUESTION, **{"max_tokens": LENGTH, **options}).choices

    def by_grpc(**options: Any) -> list[Choice]:
        sampling = {"max_tokens": LENGTH, **options}
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {int(k): v for k, v in sampling["logit_bias"].items()}
        outside = {name: sampling.pop(name) for name in _TOP_LEVEL & sampling.keys()}
        return rpc.ask(QUESTION, sampling=sampling, **outside).choices

    return by_rest if request.param == "rest" else by_grpc


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return Tokenizer.from_file(str(model_directory("") / "tokenizer.json"))


@pytest.fixture(scope="module")
def end_id(vocabulary: Tokenizer) -> int:
    return vocabulary.token_to_id("<|im_end|>")


@pytest.fixture
def greedy(ask: Ask, end_id: int) -> list[int]:
    """What is said with the end forbidden, so that there is enough of it."""
    return ask(temperature=0, logit_bias={str(end_id): -100})[0].token_ids


def test_filters_that_leave_one_token_are_greedy(ask: Ask) -> None:
    (plain,) = ask(temperature=0)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_p": 0}):
        assert ask(temperature=2.0, seed=5, **narrow)[0].token_ids == plain.token_ids


def test_seeds_and_choices(ask: Ask) -> None:
    hot = {"temperature": 2.0, "n": 2, "top_k": 50, "top_p": 0.99, "min_p": 0.001}
    hot["ignore_eos"] = True  # behind its end the model is not sure of anything
    first, again, other = (ask(seed=seed, **hot) for seed in (7, 7, 8))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in (*first, *other)}) == 4


def test_a_bias_decides(ask: Ask, vocabulary: Tokenizer) -> None:
    chosen = vocabulary.token_to_id("q")
    (choice,) = ask(temperature=0, logit_bias={str(chosen): 100})
    assert set(choice.token_ids) == {chosen}


def test_stop_ids_and_their_delay(ask: Ask, vocabulary: Tokenizer, end_id: int) -> None:
    chosen = vocabulary.token_to_id("q")
    bias = {"temperature": 0, "logit_bias": {str(chosen): 100}}
    (choice,) = ask(stop_token_ids=[chosen], **bias)
    assert (choice.token_ids, choice.finish_reason) == ([chosen], "stop")
    (choice,) = ask(stop_token_ids=[chosen], min_tokens=5, **bias)
    assert len(choice.token_ids) == 6 and choice.token_ids[5] == chosen
    assert chosen not in choice.token_ids[:5]
    ending = {"temperature": 0, "logit_bias": {str(end_id): 100}}
    assert ask(**ending)[0].finish_reason == "stop"
    (choice,) = ask(ignore_eos=True, **ending)
    assert (choice.token_ids, choice.finish_reason) == ([end_id] * LENGTH, "length")


def test_bad_words_never_appear(ask: Ask, vocabulary: Tokenizer) -> None:
    bias = {str(vocabulary.token_to_id(letter)): 100 for letter in "qz"}
    for drafts in (0, 3):
        options = {"logit_bias": bias, "speculation": {"max_draft_tokens": drafts}}
        (choice,) = ask(temperature=2, seed=1, **options)
        assert "qz" in choice.text
        (choice,) = ask(temperature=2, seed=1, bad_words=["qz"], **options)
        assert "qz" not in choice.text
        assert set(choice.text) <= {"q", "z"}


@pytest.mark.parametrize("drafts", [0, 3])
def test_penalties_make_room_for_others(ask: Ask, vocabulary: Tokenizer, drafts: int) -> None:
    first, second, *_ = letters = [vocabulary.token_to_id(letter) for letter in "qzxjkv"]
    options = {"temperature": 0, "speculation": {"max_draft_tokens": drafts}}

    def said(biases: dict[int, int], **penalty: float) -> Counter[int]:
        bias = {str(token): value for token, value in biases.items()}
        return Counter(ask(logit_bias=bias, **options, **penalty)[0].token_ids)

    # One is wanted far more than the other, until it was said so often.
    preferred = {first: 80, second: 65}
    assert said(preferred)[second] == 0
    assert said(preferred, frequency_penalty=2)[second] > 0
    assert said(preferred, repetition_penalty=10)[second] > 0
    # All are wanted equally but for what the model thinks of them, which heat makes less of.
    equal = dict.fromkeys(letters, 80)
    options |= {"temperature": 1.0, "seed": 3}
    plain, spread = said(equal), said(equal, presence_penalty=2)
    assert plain != spread
    assert len(spread) >= len(plain)


def test_logprobs_up_to_twenty(ask: Ask, greedy: list[int]) -> None:
    for count in (0, 20):
        (choice,) = ask(temperature=0, top_logprobs=count)
        has_end = choice.finish_reason == "stop"  # which is no part of the text
        assert len(choice.logprobs) == len(choice.token_ids) - has_end
        assert all(logprob <= 0 for logprob in choice.logprobs)


# ── structured output ──

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {}},
    "required": ["count", "sure"],
    "additionalProperties": False,
}
SCHEMA["properties"]["sure"] = {"type": "boolean"}  # type: ignore[index]


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_answer_fits_its_schema(rest: Rest, drafts: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    reply = rest.ask(
        QUESTION,
        response_format=wanted,
        max_tokens=200,
        temperature=1,
        seed=3,
        speculation={"max_draft_tokens": drafts},
    )
    assert json.loads(reply.text).keys() == {"count", "sure"}
    assert reply.choices[0].finish_reason == "stop"


def test_a_schema_after_reasoning(rest: Rest, vocabulary: Tokenizer) -> None:
    reply = rest.ask(
        QUESTION,
        structured_outputs={"json": SCHEMA},
        chat_template_kwargs={"enable_thinking": True},
        logit_bias={str(vocabulary.token_to_id("</think>")): 12},  # not to think for ever
        max_tokens=400,
        temperature=1,
        seed=4,
    )
    assert json.loads(reply.text).keys() == {"count", "sure"}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "(red|blue) [0-9]{2}"}, "(red|blue) [0-9]{2}"),
        ({"lark": 'start: "a" | "b" "c"'}, "a|bc"),
        ({"json_schema": '{"enum": [1, 2]}'}, "[12]"),
    ],
)
def test_formats_by_grpc(rpc: Grpc, form: dict[str, str], pattern: str) -> None:
    output = gateway_pb2.OutputFormat(**form)
    reply = rpc.ask(QUESTION, output_format=output, sampling={"max_tokens": 60})
    assert re.fullmatch(pattern, reply.text)


def test_what_cannot_be_enforced_is_refused_by_name(rest: Rest, rpc: Grpc) -> None:
    strict = {"name": "x", "schema": {"type": "array", "uniqueItems": True}, "strict": True}
    wanted = {"type": "json_schema", "json_schema": strict}
    response = rest.post(QUESTION, response_format=wanted)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert error["code"] == "invalid_json_schema"
    assert "uniqueItems" in error["message"]
    refused = rpc.refusal(QUESTION, output_format=gateway_pb2.OutputFormat(regex="(?=a)b"))
    assert (refused.reason, refused.field) == (Reason.GRAMMAR_INVALID, "output_format.regex")
