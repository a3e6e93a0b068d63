"""Propose the next tokens with the MTP blocks, exactly.

Block n turns row i, the main model's hidden state of position i and the token at i + 1 + n, into a
guess of the token at i + 2 + n. Its keys and values are right only if that token is: rows
whose token is not known yet are run with drafts to get a guess now, and again with the true token
once it is there. So a request keeps the hidden states of its last few rows, and for each block the
number of rows that are final. In a prompt the tokens ahead are known, media rows included; at the
end of a chunk the rows that look past it, or into an item that has not arrived, wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.llm.engine.batch import Segment
from services.llm.engine.request import Request
from services.llm.engine.runner import Runner
from services.llm.engine.sampler import Sampler, SampleRow


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
            segments = []
            for request, tail in tails.items():
                is_guessing = len(request.draft_ids) == depth < wanted[request]
                stop = tail.stop if is_guessing else _num_certain(request, tail, depth)
                if stop > tail.num_final[depth] and request not in failed:
                    start = tail.num_final[depth]
                    segments.append(Segment(request, start, stop - start))
            if segments:
                hidden = self._run(depth, segments, tails)  # by request: [T, D]
                guessing = {
                    request: rows[-1]  # [D]
                    for request, rows in hidden.items()
                    if len(request.draft_ids) == depth < wanted[request]
                }
                failed |= self._guess(guessing)
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
        """The kept rows and the step's behind them. Row 0 starts anew, as after a preemption."""
        request = extension.request
        if extension.start == 0:
            return _Tail(0, extension.hidden, [0] * self._runner.num_mtp_blocks)
        tail = self._tails[request]
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
            if sampled is None:
                failed.add(request)
            else:
                request.draft_ids.append(sampled.token_id)
        return failed

    def _keep(self, request: Request, tail: _Tail) -> None:
        final = [_num_certain(request, tail, depth) for depth in range(len(tail.num_final))]
        start = min(final)
        hidden = tail.hidden[start - tail.start :].clone()  # frees the step's other rows
        self._tails[request] = _Tail(start, hidden, final)


def _num_certain(request: Request, tail: _Tail, depth: int) -> int:
    """Rows of a block whose token is known: it stands 1 + depth further on."""
    return max(min(tail.stop, request.num_ready_tokens - 1 - depth), 0)
