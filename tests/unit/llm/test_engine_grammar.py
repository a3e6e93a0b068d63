"""Grammars: what is refused and why, and that what comes out does not depend on how it is made."""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from mimo.checkpoint.index import CheckpointIndex
from mimo.errors import InvalidRequest, Overloaded, Reason
from mimo.nn.attention import AttentionSelector
from mimo.v1 import llm_pb2
from models import tokenizer as tiny_tokenizer
from services.llm import grammars
from services.llm.engine.core import EngineCore
from services.llm.engine.grammar import Grammar
from services.llm.engine.request import FinishReason, Request
from services.llm.grammars import GrammarCompiler
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.weights import load_decoder
from tests.support import tiny
from tests.support.toy_decoder import build_core, make_request, run_all

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["count", "colour", "tags"],
    "additionalProperties": False,
}
PROMPT = [12, 50, 7, 300, 41]


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return tiny_tokenizer.build()


@pytest.fixture(scope="module")
def end_id(vocabulary: Tokenizer) -> int:
    return vocabulary.token_to_id("<|im_end|>")


@pytest.fixture(scope="module")
def compiler(
    vocabulary: Tokenizer, end_id: int, tmp_path_factory: pytest.TempPathFactory
) -> GrammarCompiler:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    vocabulary.save(str(path))
    return GrammarCompiler.open(path, vocabulary.get_vocab_size(), [end_id])


@pytest.fixture(scope="module")
def pair(vocabulary: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Mtp]:
    directory = tiny.write_decoder(
        tmp_path_factory.mktemp("grammar-model"),
        vocab_size=vocabulary.get_vocab_size(),
        num_nextn_predict_layers=3,
    )
    selector = AttentionSelector("llm")
    decoder, mtp = load_decoder(
        CheckpointIndex.open(directory), dtype=torch.float64, device="cpu", selector=selector
    )
    assert mtp is not None
    return decoder, mtp


def compile_json(compiler: GrammarCompiler, schema: Any = SCHEMA) -> Grammar:
    return asyncio.run(compiler.compile(llm_pb2.Grammar(json_schema=json.dumps(schema))))


def core_around(pair: tuple[Decoder, Mtp], **limits: Any) -> EngineCore:
    decoder, mtp = pair
    return build_core(
        decoder,
        mtp,
        layers=(*decoder.config.layers, *decoder.config.mtp_layers),
        visible=decoder.config.swa_visible,
        **limits,
    )


def ask(compiler: GrammarCompiler, end_id: int, **options: Any) -> Request:
    values = {"max_tokens": 150, "stop_ids": frozenset([end_id]), **options}
    return make_request(PROMPT, grammar=compile_json(compiler), **values)


# ── compiling ──


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ({"json_schema": '{"not": {}}'}, Reason.GRAMMAR_INVALID),
        ({"json_schema": '{"type": "object"'}, Reason.GRAMMAR_INVALID),
        ({"json_schema": '{"type": "nothing"}'}, Reason.GRAMMAR_INVALID),
        ({"regex": "(?=a)b"}, Reason.GRAMMAR_INVALID),
        ({"regex": "("}, Reason.GRAMMAR_INVALID),
        ({"lark": "start: missing"}, Reason.GRAMMAR_INVALID),
        ({}, Reason.GRAMMAR_INVALID),
        ({"regex": "a" * (300 << 10)}, Reason.GRAMMAR_TOO_COMPLEX),
        ({"json_schema": '{"a":' * 65 + "1" + "}" * 65}, Reason.GRAMMAR_TOO_COMPLEX),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_says_why(
    compiler: GrammarCompiler, grammar: dict[str, str], reason: Reason
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(llm_pb2.Grammar(**grammar))
    assert caught.value.reason is reason
    assert len(caught.value.message) <= 300


async def test_brackets_in_strings_are_not_nesting(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"const": '\\"' + "[" * 99 + "{" * 99})
    await compiler.compile(llm_pb2.Grammar(json_schema=schema))


async def test_the_compiled_size_is_limited(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_SYMBOLS", 2)
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(llm_pb2.Grammar(json_schema=json.dumps(SCHEMA)))
    assert caught.value.reason is Reason.GRAMMAR_TOO_COMPLEX


async def test_compiling_stops_waiting_in_time(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "TIMEOUT_S", 0.0)
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(llm_pb2.Grammar(regex="late"))
    assert caught.value.reason is Reason.GRAMMAR_TOO_COMPLEX


@pytest.fixture
def busy(
    vocabulary: Tokenizer, end_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[GrammarCompiler, threading.Event]]:
    """A compiler whose grammars that begin with "slow" take until the event is set."""
    go_on = threading.Event()
    compile_at_once = grammars._compile

    def compile_in_time(tokenizer: LLTokenizer, form: str, source: str) -> LLMatcher:
        if source.startswith("slow"):
            go_on.wait()
        return compile_at_once(tokenizer, form, source)

    monkeypatch.setattr(grammars, "_compile", compile_in_time)
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    yield (
        GrammarCompiler.open(tmp_path / "tokenizer.json", vocabulary.get_vocab_size(), [end_id]),
        go_on,
    )
    go_on.set()


async def test_a_grammar_is_not_blamed_for_the_slowness_of_others(
    busy: tuple[GrammarCompiler, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, go_on = busy
    monkeypatch.setattr(grammars, "TIMEOUT_S", 0.01)
    for number in range(grammars.NUM_THREADS):
        with pytest.raises(InvalidRequest):
            await compiler.compile(llm_pb2.Grammar(regex=f"slow{number}"))
    with pytest.raises(Overloaded) as caught:
        await compiler.compile(llm_pb2.Grammar(regex="quick"))
    assert caught.value.retry_after_s
    monkeypatch.setattr(grammars, "TIMEOUT_S", 60.0)
    go_on.set()
    await compiler.compile(llm_pb2.Grammar(regex="quick"))


async def test_calls_that_waited_for_a_thread_take_over_what_others_compiled(
    busy: tuple[GrammarCompiler, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, go_on = busy
    compile_slowly, sources = grammars._compile, []

    def counted(tokenizer: LLTokenizer, form: str, source: str) -> LLMatcher:
        sources.append(source)
        return compile_slowly(tokenizer, form, source)

    monkeypatch.setattr(grammars, "_compile", counted)
    ask = llm_pb2.Grammar(regex="slow")
    calls = [asyncio.create_task(compiler.compile(ask)) for _ in range(8)]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*calls)
    assert len(sources) == grammars.NUM_THREADS


async def test_requests_with_equal_grammars_do_not_share_a_state(
    compiler: GrammarCompiler, vocabulary: Tokenizer
) -> None:
    first, second = [await compiler.compile(llm_pb2.Grammar(regex="ab")) for _ in range(2)]
    for token_id in vocabulary.encode("ab", add_special_tokens=False).ids:
        assert first.accept(token_id)
    assert first.is_complete
    assert not second.is_complete


# ── masks ──


def allowed_ids(grammar: Grammar, draft_ids: list[int]) -> set[int] | None:
    bits = grammar.allowed_after(draft_ids)
    if bits is None:
        return None
    return {8 * i + j for i, byte in enumerate(bits) for j in range(8) if byte >> j & 1}


async def test_looking_behind_drafts_leaves_the_state_as_it_was(
    compiler: GrammarCompiler, vocabulary: Tokenizer, end_id: int
) -> None:
    grammar = await compiler.compile(llm_pb2.Grammar(regex="abc|axx"))
    a, b, c, x = (vocabulary.token_to_id(letter) for letter in "abcx")
    before = allowed_ids(grammar, [])
    assert before is not None and a in before and b not in before
    assert {b, x} <= (allowed_ids(grammar, [a]) or set())
    assert c in (allowed_ids(grammar, [a, b]) or set())
    assert allowed_ids(grammar, [a, b, c]) == {end_id}
    assert allowed_ids(grammar, [a, c]) is None
    assert allowed_ids(grammar, [b]) is None
    assert allowed_ids(grammar, []) == before


# ── tokens ──


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_fits_the_schema_and_does_not_depend_on_drafts(
    compiler: GrammarCompiler,
    pair: tuple[Decoder, Mtp],
    vocabulary: Tokenizer,
    end_id: int,
    temperature: float,
) -> None:
    answers = set()
    for drafts in range(4):
        request = ask(compiler, end_id, max_draft_tokens=drafts, temperature=temperature, seed=11)
        (ids,) = run_all(core_around(pair), [request])
        assert request.finish_reason is FinishReason.STOP
        assert (sum(request.num_accepted) > 0) == (drafts > 0)  # punctuation is easy to guess
        answers.add(tuple(ids))
    (ids,) = answers
    value = json.loads(vocabulary.decode(list(ids)))
    assert value.keys() == {"count", "colour", "tags"}
    assert 0 <= value["count"] <= 99 and value["colour"] in ("red", "green", "blue")


def test_the_answer_survives_preemption_and_resume(
    compiler: GrammarCompiler, pair: tuple[Decoder, Mtp], end_id: int
) -> None:
    options: dict[str, Any] = {"max_draft_tokens": 3, "temperature": 1.0}
    seeds = range(4)
    alone = [
        run_all(core_around(pair), [ask(compiler, end_id, seed=seed, **options)])[0]
        for seed in seeds
    ]
    requests = [ask(compiler, end_id, seed=seed, **options) for seed in seeds]
    tight = core_around(
        pair, num_blocks={"full": 48, "window": 60}, max_running=4, max_step_tokens=16
    )
    assert run_all(tight, requests) == alone
    assert sum(request.num_preemptions for request in requests) > 0
    for seed, count in itertools.product(seeds, (1, 9)):
        resumed = ask(compiler, end_id, seed=seed, prior_output_ids=alone[seed][:count], **options)
        assert resumed.grammar is not None
        assert all(resumed.grammar.accept(token_id) for token_id in alone[seed][:count])
        assert run_all(core_around(pair), [resumed]) == [alone[seed][count:]]


def test_a_complete_grammar_ends_the_answer_without_a_stop_id(
    compiler: GrammarCompiler, pair: tuple[Decoder, Mtp], vocabulary: Tokenizer
) -> None:
    grammar = asyncio.run(compiler.compile(llm_pb2.Grammar(regex="(yes|no), [0-9]{3}")))
    request = make_request(PROMPT, max_tokens=50, grammar=grammar, max_draft_tokens=3)
    (ids,) = run_all(core_around(pair), [request])
    assert re.fullmatch("(yes|no), [0-9]{3}", vocabulary.decode(ids))
    assert request.finish_reason is FinishReason.STOP


def test_a_grammar_that_contradicts_the_rest_fails_its_request_alone(
    compiler: GrammarCompiler, pair: tuple[Decoder, Mtp], vocabulary: Tokenizer
) -> None:
    grammar = asyncio.run(compiler.compile(llm_pb2.Grammar(regex="q")))
    banned = frozenset([vocabulary.token_to_id("q")])
    bad = make_request(PROMPT, grammar=grammar, banned_ids=banned)
    good = make_request(PROMPT, max_tokens=20)
    core = core_around(pair)
    core.add(bad)
    core.add(good)
    (failure,) = [p for p in core.step().progress if p.error is not None]
    assert failure.request is bad
    assert isinstance(failure.error, InvalidRequest)
    while core.scheduler.num_unfinished:
        core.step()
    assert good.num_output_tokens == 20
