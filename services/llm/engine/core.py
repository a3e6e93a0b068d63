"""One step of the engine: plan, forward, sample, verify, commit, draft. Knows no threads."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mimo.errors import DeadlineExceeded, Internal, InvalidRequest, MimoError
from services.llm.engine.batch import Batch, Segment
from services.llm.engine.drafter import Drafter, Extension
from services.llm.engine.request import FinishReason, Request
from services.llm.engine.runner import Runner
from services.llm.engine.sampler import NoToken, Sampled, Sampler, SampleRow
from services.llm.engine.scheduler import Plan, ScheduledRequest, Scheduler
from services.llm.engine.verify import num_accepted
from services.llm.model.parallel import RankLost

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step gave one request: tokens from output position ``first_index`` on, or its end."""

    request: Request
    tokens: tuple[Sampled, ...] = ()
    first_index: int = 0
    finish_reason: FinishReason | None = None
    error: MimoError | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A step that ran: what was planned, and what came of it."""

    plan: Plan
    progress: tuple[Progress, ...]
    lost_drafting: tuple[Request, ...] = ()  # go on by plain decoding


class EngineCore:
    """Scheduler, runner, sampler and drafter, one step at a time. No drafter: plain decoding."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, sampler: Sampler, drafter: Drafter | None
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._drafter = drafter

    @property
    def max_draft_tokens(self) -> int:
        return 0 if self._drafter is None else self._drafter.max_draft_tokens

    def add(self, request: Request) -> None:
        """Queue a request that passed :meth:`Scheduler.check`."""
        room = request.params.max_tokens - request.num_output_tokens - 1
        most = min(self.max_draft_tokens, max(room, 0))  # with one token to go nothing is drafted
        request.max_draft_tokens = min(request.max_draft_tokens, most)
        self.scheduler.add(request)

    def remove(self, request: Request) -> None:
        """End an unfinished request; its blocks are free when this returns."""
        self.scheduler.remove(request)
        if self._drafter is not None:
            self._drafter.forget(request)

    def is_unfinished(self, request: Request) -> bool:
        return request in self.scheduler.running or request in self.scheduler.waiting

    def expire(self, now: float) -> list[Progress]:
        """End the requests whose deadline has passed."""
        late = [request for request in self._unfinished() if request.deadline <= now]
        error = DeadlineExceeded("the deadline passed before the generation was complete")
        return [self._fail(request, error) for request in late]

    def next_deadline(self) -> float:
        return min((request.deadline for request in self._unfinished()), default=math.inf)

    def step(self) -> Step:
        """Run what can run now. A request that cannot continue ends alone, with an error.

        Raises torch.AcceleratorError when the device is broken, RankLost when the model's other
        processes are: nothing after it would work.
        """
        plan = self.scheduler.plan()
        if self._drafter is not None:
            for request in plan.preempted:
                self._drafter.forget(request)
        if not plan.scheduled:
            return Step(plan, ())
        segments = [Segment(s.request, s.start, s.num_rows) for s in plan.scheduled]
        try:
            batch = self._runner.build(segments)
            hidden = self._runner.forward(batch, _input_ids(plan))  # [T, D]
            sampled = self._sample(plan, batch, hidden)
        except (torch.AcceleratorError, RankLost):
            raise
        except Exception:
            logger.exception("a step failed", extra={"requests": len(plan.scheduled)})
            error = Internal("the decoder failed on the batch this request was in")
            return Step(plan, tuple(self._fail(s.request, error) for s in plan.scheduled))
        failed = [
            self._fail_without_token(request, why)
            for request, why in sampled.items()
            if isinstance(why, NoToken)
        ]
        progress = self._commit(
            plan, {r: tokens for r, tokens in sampled.items() if not isinstance(tokens, NoToken)}
        )
        lost_drafting = self._draft(plan, batch, hidden)
        return Step(plan, (*failed, *progress), tuple(lost_drafting))

    def _sample(
        self, plan: Plan, batch: Batch, hidden: Tensor
    ) -> dict[Request, list[Sampled] | NoToken]:
        """Tokens each sampling request gains, or why it cannot go on."""
        rows: list[SampleRow] = []
        indices: list[int] = []
        sampling = [scheduled for scheduled in plan.scheduled if scheduled.samples]
        starts = dict(zip((s.request for s in plan.scheduled), batch.row_starts, strict=True))
        for scheduled in sampling:
            newest = starts[scheduled.request] + scheduled.num_tokens - 1
            for count in range(len(scheduled.draft_ids) + 1):
                rows.append(SampleRow(scheduled.request, scheduled.draft_ids[:count]))
                indices.append(newest + count)
        if not rows:
            return {}
        chosen = self._sampler.sample(self._runner.logits(hidden[indices]), rows)
        gained: dict[Request, list[Sampled] | NoToken] = {}
        for scheduled in sampling:
            targets = chosen[: len(scheduled.draft_ids) + 1]
            chosen = chosen[len(targets) :]
            gained[scheduled.request] = _gained(scheduled.draft_ids, targets)
        return gained

    def _commit(self, plan: Plan, sampled: dict[Request, list[Sampled]]) -> list[Progress]:
        ids = {request: [s.token_id for s in tokens] for request, tokens in sampled.items()}
        progress = []
        for advance in self.scheduler.commit(plan, ids):
            request, num_gained = advance.request, len(advance.token_ids)
            if num_gained == 0:
                continue
            first_index = request.num_output_tokens - num_gained
            tokens = tuple(sampled[request][:num_gained])
            progress.append(Progress(request, tokens, first_index, advance.finish_reason))
            if advance.finish_reason is not None and self._drafter is not None:
                self._drafter.forget(request)
        return progress

    def _draft(self, plan: Plan, batch: Batch, hidden: Tensor) -> list[Request]:
        """Propose drafts for the next step. What fails here costs speed, never a request."""
        if self._drafter is None:
            return []
        running = set(self.scheduler.running)
        extensions = []
        for scheduled, row in zip(plan.scheduled, batch.row_starts, strict=True):
            request = scheduled.request
            if request in running and request.max_draft_tokens > 0:
                rows = hidden[row : row + request.num_cached_tokens - scheduled.start]
                wanted = self.scheduler.num_draft_tokens(request) if request.is_decoding else 0
                extensions.append(Extension(request, scheduled.start, rows, wanted))
        if not extensions:
            return []
        try:
            lost = self._drafter.draft(extensions)
        except (torch.AcceleratorError, RankLost):
            raise
        except Exception:
            logger.exception("drafting failed", extra={"requests": len(extensions)})
            lost = [extension.request for extension in extensions]
        for request in lost:
            self._drafter.forget(request)
            request.max_draft_tokens = 0
            request.use_prefix_cache = False  # its MTP rows are missing from now on
        return lost

    def _fail_without_token(self, request: Request, why: NoToken) -> Progress:
        if why is NoToken.ALL_MASKED:
            message = "grammar, min_tokens and what is banned leave no token to choose"
            return self._fail(request, InvalidRequest(message))
        # A block that others hold, too, has no NaN: they read it and go on.
        for group, blocks in self.scheduler.blocks.disown(request).items():
            self._runner.scrub(group, blocks)
        logger.error("logits are not finite", extra={"tokens": request.num_tokens})
        return self._fail(request, Internal("the model produced no usable logits"))

    def _fail(self, request: Request, error: MimoError) -> Progress:
        self.remove(request)
        is_late = isinstance(error, DeadlineExceeded)
        reason = FinishReason.ABORT if is_late else FinishReason.ERROR
        return Progress(request, finish_reason=reason, error=error)

    def _unfinished(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.waiting]


def _input_ids(plan: Plan) -> list[int]:
    return [token_id for scheduled in plan.scheduled for token_id in _row_ids(scheduled)]


def _row_ids(scheduled: ScheduledRequest) -> list[int]:
    tokens = scheduled.request.token_ids[scheduled.start : scheduled.stop]
    return [*tokens, *scheduled.draft_ids]


def _gained(
    draft_ids: Sequence[int], targets: Sequence[Sampled | NoToken]
) -> list[Sampled] | NoToken:
    """Accepted drafts and the bonus token, or why there is none."""
    ids = [None if isinstance(target, NoToken) else target.token_id for target in targets]
    gained: list[Sampled] = []
    for target in targets[: num_accepted(draft_ids, ids) + 1]:
        if isinstance(target, NoToken):
            return target
        gained.append(target)
    return gained
