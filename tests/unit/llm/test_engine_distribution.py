"""Speculation changes no distribution: served tokens against the probabilities they come from."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.llm.engine.noise import gumbel
from services.llm.engine.verify import num_accepted

VOCAB, DEPTH, SEQUENCES = 6, 3, 80_000

Accept = Callable[[list[int], list[int]], int]


def table(seed: int) -> Tensor:
    """Logits of the next token for every token before it. [V, V]."""
    return 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def argmax_with_noise(logits: Tensor, seeds: list[int], position: int) -> Tensor:
    """The engine's rule for many sequences at once. logits: [S, V] -> [S]."""
    noise = gumbel(seeds, [0] * len(seeds), [position] * len(seeds), like=logits)
    return (logits + noise).argmax(dim=-1)


def serve(accept: Accept, *, shared_noise: bool = True) -> tuple[Tensor, float]:
    """A verification of DEPTH drafts for many seeds, the draft model being another than the target.

    Returns the tokens that came out, [S, DEPTH + 1] with -1 behind the last, and how many drafts
    held on average.
    """
    target, draft = table(0), table(0) + 0.7 * table(1)
    seeds = list(range(SEQUENCES))
    draft_seeds = seeds if shared_noise else [seed + SEQUENCES for seed in seeds]
    last = torch.zeros(SEQUENCES, dtype=torch.int64)
    guesses = []
    for position in range(DEPTH):
        last = argmax_with_noise(draft[last], draft_seeds, position)
        guesses.append(last)
    drafts = torch.stack(guesses, dim=1)  # [S, DEPTH]
    before = torch.cat((torch.zeros(SEQUENCES, 1, dtype=torch.int64), drafts), dim=1)
    targets = torch.stack(
        [argmax_with_noise(target[before[:, j]], seeds, j) for j in range(DEPTH + 1)], dim=1
    )
    pairs = zip(drafts.tolist(), targets.tolist(), strict=True)
    counts = torch.tensor([accept(guess, found) for guess, found in pairs])  # [S]
    kept = torch.arange(DEPTH + 1) <= counts[:, None]
    held = torch.arange(DEPTH + 1) < counts[:, None]
    tokens = torch.where(held, before.roll(-1, dims=1), targets).masked_fill(~kept, -1)
    return tokens, float(counts.double().mean())


def p_value(tokens: Tensor) -> tuple[float, int]:
    """Of a chi-square test of every transition against direct sampling, and how many there are."""
    start = torch.zeros(len(tokens), 1, dtype=torch.int64)
    before = torch.cat((start, tokens[:, :-1]), dim=1).flatten()
    after = tokens.flatten()
    observed = torch.bincount((before * VOCAB + after)[after >= 0], minlength=VOCAB * VOCAB).view(
        VOCAB, VOCAB
    )
    expected = table(0).double().softmax(-1) * observed.sum(-1, keepdim=True)
    seen = observed.sum(-1) > 0
    statistic = ((observed - expected) ** 2 / expected)[seen].sum()
    freedom = seen.sum() * (VOCAB - 1)
    tail = torch.special.gammaincc(freedom.double() / 2, statistic / 2)  # of chi-square
    return float(tail), int(observed.sum())


@pytest.fixture(scope="module")
def served() -> tuple[Tensor, float]:
    return serve(num_accepted)


def test_served_tokens_have_the_distribution_of_direct_sampling(
    served: tuple[Tensor, float],
) -> None:
    value, num_draws = p_value(served[0])
    assert num_draws >= 200_000
    assert value > 0.001


def test_a_rule_that_accepts_wrong_drafts_is_found_out() -> None:
    def lenient(drafts: list[int], targets: list[int]) -> int:
        """Takes the first draft for right when it is off by one."""
        if abs(drafts[0] - targets[0]) == 1:
            return 1
        return num_accepted(drafts, targets)

    assert p_value(serve(lenient)[0])[0] < 1e-12


def test_drafts_with_noise_of_their_own_hold_less(served: tuple[Tensor, float]) -> None:
    apart, length = serve(num_accepted, shared_noise=False)
    assert length < 0.7 * served[1]
    assert p_value(apart)[0] > 0.001  # slower, not wrong


def test_the_first_draft_holds_as_often_as_the_coupling_says(served: tuple[Tensor, float]) -> None:
    """Two argmaxes under one Gumbel noise agree on i with probability
    1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    p, q = table(0)[0].double().softmax(-1), (table(0) + 0.7 * table(1))[0].double().softmax(-1)
    ratios = torch.maximum(p / p[:, None], q / q[:, None])  # [V, V]: how strong each rival is
    expected = float((1 / ratios.sum(-1)).sum())
    firsts = served[0][:, 1] >= 0  # a second token came out
    found = float(firsts.double().mean())
    assert math.isclose(found, expected, abs_tol=0.01)
