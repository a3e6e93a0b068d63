"""The output of one choice: ids in, deltas out."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.generation import Delta, TextKind, TokenLogprob, TopLogprob
from gateway.prompt.detokenizer import Detokenizer
from gateway.prompt.reasoning import Channel, Phase, ReasoningSplitter, ThinkTags
from gateway.prompt.stop import StopMatcher
from gateway.prompt.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # what stands for minus infinity and NaN where only numbers can travel


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled id. ``logprob`` and ``top`` (id, logprob) only when they were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _PendingLogprob:
    """A content token whose text may still be held back: characters ``begin`` to ``end``."""

    begin: int
    end: int
    logprob: TokenLogprob


class Answer:
    """Turns sampled ids into reasoning and content, and finds where the answer ends.

    The result does not depend on how ids are grouped into deliveries.
    """

    def __init__(
        self,
        choice_index: int,
        tokenizer: Tokenizer,
        tags: ThinkTags,
        phase: Phase,
        *,
        stop: Sequence[str] = (),
        return_token_ids: bool = False,
    ) -> None:
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.choice_index = choice_index
        self._tokenizer = tokenizer
        self._splitter = ReasoningSplitter(tokenizer, tags, phase)
        self._reasoning = Detokenizer(tokenizer)
        self._content = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stop)
        self._held: list[Token] = []
        self._pending: deque[_PendingLogprob] = deque()
        self._num_decoded = 0  # content characters, stop strings and what follows included
        self._num_shown = 0
        self._return_token_ids = return_token_ids
        self._new_ids: list[int] = []
        self._num_new = 0
        self._deltas: list[Delta] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer. Tokens after it are ignored and not counted."""
        return self._matcher.matched

    def feed(self, tokens: Sequence[Token]) -> list[Delta]:
        """Take sampled tokens in order; give what can be shown."""
        for token in tokens:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            self._num_new += 1
            if self._return_token_ids:
                self._new_ids.append(token.id)
            self._take(token)
        return self._flush()

    def finish(self) -> list[Delta]:
        """The output is over: give what was held back."""
        if self.stop_string is None:
            self._release_held()
            self._show(TextKind.REASONING, self._reasoning.finish())
            text = self._matcher.feed(self._content.finish())
            self._show_content(text + self._matcher.finish(), final=True)
        if self._new_ids:
            self._show(TextKind.CONTENT, "", force=True)
        return self._flush()

    def _take(self, token: Token) -> None:
        match self._splitter.route(token.id):
            case Channel.DROPPED:
                self._held.clear()
                self._show(TextKind.REASONING, self._reasoning.finish())
            case Channel.HELD:
                self._held.append(token)
            case Channel.REASONING:
                self.num_reasoning_tokens += 1
                self._show(TextKind.REASONING, self._reasoning.feed(token.id))
            case Channel.CONTENT:
                self._release_held()
                self._take_content(token)

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for token in held:
            self._take_content(token)

    def _take_content(self, token: Token) -> None:
        begin = self._num_decoded
        text = self._content.feed(token.id)
        self._num_decoded += len(text)
        if token.logprob is not None and self._tokenizer.token_bytes(token.id):
            end = self._num_decoded + self._content.holds_bytes
            self._pending.append(_PendingLogprob(begin, end, self._spell(token, token.logprob)))
        self._show_content(self._matcher.feed(text), final=self.stop_string is not None)

    def _show_content(self, text: str, *, final: bool) -> None:
        """Show text with the logprobs it completes; at the end also those it cut short."""
        self._num_shown += len(text)
        logprobs: list[TokenLogprob] = []
        while self._pending:
            first = self._pending[0]
            if first.end > self._num_shown and not (final and first.begin < self._num_shown):
                break
            logprobs.append(self._pending.popleft().logprob)
        self._show(TextKind.CONTENT, text, tuple(logprobs))

    def _show(
        self,
        kind: TextKind,
        text: str,
        logprobs: tuple[TokenLogprob, ...] = (),
        *,
        force: bool = False,
    ) -> None:
        """Add to the delta being built when it is of the same kind, else begin another."""
        if not text and not logprobs and not force:
            return
        ids, self._new_ids = tuple(self._new_ids), []
        num_tokens, self._num_new = self._num_new, 0
        delta = Delta(self.choice_index, kind, text, logprobs, ids, num_tokens)
        both = self._deltas[-1].followed_by(delta) if self._deltas else None
        if both is not None:
            self._deltas[-1] = both
        else:
            self._deltas.append(delta)

    def _flush(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _spell(self, token: Token, logprob: float) -> TokenLogprob:
        spelling = self._tokenizer.spelling
        top = tuple(TopLogprob(id, spelling(id), _finite(value)) for id, value in token.top)
        return TokenLogprob(token.id, spelling(token.id), _finite(logprob), top)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
