"""A first generation at start: warms the device up and measures how fast prompts are read."""

import time

from mimo.errors import StartupError
from services.llm.engine.core import EngineCore
from services.llm.engine.request import Request, SamplingParams

MAX_PROMPT = 512
MAX_TOKENS = 4


def calibrate(core: EngineCore) -> float:
    """Prompt tokens per second, of the second of two equal prompts.

    Raises StartupError when the model cannot generate: it would fail every request, too.
    """
    scheduler = core.scheduler
    room = max(scheduler.max_context - MAX_TOKENS, 1)
    length = min(MAX_PROMPT, scheduler.max_step_tokens, room)
    seconds = [_prefill(core, length) for _ in range(2)]
    return length / seconds[-1]


def _prefill(core: EngineCore, length: int) -> float:
    """Seconds of the prompt's only step; the rest of the generation runs too."""
    request = Request(
        request_id="calibration",
        token_ids=[0] * length,
        num_prompt_tokens=length,
        params=SamplingParams(max_tokens=MAX_TOKENS),
        max_draft_tokens=core.max_draft_tokens,
    )
    core.add(request)
    started = time.perf_counter()
    step = core.step()
    seconds = time.perf_counter() - started
    while core.scheduler.num_unfinished:
        step = core.step()
    for progress in step.progress:
        if progress.error is not None:
            raise StartupError(f"a first generation failed: {progress.error.message}")
    return seconds
