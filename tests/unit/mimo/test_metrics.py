"""Metrics are one closed list: unknown names, labels and values are programming errors."""

import pytest

from mimo.errors import Reason
from mimo.metrics import BY_NAME, COMPONENTS, METRICS, Kind, Metrics

SERIES_BUDGET = {"gateway": 650, "vision": 400, "audio": 400, "llm": 500}


def test_names_are_unique_and_counters_end_in_total() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("mimo_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_listed_metric_can_be_driven_and_is_exported(component: str) -> None:
    metrics = Metrics(component)
    for metric in METRICS:
        if component not in metric.components:
            continue
        labels = {name: (values or ("x",))[0] for name, values in metric.labels.items()}
        if metric.kind is Kind.COUNTER:
            metrics.inc(metric.name, 2.0, **labels)
        elif metric.kind is Kind.GAUGE:
            metrics.set(metric.name, 2.0, **labels)
        else:
            metrics.observe(metric.name, 2.0, **labels)
        assert metrics.value(metric.name, **labels) == (1.0 if metric.buckets else 2.0)
    text = metrics.render().decode()
    for metric in METRICS:
        assert (f"# HELP {metric.name}" in text) == (component in metric.components)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("mimo_store_lookups_total", {"outcome": "perhaps"}),
        ("mimo_store_lookups_total", {}),
        ("mimo_store_lookups_total", {"outcome": "hit", "tenant": "t"}),
        ("mimo_llm_output_tokens_total", {}),
        ("mimo_nothing_total", {}),
    ],
)
def test_what_is_not_listed_is_refused(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        Metrics("vision").inc(name, **labels)


def test_every_reason_can_be_counted() -> None:
    metrics = Metrics("gateway")
    for reason in Reason:
        metrics.inc("mimo_gateway_admission_rejected_total", reason=reason.value)
