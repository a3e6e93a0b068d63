"""The figures as people read them. Narrow enough for 80 columns."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from mimo.cli.load.report import PERCENTILES

LATENCY_NAMES = {
    "ttft": "first token (TTFT)",
    "itl": "between deliveries (ITL)",
    "tpot": "per later token (TPOT)",
    "e2e": "whole answer (E2E)",
    "send_lag": "sent late by",
}


def tables(figures: Mapping[str, Any]) -> Group:
    """What ``summarise`` returned: counts and rates, then latencies, then kinds if several."""
    parts = [_facts(figures), _latencies(figures["latency_ms"])]
    if len(figures["by_kind"]) > 1:
        parts.append(_kinds(figures["by_kind"]))
    return Group(*(line for part in parts for line in ("", part)))


def _facts(figures: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for name, value in _fact_rows(figures):
        table.add_row(name, value)
    return table


def _fact_rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    requests, tokens, rates = figures["requests"], figures["tokens"], figures["rates"]
    outcomes = ", ".join(f"{requests[name]} {name}" for name in ("ok", "refused", "failed"))
    yield "requests", f"{requests['sent']} sent: {outcomes}"
    for error, count in requests["errors"].items():
        yield "", f"{count} x {error}"
    yield "duration", f"{figures['seconds']:.2f} s"
    yield "requests/s", f"{rates['requests_per_s']:.2f}"
    if rates["goodput_per_s"] is not None:
        yield "within limits/s", f"{rates['goodput_per_s']:.2f}"
    yield "output tokens/s", f"{rates['output_tokens_per_s']:.1f} ({tokens['output']} tokens)"
    by_kind = ", ".join(f"{n} {kind}" for kind, n in tokens["prompt_by_kind"].items() if n)
    yield "prompt tokens/s", f"{rates['prompt_tokens_per_s']:.1f} ({by_kind or 'none'})"
    share = f"{tokens['prefix_saved_share']:.0%} of the prompts' tokens"
    yield "prefix cache", f"{tokens['prefix_hits']} hits saved {tokens['prefix_saved']}, {share}"
    for modality, counts in figures["embeddings"].items():
        yield f"{modality} embeddings", ", ".join(f"{n} {name}" for name, n in counts.items())
    yield "drafts", _drafts(figures["speculation"])


def _drafts(speculation: Mapping[str, Any]) -> str:
    if speculation["acceptance_length"] is None:
        return "none"
    pairs = zip(speculation["accepted"], speculation["drafted"], strict=False)
    shares = ", ".join(f"{accepted / drafted:.0%}" for accepted, drafted in pairs)
    return f"acceptance length {speculation['acceptance_length']:.2f} (by position {shares})"


def _latencies(latencies: Mapping[str, Mapping[str, float] | None]) -> Table:
    columns = ("mean", *(f"p{rank}" for rank in PERCENTILES), "max")
    table = _figure_table("milliseconds", *columns)
    for name, label in LATENCY_NAMES.items():
        values = latencies[name]
        if values is not None and values["max"] > 0:  # a closed loop is never late
            table.add_row(label, *(f"{values[column]:.1f}" for column in columns))
    return table


def _kinds(by_kind: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("e2e_ms", "p50"), ("e2e_ms", "p99"))
    names = (f"{name.removesuffix('_ms').upper()} {rank}" for name, rank in columns)
    table = _figure_table("milliseconds by kind", "ok", *names)
    for kind, values in by_kind.items():
        cells = (
            f"{values[name][rank]:.1f}" if values[name] is not None else "-"
            for name, rank in columns
        )
        table.add_row(kind, f"{values['ok']}/{values['sent']}", *cells)
    return table


def _figure_table(label: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(label, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
