"""The instruments of a process: what the list says, and nothing else, can be counted."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mimo.metrics.catalogue import BY_NAME, COMPONENTS, METRICS, Kind, Metric


class Metrics:
    """The instruments of one process, with its ``component`` label filled in.

    ``inc``, ``set`` and ``observe`` raise ValueError for a name, label or label value that
    :data:`METRICS` does not list.
    """

    def __init__(self, component: str) -> None:
        if component not in COMPONENTS:
            raise ValueError(f"unknown component {component!r}")
        self.component = component
        self.registry = CollectorRegistry()
        self._instruments: dict[str, Counter | Gauge | Histogram] = {}
        self._children: dict[tuple[object, ...], Counter | Gauge | Histogram] = {}
        for metric in METRICS:
            if component in metric.components:
                self._instruments[metric.name] = self._create(metric)

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        child = self._child(name, Kind.COUNTER, labels)
        assert isinstance(child, Counter)
        child.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        child = self._child(name, Kind.GAUGE, labels)
        assert isinstance(child, Gauge)
        child.set(value)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Move a gauge up or down."""
        child = self._child(name, Kind.GAUGE, labels)
        assert isinstance(child, Gauge)
        child.inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one value of a histogram."""
        child = self._child(name, Kind.HISTOGRAM, labels)
        assert isinstance(child, Histogram)
        child.observe(value)

    def value(self, name: str, **labels: str) -> float:
        """Value of a counter or gauge, count of a histogram; 0 when never touched."""
        metric = BY_NAME[name]
        if metric.has_component:
            labels = {"component": self.component, **labels}
        sample = f"{name}_count" if metric.kind is Kind.HISTOGRAM else name
        return self.registry.get_sample_value(sample, labels) or 0.0

    def render(self) -> bytes:
        """The Prometheus text exposition of this process."""
        return generate_latest(self.registry)

    def _create(self, metric: Metric) -> Counter | Gauge | Histogram:
        names = [*(["component"] if metric.has_component else []), *metric.labels]
        if metric.kind is Kind.HISTOGRAM:
            return Histogram(
                metric.name, metric.help, names, buckets=metric.buckets, registry=self.registry
            )
        if metric.kind is Kind.COUNTER:
            return Counter(metric.name, metric.help, names, registry=self.registry)
        return Gauge(metric.name, metric.help, names, registry=self.registry)

    def _child(
        self, name: str, kind: Kind, labels: Mapping[str, str]
    ) -> Counter | Gauge | Histogram:
        """Checked and looked up once for each set of labels, which are few."""
        key = (name, kind, *labels.items())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._find_child(name, kind, labels)
        return child

    def _find_child(
        self, name: str, kind: Kind, labels: Mapping[str, str]
    ) -> Counter | Gauge | Histogram:
        metric = BY_NAME.get(name)
        instrument = self._instruments.get(name)
        if metric is None or instrument is None or metric.kind is not kind:
            raise ValueError(f"{self.component} has no {kind} named {name}")
        if set(labels) != set(metric.labels):
            raise ValueError(f"{name} takes labels {sorted(metric.labels)}, got {sorted(labels)}")
        for label, value in labels.items():
            allowed = metric.labels[label]
            if allowed is not None and value not in allowed:
                raise ValueError(f"{name}: {label}={value!r} is not one of {list(allowed)}")
        filled = {"component": self.component, **labels} if metric.has_component else dict(labels)
        return instrument.labels(**filled) if filled else instrument
