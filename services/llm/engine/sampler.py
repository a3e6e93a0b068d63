"""From logits to tokens: argmax(filtered_logits / temperature + noise).

Rows are independent: a row's token depends on its logits, its request's parameters, its own tokens
so far and its output position. Order of what happens to the logits: bias, penalties, masks,
temperature, top-k, top-p, min-p.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.noise import gumbel
from services.llm.engine.request import Request, SamplingParams

NEVER = float("-inf")
COLDEST = 1e-30  # what is colder is greedy: logits over it would be beyond float32


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: it chooses the token after ``request.token_ids`` and ``draft_ids``."""

    request: Request
    draft_ids: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def output_position(self) -> int:
        return self.request.num_output_tokens + len(self.draft_ids)

    @property
    def has_rules(self) -> bool:
        """Whether anything but the logits, temperature and noise has a say."""
        return self.params.has_rules or self.request.grammar is not None

    @property
    def output_ids(self) -> list[int]:
        return [*self.request.token_ids[self.request.num_prompt_tokens :], *self.draft_ids]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-softmax of the raw logits: the sampled token's, then the best tokens, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: Logprobs | None = None


class NoToken(Enum):
    """Why a row has none."""

    NOT_FINITE = auto()  # the logits are not
    ALL_MASKED = auto()  # the logits are fine, but every token is ruled out


class Sampler:
    """``masked_ids`` are never produced by anyone: rows of the head that the tokenizer has no token
    for, and the ids that stand for media in prompts."""

    def __init__(self, masked_ids: Iterable[int] = ()) -> None:
        self._masked_ids = torch.tensor(sorted(set(masked_ids)), dtype=torch.int64)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | NoToken]:
        """Choose one token per row. logits: [R, V]."""
        finite = logits.amax(dim=-1).isfinite()  # NaN and +inf are the largest of their row
        scores = logits.index_fill(-1, self._masked_ids.to(logits.device), NEVER)  # a copy
        for index, row in enumerate(rows):
            if row.has_rules:
                _adjust(scores[index], row)
        _add_noise(scores, rows)
        best = scores.max(dim=-1)  # the first of equals, as argmax, in a third of its time
        found = torch.stack((best.indices, finite, best.values == NEVER), dim=-1)  # [R, 3]
        sampled: list[Sampled | NoToken] = []
        for index, (token_id, is_finite, is_masked) in enumerate(found.tolist()):
            if not is_finite:
                sampled.append(NoToken.NOT_FINITE)
            elif is_masked:
                sampled.append(NoToken.ALL_MASKED)
            else:
                logprobs = _logprobs(logits, index, token_id, rows[index].params)
                sampled.append(Sampled(token_id, logprobs))
        return sampled


def filter_logits(
    logits: Tensor, top_k: Sequence[int | None], top_p: Sequence[float], min_p: Sequence[float]
) -> Tensor:
    """Rule out unlikely tokens, row by row. logits: [R, V] after temperature -> [R, V].

    top-k keeps the k best; top-p, on what is left, a token when the mass strictly before it is
    below p; min-p, on what is left, those at least that fraction as likely as the best.
    """
    size = logits.shape[-1]
    column = [[value] for value in top_p]
    keep_k = torch.tensor([[min(k or size, size)] for k in top_k], device=logits.device)  # [R, 1]
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)  # [R, V]
    rank = torch.arange(size, device=logits.device)  # [V]
    ranked = ranked.masked_fill(rank >= keep_k, NEVER)
    probs = ranked.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # mass of the better ones
    # The best token stays even at p = 0.
    ranked = ranked.masked_fill((before >= logits.new_tensor(column)) & (rank > 0), NEVER)
    probs = ranked.softmax(dim=-1)
    floor = logits.new_tensor([[value] for value in min_p]) * probs[:, :1]
    ranked = ranked.masked_fill(probs < floor, NEVER)
    return torch.empty_like(logits).scatter_(-1, order, ranked)


def _adjust(scores: Tensor, row: SampleRow) -> None:
    """Apply one request's bias, penalties and masks in place. scores: [V]."""
    params = row.params
    if params.logit_bias:
        ids, values = list(params.logit_bias), list(params.logit_bias.values())
        scores[ids] += scores.new_tensor(values)
    if params.has_penalties:
        _penalize(scores, row)
    if params.banned_ids:
        scores[list(params.banned_ids)] = NEVER
    if params.stop_ids and row.output_position < params.min_tokens:
        scores[list(params.stop_ids)] = NEVER
    if row.request.grammar is not None:
        _restrict(scores, row.request.grammar.allowed_after(row.draft_ids))
    for *beginning, last in params.bad_words:
        if row.output_ids[-len(beginning) :] == beginning or not beginning:
            scores[last] = NEVER


def _restrict(scores: Tensor, allowed: bytes | None) -> None:
    """Rule out what a grammar does not allow. ``allowed``: a bit for each token, or None behind
    drafts that it refused: no draft there is accepted, whatever the row says."""
    if allowed is None:
        return
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")[: len(scores)]
    hidden = np.ones(len(scores), dtype=bool)
    hidden[: len(bits)] = bits == 0
    scores[torch.from_numpy(hidden).to(scores.device)] = NEVER


def _penalize(scores: Tensor, row: SampleRow) -> None:
    """Repetition penalty over prompt and output; presence and frequency over output only."""
    params = row.params
    counts = Counter(row.output_ids)
    seen = list(counts | Counter(row.request.token_ids[: row.request.num_prompt_tokens]))
    if params.repetition_penalty != 1.0 and seen:
        value = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = torch.where(value > 0, value / factor, value * factor)
    if counts:
        ids = list(counts)
        frequency = scores.new_tensor([counts[token_id] for token_id in ids])
        scores[ids] -= params.presence_penalty + params.frequency_penalty * frequency


def _add_noise(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    """Temperature, filters and noise, in place, for the rows that are not greedy."""
    random = [index for index, row in enumerate(rows) if row.params.temperature > COLDEST]
    if not random:
        return
    params = [rows[index].params for index in random]
    scaled = scores[random] / scores.new_tensor([[p.temperature] for p in params])  # [R', V]
    if any(p.top_k is not None or p.top_p < 1 or p.min_p > 0 for p in params):
        scaled = filter_logits(
            scaled, [p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params]
        )
    noise = gumbel(
        [p.seed for p in params],
        [p.choice for p in params],
        [rows[index].output_position for index in random],
        like=scaled,
    )
    scores[random] = (scaled + noise).to(scores.dtype)


def _logprobs(logits: Tensor, index: int, token_id: int, params: SamplingParams) -> Logprobs | None:
    """logits: [R, V], raw; ``index``: the row's."""
    if params.num_logprobs is None:
        return None
    logprobs = logits[index].log_softmax(dim=-1)
    top = logprobs.topk(min(params.num_logprobs, len(logprobs)))
    return Logprobs(
        float(logprobs[token_id]), tuple(top.indices.tolist()), tuple(top.values.tolist())
    )
