"""Propose the next tokens with the MTP blocks, exactly.

Block n turns row i, the main model's hidden state of position i and the token at i + 1 + n, into a
guess of the token at i + 2 + n. Its keys and values are right only if that token is: rows
whose token is not known yet are run with drafts to get a guess now, and again with the true token
once it is there. So a request keeps the hidden states of its last few rows, and for each block the
number of rows that are final. A block that has nothing to guess lets its rows wait. In a prompt the
tokens ahead are known, media rows included; at the end of a chunk the rows that look past it, or
into an item that has not arrived, wait.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.llm.engine.batch import Segment
from services.llm.engine.kv_cache import MAX_LAG
from services.llm.engine.request import Request
from services.llm.engine.runner import Runner
from services.llm.engine.sampler import NoToken, Sampler, SampleRow


@dataclass(frozen=True, slots=True)
class Extension:
    """Rows a step added to a request's cache, and how many drafts it wants now.

    hidden: [T, D] of positions ``[start, num_cached_tokens)``.
    """

    request: Request
    start: int
    hidden: Tensor
    num_draft_tokens: int


@dataclass(slots=True)
class _Tail:
    """Main hidden states from the first row that some block must run again. hidden: [T, D]."""

    start: int
    hidden: Tensor
    num_final: list[int] = field(default_factory=list)  # by block

    @property
    def stop(self) -> int:
        return self.start + len(self.hidden)


class Drafter:
    """Keeps the MTP blocks of running requests in step with the main model.

    ``max_draft_tokens`` may be fewer than there are blocks; all are kept in step.
    """

    def __init__(self, runner: Runner, sampler: Sampler, *, max_draft_tokens: int) -> None:
        self.max_draft_tokens = min(max_draft_tokens, runner.num_mtp_blocks)
        self._runner = runner
        self._sampler = sampler
        self._tails: dict[Request, _Tail] = {}

    def draft(self, extensions: Sequence[Extension]) -> list[Request]:
        """Follow the committed rows and leave guesses in ``request.draft_ids``.

        Returns the requests whose drafting failed; they go on without it.
        """
        tails = {extension.request: self._extend(extension) for extension in extensions}
        wanted = {e.request: e.num_draft_tokens for e in extensions}
        failed: set[Request] = set()
        for depth in range(self._runner.num_mtp_blocks):
            guessing = {r for r in tails if len(r.draft_ids) == depth < wanted[r]}
            segments = _segments(depth, tails, guessing, failed)
            if segments:
                hidden = self._run(depth, segments, tails)  # by request: [T, D]
                failed |= self._guess({r: rows[-1] for r, rows in hidden.items() if r in guessing})
        for request, tail in tails.items():
            self._keep(request, tail)
        for request in failed:
            self.forget(request)
        return list(failed)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that is over, or no longer drafts."""
        self._tails.pop(request, None)
        request.draft_ids = []

    def _extend(self, extension: Extension) -> _Tail:
        """The kept rows and the step's behind them; the first ones stand behind a cached prefix."""
        request, start = extension.request, extension.start
        tail = self._tails.get(request)
        if tail is None:
            return _Tail(start, extension.hidden, [start] * self._runner.num_mtp_blocks)
        hidden = torch.cat((tail.hidden, extension.hidden))
        return _Tail(tail.start, hidden, tail.num_final)

    def _run(
        self, depth: int, segments: Sequence[Segment], tails: dict[Request, _Tail]
    ) -> dict[Request, Tensor]:
        input_ids: list[int] = []
        for segment in segments:
            request, ahead = segment.request, 1 + depth
            known = [*request.token_ids[segment.start + ahead :], *request.draft_ids]
            input_ids += known[: segment.num_rows]
        hidden = torch.cat(
            [
                tail.hidden[segment.start - tail.start : segment.stop - tail.start]
                for segment in segments
                for tail in (tails[segment.request],)
            ]
        )  # [T, D]
        out = self._runner.draft(depth, self._runner.build(segments), input_ids, hidden)  # [T, D]
        for segment in segments:
            request = segment.request
            tails[request].num_final[depth] = _num_certain(request, tails[request], depth)
        parts = torch.split(out, [segment.num_rows for segment in segments])
        return {segment.request: part for segment, part in zip(segments, parts, strict=True)}

    def _guess(self, hidden: Mapping[Request, Tensor]) -> set[Request]:
        """Append each request's next draft: the token that the noise of its position picks.

        hidden: [D] each. Returns the requests for which there is none.
        """
        if not hidden:
            return set()
        logits = self._runner.logits(torch.stack(list(hidden.values())))  # [R, V]
        rows = [SampleRow(request, tuple(request.draft_ids)) for request in hidden]
        failed = set()
        for request, sampled in zip(hidden, self._sampler.sample(logits, rows), strict=True):
            if isinstance(sampled, NoToken):
                failed.add(request)
            else:
                request.draft_ids.append(sampled.token_id)
        return failed

    def _keep(self, request: Request, tail: _Tail) -> None:
        start = min(tail.num_final)
        hidden = tail.hidden[start - tail.start :].clone()  # frees the step's other rows
        self._tails[request] = _Tail(start, hidden, tail.num_final)
        request.num_settled_tokens = start


def _segments(
    depth: int, tails: Mapping[Request, _Tail], guessing: Set[Request], failed: Set[Request]
) -> list[Segment]:
    """Rows that a block runs now: to guess, or because it owes too many. A pass that happens anyway
    takes along what the others owe."""
    is_due = guessing or any(tail.stop - tail.num_final[depth] > MAX_LAG for tail in tails.values())
    if not is_due:
        return []
    stops = {
        request: tail.stop if request in guessing else _num_certain(request, tail, depth)
        for request, tail in tails.items()
        if request not in failed
    }
    return [
        Segment(request, start, stop - start)
        for request, stop in stops.items()
        if stop > (start := tails[request].num_final[depth])
    ]


def _num_certain(request: Request, tail: _Tail, depth: int) -> int:
    """Rows of a block whose token is known: it stands 1 + depth further on."""
    return max(min(tail.stop, request.num_ready_tokens - 1 - depth), tail.start)
