"""A generation in progress, and what its caller asked for. No torch, no clock, no I/O."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mimo.errors import InvalidRequest
from services.llm.engine.acceptance import Acceptance
from services.llm.engine.grammar import Grammar

MAX_SEED = 2**64 - 1


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id was produced, or the grammar is complete
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the caller went away, or time ran out
    ERROR = "error"  # this request alone failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Raises InvalidRequest, naming the field, for a value out of range.

    The token at output position p is ``argmax(filtered_logits / temperature + G(seed, choice, p))``
    with Gumbel noise G; a temperature of 0, or next to 0, means G = 0. ``stop_ids`` end the
    generation and are masked until ``min_tokens`` are out; ``banned_ids`` never appear and
    ``bad_words`` are id sequences that are never completed. ``num_logprobs``: None for none, 0 for
    the chosen token alone, k for the k best beside it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_ids: frozenset[int] = frozenset()
    banned_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    choice: int = 0
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 1, math.inf)
        _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check("temperature", self.temperature, 0.0, 2.0)
        _check("top_k", 1 if self.top_k is None else self.top_k, 1, math.inf)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise _out_of_range("repetition_penalty", "above 0 and at most 10")
        _check("seed", self.seed, 0, MAX_SEED)
        _check("num_logprobs", self.num_logprobs or 0, 0, 20)
        for bias in self.logit_bias.values():
            _check("logit_bias", bias, -100.0, 100.0)
        if any(not word for word in self.bad_words):
            raise InvalidRequest("bad_words holds an empty sequence", field="sampling.bad_words")

    @property
    def has_rules(self) -> bool:
        """Whether any token is treated differently from another, once or ever."""
        masks_stops = self.min_tokens > 0 and len(self.stop_ids) > 0
        is_partial = self.logit_bias or self.banned_ids or self.bad_words
        return masks_stops or bool(is_partial) or self.has_penalties

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(slots=True)
class Timing:
    """Moments on the engine's clock, in seconds. ``prefill_s``: duration of the steps that ran the
    prompt, without the pauses in which it waited for an item."""

    submitted: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    prefill_s: float = 0.0

    @property
    def queue_s(self) -> float:
        return 0.0 if self.admitted is None else self.admitted - self.submitted

    @property
    def first_token_s(self) -> float:
        """From admission."""
        if self.admitted is None or self.first_token is None:
            return 0.0
        return self.first_token - self.admitted


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt positions ``[offset, offset + length)`` take rows from ``row_offset`` of an item."""

    item_index: int
    offset: int
    length: int
    row_offset: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(slots=True, eq=False)
class Request:
    """A generation in progress. Counts are derived, so they cannot disagree.

    ``token_ids`` starts as the prompt plus what an earlier decoder already produced; those count
    as output, so a resumed request continues the numbering (and with it the noise) of the first.
    Compared and hashed by identity: two calls may carry the same ``request_id``.
    """

    request_id: str
    token_ids: list[int]  # prompt, then everything accepted so far
    num_prompt_tokens: int
    params: SamplingParams
    priority: int = 0  # larger runs first
    arrival: int = 0  # order of arrival, given by the scheduler
    deadline: float = math.inf  # on the engine's clock, seconds
    max_draft_tokens: int = 0
    grammar: Grammar | None = None
    spans: tuple[Span, ...] = ()  # by offset, disjoint
    item_rows: dict[int, Any] = field(default_factory=dict)  # item_index -> [rows, D], once ready
    pending_items: set[int] = field(default_factory=set)
    item_keys: tuple[str, ...] = ()  # by item_index: content addresses, for block hashes
    cache_salt: bytes = b""  # separates tenants in the prefix cache
    use_prefix_cache: bool = False  # take blocks over, and leave some for others
    num_cached_tokens: int = 0  # tokens whose KV is in blocks
    num_settled_tokens: int = 0  # those whose rows, of MTP blocks too, are final
    num_published_blocks: int = 0  # that others may have taken over
    num_found_tokens: int = 0  # prompt tokens that were in the prefix cache when it began
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, as far as needed
    draft_ids: list[int] = field(default_factory=list)  # proposed, not yet verified
    block_tables: dict[str, list[int]] = field(default_factory=dict)  # by layer group
    num_drafted: list[int] = field(default_factory=list)  # by draft position
    num_accepted: list[int] = field(default_factory=list)  # by draft position
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_preemptions: int = 0
    timing: Timing = field(default_factory=Timing)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is served first and preempted last."""
        return -self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_ready_tokens(self) -> int:
        """Tokens before the first one whose embedding is missed: not arrived, and not cached."""
        missing = (
            max(span.offset, self.num_cached_tokens)
            for span in self.spans
            if span.item_index in self.pending_items and span.end > self.num_cached_tokens
        )
        return min(missing, default=len(self.token_ids))

    @property
    def is_decoding(self) -> bool:
        """Only the newest token is missing from the cache."""
        return self.num_cached_tokens == len(self.token_ids) - 1 and self.num_output_tokens > 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence as it stands is complete, or None while it is not."""
        enough = self.num_output_tokens >= self.params.min_tokens
        if self.num_output_tokens and enough and self.token_ids[-1] in self.params.stop_ids:
            return FinishReason.STOP
        if self.num_output_tokens and self.grammar is not None and self.grammar.is_complete:
            return FinishReason.STOP
        if self.num_output_tokens >= self.params.max_tokens:
            return FinishReason.LENGTH
        return None

    def append(self, token_id: int) -> None:
        """Take in the next token of the output."""
        self.token_ids.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)

    def record_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verification."""
        while len(self.num_drafted) < num_drafted:
            self.num_drafted.append(0)
            self.num_accepted.append(0)
        for position in range(num_drafted):
            self.num_drafted[position] += 1
            self.num_accepted[position] += position < num_accepted

    def spans_within(self, start: int, stop: int) -> Iterator[tuple[Span, int, int]]:
        """Spans that touch positions ``[start, stop)``, each with the part of it that does."""
        index = max(bisect_right(self.spans, start, key=lambda span: span.offset) - 1, 0)
        for span in self.spans[index:]:
            if span.offset >= stop:
                return
            first, last = max(span.offset, start), min(span.end, stop)
            if first < last:
                yield span, first, last


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _out_of_range(name, f"in {low}..{high}, got {value}")


def _out_of_range(name: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {rule}", field=f"sampling.{name}")
