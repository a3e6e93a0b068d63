"""How much of a decode step is neither forward pass nor head.

    python -m tests.bench.step_overhead
    python -m tests.bench.step_overhead --model ~/.cache/mimo-serve/bench/models/bench/ours \\
        --dtype bfloat16

Planning, laying out the batch, sampling, committing and what lies between, as shares of whole steps
that decode one token for each of a batch of requests. Prompts are random tokens, nothing is
drafted. The gate is 15 %.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mimo.checkpoint.directory import BUNDLED
from mimo.metrics import LLM, Metrics
from services.llm.engine.core import EngineCore
from services.llm.engine.request import Request, SamplingParams
from services.llm.loading import load
from services.llm.settings import LlmSettings

GATE = 0.15
FIRST_ID = 3  # those before it are special


class Stopwatch:
    """Seconds within the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def main() -> int:
    options = _parse()
    settings = LlmSettings(
        model=str(options.model.expanduser()),
        device="cpu",
        dtype=options.dtype,
        threads=options.threads,
        max_running=max(options.batches),
        max_context=options.input_tokens + options.output_tokens,
        max_draft_tokens=0,
        kv_memory_mib=1024,
    )
    loaded = load(settings, Metrics(LLM))
    core, vocab_size = loaded.core, loaded.facts.vocab_size
    inside = Stopwatch()
    runner: Any = core._runner
    runner.forward, runner.logits = inside.wrap(runner.forward), inside.wrap(runner.logits)
    is_met = True
    for batch in options.batches:
        requests = _requests(batch, options.input_tokens, options.output_tokens, vocab_size)
        steps = _steps(core, requests, inside)
        share = median(1.0 - within / whole for whole, within in steps)
        whole_ms = 1000 * median(whole for whole, _ in steps)
        is_met &= share <= GATE
        print(f"batch {batch:>2}: {share:6.1%} of {whole_ms:.2f} ms, medians of {len(steps)} steps")
    return 0 if is_met else 1


def _requests(batch: int, num_in: int, num_out: int, vocab_size: int) -> list[Request]:
    chance = random.Random(batch)
    return [
        Request(
            request_id=str(number),
            token_ids=[chance.randrange(FIRST_ID, vocab_size) for _ in range(num_in)],
            num_prompt_tokens=num_in,
            params=SamplingParams(max_tokens=num_out),
            max_draft_tokens=0,
        )
        for number in range(batch)
    ]


def _steps(
    core: EngineCore, requests: Sequence[Request], inside: Stopwatch
) -> list[tuple[float, float]]:
    """Seconds of each step in which every request decodes a token: the whole, and inside."""
    for request in requests:
        core.add(request)
    steps = []
    while core.scheduler.num_unfinished:
        before, began = inside.seconds, time.perf_counter()
        step = core.step()
        whole = time.perf_counter() - began
        if [scheduled.num_rows for scheduled in step.plan.scheduled] == [1] * len(requests):
            steps.append((whole, inside.seconds - before))
    return steps


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32], help="by commas")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
