"""From samples to figures, all of them in one dict that is JSON as it stands."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mimo.cli.load.sample import Sample
from mimo.errors import ConfigError

PERCENTILES = (50, 90, 99)

LATENCIES: Mapping[str, Callable[[Sample], Sequence[float]]] = {
    "ttft": lambda sample: [sample.ttft_s],
    "itl": lambda sample: sample.gaps_s,
    "tpot": lambda sample: [] if sample.tpot_s is None else [sample.tpot_s],
    "e2e": lambda sample: [sample.e2e_s],
    "send_lag": lambda sample: [sample.sent - sample.due],
}
LIMITED = ("ttft", "tpot", "e2e")


def summarise(samples: Sequence[Sample], limits_ms: Mapping[str, float]) -> dict[str, Any]:
    """Figures of at least one sample.

    Latencies, tokens and rates are of the answers that came to their end; rates are over the time
    from the first request due to the last word. ``limits_ms`` says what a good answer takes at
    most, by names of ``LIMITED``.
    """
    seconds = max(s.ended for s in samples) - min(s.due for s in samples)
    answered = [sample for sample in samples if sample.is_ok]
    kinds = sorted({sample.kind for sample in samples})
    return {
        "seconds": seconds,
        "requests": _outcomes(samples),
        "tokens": _tokens(answered),
        "rates": _rates(answered, seconds, limits_ms),
        "latency_ms": {name: latency(answered, name) for name in LATENCIES},
        "by_kind": {kind: _of_kind([s for s in samples if s.kind == kind]) for kind in kinds},
        "embeddings": _embeddings(answered),
        "speculation": _speculation(answered),
    }


def latency(answered: Iterable[Sample], name: str) -> dict[str, float] | None:
    """Milliseconds: mean, percentiles and the most; None when nothing was measured."""
    values = [1e3 * value for sample in answered for value in LATENCIES[name](sample)]
    if not values:
        return None
    ranks = np.percentile(values, PERCENTILES)
    named = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, ranks, strict=True)}
    return {"mean": sum(values) / len(values), **named, "max": max(values)}


def parse_limits(text: str) -> dict[str, float]:
    """``ttft=500,tpot=50`` as a dict of milliseconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in LIMITED or limits[name] <= 0:
            raise ConfigError(f"--slo: {part!r} is not one of {', '.join(LIMITED)}=MILLISECONDS")
    return limits


def _outcomes(samples: Sequence[Sample]) -> dict[str, Any]:
    errors = Counter(f"{s.error.code} {s.error.reason}" for s in samples if s.error is not None)
    num_ok = sum(sample.is_ok for sample in samples)
    num_refused = sum(sample.is_refused for sample in samples)
    return {
        "sent": len(samples),
        "ok": num_ok,
        "refused": num_refused,
        "failed": len(samples) - num_ok - num_refused,
        "errors": dict(sorted(errors.items())),
    }


def _tokens(answered: Sequence[Sample]) -> dict[str, Any]:
    details = [sample.usage["prompt_tokens_details"] for sample in answered]
    cached = [detail["cached_tokens"] for detail in details]
    prompt = sum(sample.usage["prompt_tokens"] for sample in answered)
    kinds = ("text", "image", "video", "audio")
    return {
        "prompt": prompt,
        "prompt_by_kind": {
            kind: sum(detail[f"{kind}_tokens"] for detail in details) for kind in kinds
        },
        "output": sum(sample.usage["completion_tokens"] for sample in answered),
        "prefix_hits": sum(tokens > 0 for tokens in cached),
        "prefix_saved": sum(cached),
        "prefix_saved_share": sum(cached) / prompt if prompt else 0.0,
    }


def _rates(
    answered: Sequence[Sample], seconds: float, limits_ms: Mapping[str, float]
) -> dict[str, float | None]:
    good = sum(_is_good(sample, limits_ms) for sample in answered)
    tokens = {
        "output_tokens_per_s": "completion_tokens",
        "prompt_tokens_per_s": "prompt_tokens",
    }
    return {
        "requests_per_s": len(answered) / seconds,
        "goodput_per_s": good / seconds if limits_ms else None,
        **{
            name: sum(sample.usage[field] for sample in answered) / seconds
            for name, field in tokens.items()
        },
    }


def _is_good(sample: Sample, limits_ms: Mapping[str, float]) -> bool:
    return all(
        1e3 * value <= most for name, most in limits_ms.items() for value in LATENCIES[name](sample)
    )


def _of_kind(samples: Sequence[Sample]) -> dict[str, Any]:
    answered = [sample for sample in samples if sample.is_ok]
    return {
        "sent": len(samples),
        "ok": len(answered),
        **{f"{name}_ms": latency(answered, name) for name in ("ttft", "e2e")},
    }


def _embeddings(answered: Sequence[Sample]) -> dict[str, dict[str, int]]:
    """How many items of each modality were found, made or joined."""
    found: dict[str, Counter[str]] = {}
    for sample in answered:
        for item in sample.report["items"]:
            found.setdefault(item["modality"], Counter())[item["cache"]] += 1
    return {modality: dict(sorted(counts.items())) for modality, counts in sorted(found.items())}


def _speculation(answered: Sequence[Sample]) -> dict[str, Any]:
    """``acceptance_length``: tokens per step that verified drafts, the one of its own included;
    None when nothing was drafted."""
    drafted, accepted = (
        _added(sample.report["speculation"][name] for sample in answered)
        for name in ("drafted", "accepted")
    )
    length = 1 + sum(accepted) / drafted[0] if drafted else None
    return {"drafted": drafted, "accepted": accepted, "acceptance_length": length}


def _added(rows: Iterable[Sequence[int]]) -> list[int]:
    """Sums by position of rows of any lengths."""
    sums: list[int] = []
    for row in rows:
        sums += [0] * (len(row) - len(sums))
        for position, count in enumerate(row):
            sums[position] += count
    return sums
