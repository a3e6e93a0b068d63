"""From logits to tokens: known noise, known filters, and independence from everything else."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gateway.bounds import MAX_REPETITION_PENALTY
from mimo.errors import InvalidRequest
from mimo.v1 import llm_pb2
from services.llm.engine.noise import gumbel, philox
from services.llm.engine.request import SamplingParams
from services.llm.engine.sampler import NoToken, Sampled, Sampler, SampleRow, filter_logits
from services.llm.engine.verify import num_accepted
from services.llm.servicer import sampling_from_proto
from tests.support.toy_decoder import make_request

LOGITS = torch.tensor([1.5, -0.3, 2.2, 0.4, 1.9, -1.1, 0.8, 1.2], dtype=torch.float64)


def row(
    output_ids: tuple[int, ...] = (), prompt: tuple[int, ...] = (7,), **params: Any
) -> SampleRow:
    return SampleRow(make_request(prompt, 99, **params), output_ids)


def choose(logits: Tensor, *rows: SampleRow, masked_ids: Sequence[int] = ()) -> list[int]:
    sampled = Sampler(masked_ids).sample(logits.expand(len(rows), -1).clone(), rows)
    return [token.token_id if isinstance(token, Sampled) else -1 for token in sampled]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
        ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
        (
            "243f6a8885a308d313198a2e03707344",
            "a4093822299f31d0",
            "d16cfe0994fdcceb5001e42024126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    """The vectors published with the generator."""

    def words(text: str) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(int(text[i : i + 8], 16)) for i in range(0, len(text), 8))

    assert philox(words(counter), words(key)) == words(expected)


def test_noise_depends_on_seed_choice_and_position_alone() -> None:
    like = torch.empty(3, 50)
    together = gumbel([1, 2**63 + 5, 9], [0, 1, 2], [4, 5, 6], like)
    alone = gumbel([2**63 + 5], [1], [5], like[:1])
    assert torch.equal(together[1:2], alone)
    for other in (gumbel([5], [1], [5], like[:1]), gumbel([2**63 + 5], [1], [6], like[:1])):
        assert not torch.equal(alone, other)


def test_noise_is_gumbel() -> None:
    noise = gumbel(list(range(20)), [0] * 20, [0] * 20, torch.empty(20, 10_000))
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_filters_in_order_of_temperature_top_k_top_p() -> None:
    scaled = LOGITS[None] / 0.7
    kept = filter_logits(scaled, [5], [1.0], [0.0]).softmax(-1)[0]
    expected = [0.15364771, 0, 0.41765777, 0, 0.27207858, 0, 0.05652383, 0.10009212]
    assert kept.tolist() == pytest.approx(expected, abs=1e-8)
    kept = filter_logits(scaled, [5], [0.8], [0.0]).softmax(-1)[0]
    expected = [0.18218, 0, 0.49521658, 0, 0.32260342, 0, 0, 0]
    assert kept.tolist() == pytest.approx(expected, abs=1e-8)


def test_top_p_keeps_the_token_that_crosses_the_border_and_never_none() -> None:
    halves = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert filter_logits(halves, [None], [0.5], [0.0]).isfinite().tolist() == [[True, False, False]]
    assert filter_logits(halves, [None], [0.6], [0.0]).isfinite().tolist() == [[True, True, False]]
    assert filter_logits(halves, [None], [0.0], [0.0]).isfinite().tolist() == [[True, False, False]]


def test_min_p_is_relative_to_the_best_token() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert filter_logits(probs, [None], [1.0], [0.5]).isfinite().tolist() == [[True, True, False]]


def test_each_row_has_its_own_filters() -> None:
    pair = LOGITS.expand(2, -1)
    kept = filter_logits(pair, [1, None], [1.0, 1.0], [0.0, 0.0]).isfinite().sum(-1)
    assert kept.tolist() == [1, 8]


def test_frequencies_follow_the_filtered_distribution() -> None:
    rows = [
        row((0,) * position, seed=3, temperature=0.7, top_k=5, top_p=0.8)
        for position in range(4000)
    ]
    counts = Counter(choose(LOGITS, *rows))
    expected = {0: 0.18218, 2: 0.49521658, 4: 0.32260342}
    assert counts.keys() == expected.keys()
    chi_square = sum((counts[k] - 4000 * p) ** 2 / (4000 * p) for k, p in expected.items())
    assert chi_square < 13.8  # 99.9 % of a chi-square with two degrees of freedom


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 40)
    rows = [
        row(seed=n, temperature=0.3 * n, top_k=None if n % 2 else 7, top_p=0.9, presence_penalty=1)
        for n in range(6)
    ]
    sampler = Sampler()
    together = sampler.sample(logits, rows)
    assert together == [sampler.sample(logits[n : n + 1], rows[n : n + 1])[0] for n in range(6)]


def test_greedy_takes_the_best_valid_token() -> None:
    assert choose(LOGITS, row()) == [2]
    assert choose(LOGITS, row(), masked_ids=range(2, 8)) == [0]
    assert choose(LOGITS, row(), masked_ids=(2,)) == [4]


def test_bias_bans_and_stop_ids_before_min_tokens() -> None:
    assert choose(LOGITS, row(logit_bias={1: 10.0})) == [1]
    assert choose(LOGITS, row(banned_ids=frozenset([2, 4]))) == [0]
    held = {"stop_ids": frozenset([2]), "min_tokens": 2}
    assert choose(LOGITS, row((0,), **held), row((0, 0), **held)) == [4, 2]


def test_bad_words_are_never_completed() -> None:
    words = {"bad_words": ((5, 2), (4,))}
    assert choose(LOGITS, row((5,), **words), row((0,), **words)) == [0, 2]
    assert choose(LOGITS, row((2, 5), prompt=(5,), **words), row((), **words)) == [0, 2]


def test_penalties_by_hand() -> None:
    # Frequency and presence count output only: 2.2 - 0.2 x 2 - 0.1 < 1.9 - 0.2 - 0.1 for token 4?
    spent = {"frequency_penalty": 0.2, "presence_penalty": 0.1}
    assert choose(LOGITS, row((2, 2, 4), **spent)) == [2]  # 1.7 > 1.6
    assert choose(LOGITS, row((2, 2, 2, 4), **spent)) == [4]  # 1.5 < 1.6
    # Repetition divides what is above zero and counts the prompt: 2.2 / 1.2 < 1.9.
    assert choose(LOGITS, row(prompt=(2,), repetition_penalty=1.2)) == [4]
    # and multiplies what is below: -0.3 x 4 < -1.1.
    below = torch.tensor([-0.3, -1.1])
    assert choose(below, row(prompt=(0,), repetition_penalty=4.0)) == [1]


@pytest.mark.parametrize("penalty", [2.0**-149, 0.001, MAX_REPETITION_PENALTY])
def test_every_repetition_penalty_that_the_gateway_passes_gives_a_token(penalty: float) -> None:
    """2^-149 is the smallest that a float of the wire can hold."""
    sampling = llm_pb2.Sampling(max_tokens=1, repetition_penalty=penalty)
    params = sampling_from_proto(llm_pb2.GenerateTokensStart(sampling=sampling), vocab_size=8)
    strength = {"repetition_penalty": params.repetition_penalty}
    random = row(prompt=(2,), temperature=0.7, top_p=0.9, min_p=0.1, **strength)
    best = 4 if penalty > 1 else 2
    assert choose(LOGITS.float(), row(prompt=(2,), **strength)) == [best]
    assert choose(LOGITS.float(), random)[0] >= 0


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 10.001, math.nan])
def test_other_repetition_penalties_are_refused(penalty: float) -> None:
    with pytest.raises(InvalidRequest, match="above 0 and at most 10") as caught:
        SamplingParams(max_tokens=1, repetition_penalty=penalty)
    assert caught.value.field == "sampling.repetition_penalty"


@pytest.mark.parametrize("temperature", [2.0**-149, 1e-39, 1e-37, 1e-20, 1e-9])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}])
def test_next_to_no_temperature_is_greedy(temperature: float, filters: dict[str, Any]) -> None:
    """2^-149 is the smallest that a float of the wire can hold."""
    cold = row(temperature=temperature, seed=5, **filters)
    for logits in (LOGITS.float(), LOGITS.float() - 10, LOGITS.float() + 1000):
        assert choose(logits, cold) == [2]
        assert choose(logits, cold, masked_ids=(2,)) == [4]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    request = row(num_logprobs=2, temperature=0.5, logit_bias={5: 50.0})
    (sampled,) = Sampler().sample(LOGITS[None], [request])
    assert isinstance(sampled, Sampled) and sampled.token_id == 5
    assert sampled.logprobs is not None
    raw = LOGITS.log_softmax(-1)
    assert sampled.logprobs.logprob == pytest.approx(float(raw[5]))
    assert sampled.logprobs.top_ids == (2, 4)
    assert sampled.logprobs.top_logprobs == pytest.approx(raw[[2, 4]].tolist())


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_token(spoiled: float) -> None:
    logits = torch.stack([LOGITS, LOGITS])
    logits[0, 3] = spoiled
    sampled = Sampler().sample(logits, [row(), row()])
    assert sampled[0] is NoToken.NOT_FINITE
    assert isinstance(sampled[1], Sampled)


def test_a_row_whose_every_token_is_masked_has_no_token() -> None:
    nothing = row(banned_ids=frozenset(range(8)))
    assert Sampler().sample(LOGITS[None], [nothing]) == [NoToken.ALL_MASKED]
    assert Sampler().sample(LOGITS[None] * math.nan, [nothing]) == [NoToken.NOT_FINITE]


@pytest.mark.parametrize(
    ("drafts", "targets", "expected"),
    [
        ([], [4], 0),
        ([4, 5, 6], [4, 5, 6, 7], 3),
        ([4, 5, 6], [4, 9, 6, 7], 1),
        ([4, 5], [9, 5, 6], 0),
        ([4, 5], [None, 5, 6], 0),
    ],
)
def test_drafts_hold_up_to_the_first_that_differs(
    drafts: list[int], targets: list[int | None], expected: int
) -> None:
    assert num_accepted(drafts, targets) == expected
