"""From sampled ids to deltas: characters, reasoning, stop strings, logprobs, counts."""

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation import Delta, TextKind
from gateway.prompt.answer import Answer, Token
from gateway.prompt.detokenizer import Detokenizer
from gateway.prompt.reasoning import Phase, ThinkTags
from gateway.prompt.stop import StopMatcher
from gateway.prompt.tokenizer import Tokenizer
from tests.support import byte_model as ids

TOKENIZER = Tokenizer(json.dumps(ids.tokenizer_definition()))
TAGS = ThinkTags.of(TOKENIZER)


def answer(
    phase: Phase = Phase.CONTENT, stop: Sequence[str] = (), *, return_token_ids: bool = False
) -> Answer:
    return Answer(0, TOKENIZER, TAGS, phase, stop=stop, return_token_ids=return_token_ids)


def tokens(*pieces: str | int) -> list[Token]:
    """Ids of texts (one per byte, merges aside) and of control tokens."""
    flat: list[Token] = []
    for piece in pieces:
        flat += [Token(piece)] if isinstance(piece, int) else map(Token, TOKENIZER.encode(piece))
    return flat


def run(subject: Answer, sampled: Sequence[Token]) -> tuple[str, str]:
    """Reasoning and content of a whole output fed one token at a time."""
    deltas = [delta for token in sampled for delta in subject.feed([token])] + subject.finish()
    assert all(delta.text for delta in deltas)
    return tuple(
        "".join(delta.text for delta in deltas if delta.kind is kind)
        for kind in (TextKind.REASONING, TextKind.CONTENT)
    )  # type: ignore[return-value]


# ── characters ──


def test_a_character_appears_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.feed(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_an_unfinished_character_ends_as_one_replacement() -> None:
    assert run(answer(), [Token(ord("a")), *map(Token, "😀".encode()[:3])]) == ("", "a\ufffd")


def test_broken_bytes_do_not_swallow_what_follows() -> None:
    assert run(answer(), [Token(0xE9), Token(ord("a"))]) == ("", "\ufffda")


def test_special_tokens_are_dropped_and_other_added_tokens_are_text() -> None:
    sampled = tokens("a", ids.VISION_START, ids.TOOL_CALL, "b", ids.IM_END)
    assert run(answer(), sampled) == ("", "a<tool_call>b")


# ── reasoning ──


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ((ids.THINK, "hm", ids.END_THINK, "Hi"), ("hm", "Hi")),
        (("\n ", ids.THINK, "\nhm\n", ids.END_THINK, "\n\nHi"), ("\nhm\n", "\n\nHi")),
        (("Hi",), ("", "Hi")),
        ((" \n Hi",), ("", " \n Hi")),
        (("\n",), ("", "\n")),
        ((ids.THINK, ids.END_THINK, "Hi"), ("", "Hi")),
        ((ids.THINK, "a", ids.END_THINK, ids.END_THINK, "b"), ("a", "b")),
        (("a", ids.THINK, "b", ids.END_THINK, "c"), ("", "abc")),
        ((ids.THINK, "only"), ("only", "")),
        (("<think>a</think>b",), ("", "<think>a</think>b")),
    ],
)
def test_reasoning_is_split_by_the_ids_of_the_tags(
    sampled: tuple[str | int, ...], expected: tuple[str, str]
) -> None:
    assert run(answer(Phase.START), tokens(*sampled)) == expected


def test_a_continued_reasoning_starts_inside_the_block() -> None:
    assert run(answer(Phase.REASONING), tokens("hm", ids.END_THINK, "ok")) == ("hm", "ok")


def test_counts_leave_the_tags_out_of_reasoning() -> None:
    subject = answer(Phase.START)
    run(subject, tokens(ids.THINK, "abc", ids.END_THINK, "d", ids.IM_END))
    # think, "ab", "c", end, "d", im_end
    assert (subject.num_tokens, subject.num_reasoning_tokens) == (6, 2)


# ── stop strings ──


def test_tokens_count_up_to_the_one_that_completes_the_stop_string() -> None:
    subject = answer(stop=["lo w"])
    shown = subject.feed(tokens("hello world"))
    assert [delta.text for delta in shown] == ["hel"]
    assert (subject.stop_string, subject.num_tokens) == ("lo w", len("hello w"))
    assert subject.feed(tokens("more")) == []
    assert subject.finish() == []
    assert subject.num_tokens == 7


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    subject = answer(stop=["STOP"])
    assert [d.text for d in subject.feed(tokens("aST"))] == ["a"]
    assert [d.text for d in subject.feed(tokens("x"))] == ["STx"]
    assert subject.feed(tokens("STO")) == []
    assert [d.text for d in subject.finish()] == ["STO"]


def test_a_stop_string_may_end_inside_a_token() -> None:
    subject = answer(stop=["a"])
    assert subject.feed([Token(ord("x")), Token(ids.AB)]) == [Delta(0, TextKind.CONTENT, "x")]
    assert subject.num_tokens == 2


def test_stop_strings_do_not_match_in_reasoning() -> None:
    subject = answer(Phase.START, stop=["hm"])
    assert run(subject, tokens(ids.THINK, "hm", ids.END_THINK, "ahm")) == ("hm", "a")


def test_the_stop_string_completed_first_wins() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert (matcher.feed("xabcd"), matcher.matched) == ("xa", "bc")


def test_of_two_completed_together_the_longer_wins() -> None:
    matcher = StopMatcher(["bc", "abc"])
    assert (matcher.feed("xabc"), matcher.matched) == ("x", "abc")


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_a_stop_is_found_however_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    def shown(pieces: Sequence[str]) -> tuple[str, str | None]:
        matcher = StopMatcher(stops)
        parts = [matcher.feed(piece) for piece in pieces]
        return "".join(parts) + matcher.finish(), matcher.matched

    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert shown(pieces) == shown(list(text))
    # And against the definition: the shortest beginning of the text that ends with a stop string.
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops)) and stops]
    if not ends:
        assert shown(pieces) == (text, None)
    else:
        stop = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        assert shown(pieces) == (text[: ends[0] - len(stop)], stop)


# ── logprobs and ids ──


def scored(text: bytes) -> list[Token]:
    return [Token(byte, -float(position)) for position, byte in enumerate(text)]


def test_logprobs_travel_with_the_last_byte_of_their_token() -> None:
    subject = answer()
    sampled = scored("aé".encode())
    assert [len(d.logprobs) for d in subject.feed(sampled[:2])] == [1]
    (delta,) = subject.feed(sampled[2:])
    assert [entry.token for entry in delta.logprobs] == [b"\xc3", b"\xa9"]


def test_logprobs_wait_for_text_that_is_held_back() -> None:
    subject = answer(stop=["bc!"])
    assert [len(d.logprobs) for d in subject.feed(scored(b"xbc"))] == [1]
    (delta,) = subject.feed([Token(ord("y"), -3.0)])
    assert (delta.text, [entry.logprob for entry in delta.logprobs]) == ("bcy", [-1.0, -2.0, -3.0])


def test_logprobs_of_a_stop_string_are_not_listed() -> None:
    subject = answer(stop=["c"])
    (delta,) = subject.feed(scored(b"xyc"))
    assert [entry.token for entry in delta.logprobs] == [b"x", b"y"]


def test_a_token_cut_by_the_stop_string_is_listed() -> None:
    subject = answer(stop=["b"])
    (delta,) = subject.feed([Token(ids.AB, -1.0)])
    assert (delta.text, [entry.token for entry in delta.logprobs]) == ("a", [b"ab"])


def test_end_and_tags_and_reasoning_have_no_logprobs() -> None:
    subject = answer(Phase.START)
    sampled = [Token(ids.THINK, -1.0), Token(104, -1.0), Token(ids.END_THINK, -1.0)]
    deltas = subject.feed([*sampled, Token(105, -0.5), Token(ids.IM_END, -1.0)])
    assert [(d.kind.value, len(d.logprobs)) for d in deltas] == [("reasoning", 0), ("content", 1)]


def test_infinite_logprobs_become_the_lowest_number() -> None:
    subject = answer()
    (delta,) = subject.feed([Token(97, -math.inf, ((98, math.nan), (ids.IM_END, -1.0)))])
    (entry,) = delta.logprobs
    assert entry.logprob == -9999.0
    assert [(top.token, top.logprob) for top in entry.top] == [
        (b"b", -9999.0),
        (b"<|im_end|>", -1.0),
    ]


def test_all_ids_are_delivered_when_asked_for() -> None:
    subject = answer(Phase.START, return_token_ids=True)
    sampled = tokens(ids.THINK, "h", ids.END_THINK, "ok", ids.IM_END)
    deltas = subject.feed(sampled[:4]) + subject.feed(sampled[4:]) + subject.finish()
    assert [id for delta in deltas for id in delta.token_ids] == [token.id for token in sampled]
    assert deltas[-1] == Delta(0, TextKind.CONTENT, "", (), (ids.IM_END,))


@given(
    st.lists(
        st.sampled_from([ids.THINK, ids.END_THINK, ids.IM_END, ids.AB, *"é \nab".encode()]),
        max_size=12,
    ),
    st.data(),
)
def test_deliveries_do_not_change_the_answer(sampled: list[int], data: st.DataObject) -> None:
    """What MTP delivers in one event reads as if it had come token by token."""
    scored = [Token(id, -float(position)) for position, id in enumerate(sampled)]

    def outcome(deliveries: Sequence[Sequence[Token]]) -> tuple[object, ...]:
        subject = answer(Phase.START, stop=["ba", "a\n"])
        deltas = [d for delivery in deliveries for d in subject.feed(delivery)] + subject.finish()
        texts = [
            "".join(d.text for d in deltas if d.kind is kind)
            for kind in (TextKind.REASONING, TextKind.CONTENT)
        ]
        logprobs = [entry for d in deltas for entry in d.logprobs]
        counts = (subject.num_tokens, subject.num_reasoning_tokens, subject.stop_string)
        return (*texts, logprobs, counts)

    cuts = sorted(data.draw(st.sets(st.integers(0, len(scored)), max_size=4)))
    deliveries = [scored[a:b] for a, b in zip([0, *cuts], [*cuts, len(scored)], strict=True)]
    assert outcome(deliveries) == outcome([[token] for token in scored])
