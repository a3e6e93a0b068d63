"""From the seconds of many rounds to rates, ratios and gates. Pure."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "mimo"
DRAFTING = "mimo-mtp"


@dataclass(frozen=True)
class Round:
    """Seconds of a batch: up to the first tokens, and up to the last."""

    prefill_s: float
    total_s: float


@dataclass(frozen=True)
class Shape:
    """What every engine is given: so many sequences of so many tokens in and out."""

    batch: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Gate:
    """A ratio that must (``is_goal``: should) be reached: ours to the best of ``rivals``."""

    what: str
    ours: str
    rivals: tuple[str, ...]
    batches: tuple[int, ...]
    rate: str
    least: float
    model: str
    is_goal: bool = True


PEERS = ("transformers", "vllm", "vllm-compiled", "llama")
RATE, PREFILL = "tokens_per_s", "prefill_tokens_per_s"
GATES = (
    Gate("transformers", OURS, ("transformers",), (1, 8, 32), RATE, 1.5, "bench", is_goal=False),
    Gate("the best peer", OURS, PEERS, (8, 32), RATE, 1.2, "bench"),
    Gate("compiled vLLM", OURS, ("vllm-compiled",), (1,), RATE, 1.3, "bench"),
    Gate("llama.cpp", DRAFTING, ("llama",), (1,), RATE, 1.0, "bundled"),
    Gate("vLLM, prefill", OURS, ("vllm", "vllm-compiled"), (1, 8, 32), PREFILL, 1.0, "bench"),
)


def rates(rounds: Sequence[Round], shape: Shape) -> dict[str, dict[str, float]]:
    """Best and median of three rates, in tokens per second of the whole batch: of everything
    generated over everything spent, of decoding alone (what follows the first token), and of the
    prompt. Needs a round; noise that hides the decoding leaves 0 of its rate."""
    generated = shape.batch * shape.output_tokens
    decoded = shape.batch * (shape.output_tokens - 1)
    prompt = shape.batch * shape.input_tokens
    return {
        RATE: _best_and_median([generated / each.total_s for each in rounds]),
        "decode_tokens_per_s": _best_and_median(
            [
                decoded / (each.total_s - each.prefill_s)
                for each in rounds
                if each.total_s > each.prefill_s
            ]
            or [0.0]
        ),
        PREFILL: _best_and_median([prompt / each.prefill_s for each in rounds]),
    }


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many tokens equal ours before the first of their sequence that does not, and of how many.
    Greedy sequences that have parted read different texts, so that what follows says nothing."""
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        pairs = zip(mine, other, strict=True)
        same += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same, sum(map(len, ours))


def verdicts(
    model: str, by_engine: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Every gate that can be judged: engines that did not run are no rivals. ``by_engine``: rates
    by engine and batch. The ratio is of the best rounds, which neighbours disturb least; that of
    the medians stands beside it."""
    found = []
    for gate in GATES:
        for batch in gate.batches if gate.model == model else ():
            ours = by_engine.get(gate.ours, {}).get(batch)
            rivals = {
                name: by_engine[name][batch][gate.rate]
                for name in gate.rivals
                if batch in by_engine.get(name, {})
            }
            if ours is None or not rivals:
                continue
            rival = max(rivals, key=lambda name: rivals[name]["best"])
            ratio = ours[gate.rate]["best"] / rivals[rival]["best"]
            found.append(
                {
                    "what": gate.what,
                    "batch": batch,
                    "rival": rival,
                    "ratio_of_bests": ratio,
                    "ratio_of_medians": ours[gate.rate]["median"] / rivals[rival]["median"],
                    "least": gate.least,
                    "kind": "goal" if gate.is_goal else "gate",
                    "reached": ratio >= gate.least,
                }
            )
    return found


def _best_and_median(values: Sequence[float]) -> dict[str, float]:
    return {"best": max(values), "median": statistics.median(values)}
