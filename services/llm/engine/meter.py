"""How fast the engine is, and what that means for the next caller."""

from collections.abc import Iterable
from dataclasses import dataclass

from mimo.metrics import LLM, Metrics
from services.llm.engine.core import Progress, Step
from services.llm.engine.request import FinishReason, Request
from services.llm.engine.scheduler import Scheduler
from services.llm.engine.verify import num_accepted

_WEIGHT = 0.05  # of the newest step in the moving averages
_FADE = 0.97  # at each end of a request, of those before it in the rate at which they end


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens waiting for prefill, sequences, ``predicted_wait_s`` of a new request, and
    ``service_s`` that a typical one then takes."""

    waiting_tokens: int
    num_waiting: int
    num_running: int
    tokens_per_second: float
    predicted_wait_s: float
    service_s: float
    ends_per_second: float  # of requests, with every slot taken; 0 while unknown


class Meter:
    """Measures steps. Written by the engine thread; ``load`` may be read from any.

    ``prefill_rate``: tokens per second measured at start; 0 while unknown.
    """

    def __init__(self, metrics: Metrics | None = None, prefill_rate: float = 0.0) -> None:
        self._metrics = metrics or Metrics(LLM)
        self._prefill_rate = prefill_rate
        self._decode_rate = 0.0
        self._full_s = 0.0  # time with every slot taken, and the requests that ended in it;
        self._full_ends = 0.0  # both fade
        self._token_s = 0.0  # from one output token of a sequence to its next
        self._output_tokens = 0.0  # of a request

    def load(self, scheduler: Scheduler, num_present: int | None = None) -> Load:
        """``num_present``: sequences that were let in, those that the engine has not seen yet
        included."""
        waiting = scheduler.num_waiting_tokens
        wait = waiting / self._prefill_rate if self._prefill_rate else 0.0
        num_waiting, num_running = len(scheduler.waiting), len(scheduler.running)
        # Behind a full house a newcomer waits for as many ends as there are others before it.
        if num_present is None:
            num_present = num_waiting + num_running
        num_before = num_present + 1 - scheduler.max_running
        if num_before > 0 and self._full_ends:
            wait = max(wait, num_before * self._full_s / self._full_ends)
        return Load(
            waiting,
            num_waiting,
            num_running,
            self._prefill_rate,
            wait,
            self.service_s(self._output_tokens),
            self._full_ends / self._full_s if self._full_ends else 0.0,
        )

    def service_s(self, max_tokens: float) -> float:
        """How long a request of at most so many tokens will run, if it is like those before it."""
        return min(self._output_tokens, max_tokens) * self._token_s

    def record_admission(self, request: Request) -> None:
        self._metrics.observe("mimo_llm_queue_wait_seconds", request.timing.queue_s)
        self._metrics.inc("mimo_llm_prompt_tokens_total", request.num_found_tokens, source="cached")

    def record_ends(self, ended: Iterable[Progress]) -> None:
        for progress in ended:
            if progress.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                num_tokens = progress.request.num_output_tokens
                self._output_tokens = _average(self._output_tokens, num_tokens)
            if progress.finish_reason is not None:
                self._metrics.inc(
                    "mimo_llm_requests_finished_total", reason=progress.finish_reason.value
                )

    def record_abort(self) -> None:
        self._metrics.inc("mimo_llm_requests_finished_total", reason=FinishReason.ABORT.value)

    def record_step(self, scheduler: Scheduler, step: Step, seconds: float) -> None:
        self._record_state(scheduler)
        if not step.plan.scheduled:
            return
        metrics = self._metrics
        # A step in which no request emitted a token is pure prefill, and so on.
        emitted = sum(len(progress.tokens) for progress in step.progress)
        if len(step.plan.scheduled) >= scheduler.max_running:
            num_ends = sum(1 for progress in step.progress if progress.finish_reason is not None)
            kept = _FADE**num_ends
            self._full_s = kept * self._full_s + seconds
            self._full_ends = kept * self._full_ends + num_ends
        if emitted:
            num_emitters = sum(1 for progress in step.progress if progress.tokens)
            self._token_s = _average(self._token_s, seconds * num_emitters / emitted)
        num_decodes = sum(1 for s in step.plan.scheduled if s.is_decode)
        prefilled = sum(s.num_tokens for s in step.plan.scheduled if not s.is_decode)
        phase = "mixed" if num_decodes and prefilled else "prefill" if prefilled else "decode"
        metrics.observe("mimo_llm_step_seconds", seconds, phase=phase)
        metrics.observe("mimo_llm_batch_sequences", len(step.plan.scheduled))
        metrics.inc("mimo_llm_prompt_tokens_total", prefilled, source="computed")
        metrics.inc("mimo_llm_output_tokens_total", emitted)
        metrics.inc("mimo_llm_preemptions_total", len(step.plan.preempted), reason="blocks")
        metrics.inc("mimo_llm_plain_fallback_total", len(step.lost_drafting), reason="draft_error")
        self._record_drafts(step)
        self.record_ends(step.progress)
        if 2 * prefilled > scheduler.max_step_tokens:  # short steps say little about capacity
            self._prefill_rate = _average(self._prefill_rate, prefilled / max(seconds, 1e-9))
            metrics.set("mimo_llm_capacity_tokens_per_second", self._prefill_rate, phase="prefill")
        if phase == "decode":
            self._decode_rate = _average(self._decode_rate, emitted / max(seconds, 1e-9))
            metrics.set("mimo_llm_capacity_tokens_per_second", self._decode_rate, phase="decode")

    def _record_drafts(self, step: Step) -> None:
        gained = {progress.request: progress.tokens for progress in step.progress}
        for scheduled in step.plan.scheduled:
            ids = [token.token_id for token in gained.get(scheduled.request, ())]
            accepted = num_accepted(scheduled.draft_ids, [*ids, None])
            for position in range(len(scheduled.draft_ids)):
                label = str(position + 1)
                self._metrics.inc("mimo_llm_draft_tokens_total", position=label)
                if position < accepted:
                    self._metrics.inc("mimo_llm_accepted_tokens_total", position=label)

    def _record_state(self, scheduler: Scheduler) -> None:
        metrics, blocks = self._metrics, scheduler.blocks
        preempted = sum(1 for request in scheduler.waiting if request.num_preemptions)
        metrics.set("mimo_llm_requests", len(scheduler.running), state="running")
        metrics.set("mimo_llm_requests", len(scheduler.waiting) - preempted, state="waiting")
        metrics.set("mimo_llm_requests", preempted, state="preempted")
        metrics.set("mimo_llm_waiting_prompt_tokens", scheduler.num_waiting_tokens)
        demand = sum(-(-r.num_tokens // blocks.block_size) for r in scheduler.waiting)
        metrics.set("mimo_llm_kv_demand_blocks", demand)
        for group in blocks.groups:
            used = blocks.num_used(group.name)
            metrics.set("mimo_llm_kv_blocks", group.num_blocks, pool=group.name, state="total")
            cached = blocks.num_cached(group.name)
            metrics.set("mimo_llm_kv_blocks", used, pool=group.name, state="used")
            metrics.set("mimo_llm_kv_blocks", cached, pool=group.name, state="cached")


def _average(previous: float, newest: float) -> float:
    return newest if previous == 0.0 else previous + _WEIGHT * (newest - previous)
