"""How fast the engine is, and what that means for the next caller."""

from collections.abc import Iterable
from dataclasses import dataclass

from mimo.metrics import LLM, Metrics
from services.llm.engine.core import Progress, Step
from services.llm.engine.request import FinishReason
from services.llm.engine.scheduler import Scheduler

_WEIGHT = 0.05  # of the newest step in the moving averages


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens waiting for prefill and rows of a step; ``predicted_wait_s`` of a new request."""

    waiting_tokens: int
    num_running: int
    tokens_per_second: float
    predicted_wait_s: float


class Meter:
    """Measures steps. Written by the engine thread; ``load`` may be read from any.

    ``prefill_rate``: tokens per second measured at start; 0 while unknown.
    """

    def __init__(self, metrics: Metrics | None = None, prefill_rate: float = 0.0) -> None:
        self._metrics = metrics or Metrics(LLM)
        self._prefill_rate = prefill_rate
        self._decode_rate = 0.0

    def load(self, scheduler: Scheduler) -> Load:
        waiting = scheduler.num_waiting_tokens
        wait = waiting / self._prefill_rate if self._prefill_rate else 0.0
        return Load(waiting, len(scheduler.running), self._prefill_rate, wait)

    def record_admission(self, queue_s: float) -> None:
        self._metrics.observe("mimo_llm_queue_wait_seconds", queue_s)

    def record_ends(self, ended: Iterable[Progress]) -> None:
        for progress in ended:
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
        accepted = {p.request: len(p.tokens) - 1 for p in step.progress}
        for scheduled in step.plan.scheduled:
            for position in range(len(scheduled.draft_ids)):
                label = str(position + 1)
                self._metrics.inc("mimo_llm_draft_tokens_total", position=label)
                if position < accepted.get(scheduled.request, 0):
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
            metrics.set("mimo_llm_kv_blocks", used, pool=group.name, state="used")


def _average(previous: float, newest: float) -> float:
    return newest if previous == 0.0 else previous + _WEIGHT * (newest - previous)
