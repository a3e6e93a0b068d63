"""Every metric of the system: name, labels, their closed values, buckets. One list.

Recording rules, alerts and dashboards are checked against :data:`METRICS`. A label value outside
its enumeration is a programming error and raises; nothing unbounded (tenant, request, model, URL,
replica) is ever a label.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mimo.errors import Reason


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TTFT = (0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 4, 6, 10, 20, 40)
ITL = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
RATIO = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
# Patches of the vision tower and seconds of audio share one axis: both are "work".
WORK = (0.5, 1, 2, 5, 10, 30, 64, 256, 300, 1024, 1800, 4096, 16384, 65536, 262144, 1048576)
TOKENS = (1, 2, 4, 8, 16, 32)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

GATEWAY, VISION, AUDIO, LLM = "gateway", "vision", "audio", "llm"
COMPONENTS = (GATEWAY, VISION, AUDIO, LLM)
ENCODERS = (VISION, AUDIO)
LEAVES = (VISION, AUDIO, LLM)

_API = {"api": ("grpc", "rest")}
_METHODS = ("generate", "count_tokens", "upload", "transcribe", "models")
_GRPC_CODES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS "
    "PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED "
    "INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED"
).split()
_REASONS = tuple(reason.value for reason in Reason)
_MODALITIES = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``labels`` maps a label to its closed values; None marks build facts."""

    name: str
    kind: Kind
    help: str
    components: tuple[str, ...]
    labels: Mapping[str, Sequence[str] | None] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    has_component: bool = True


def _gateway(
    name: str,
    kind: Kind,
    text: str,
    labels: Mapping[str, Sequence[str]] | None = None,
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(f"mimo_gateway_{name}", kind, text, (GATEWAY,), labels or {}, buckets, False)


def _encoder(
    name: str,
    kind: Kind,
    text: str,
    labels: Mapping[str, Sequence[str]] | None = None,
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(f"mimo_encoder_{name}", kind, text, ENCODERS, labels or {}, buckets)


def _llm(
    name: str,
    kind: Kind,
    text: str,
    labels: Mapping[str, Sequence[str]] | None = None,
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(f"mimo_llm_{name}", kind, text, (LLM,), labels or {}, buckets)


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS: tuple[Metric, ...] = (
    # ── gateway ──
    _gateway(
        "requests_total",
        _C,
        "Finished public calls.",
        {**_API, "method": _METHODS, "code": _GRPC_CODES},
    ),
    _gateway("requests_in_flight", _G, "Public calls being served.", _API),
    _gateway(
        "request_duration_seconds",
        _H,
        "Whole duration of a public call.",
        {**_API, "outcome": ("ok", "client_error", "server_error", "shed", "cancelled")},
        LONG,
    ),
    _gateway(
        "ttft_seconds",
        _H,
        "Time to the first token of a successful stream.",
        {"media": ("none", "image", "video", "audio", "mixed", "large")},
        TTFT,
    ),
    _gateway("itl_seconds", _H, "Gap between token events per token.", None, ITL),
    _gateway("tokens_per_event", _H, "Tokens in one event.", None, TOKENS),
    _gateway(
        "dispatched_work_total",
        _C,
        "Encoder work dispatched, first attempts.",
        {"component": ENCODERS},
    ),
    _gateway(
        "dispatched_work_squared_total",
        _C,
        "Sum over requests of their squared encoder work.",
        {"component": ENCODERS},
    ),
    _gateway(
        "dispatched_requests_total",
        _C,
        "Requests with work for a component.",
        {"component": LEAVES},
    ),
    _gateway(
        "dispatched_prompt_tokens_total",
        _C,
        "Prompt tokens sent to decoders, media included.",
        {"component": (LLM,)},
    ),
    _gateway(
        "held_work", _G, "Encoder work planned and not yet accepted.", {"component": ENCODERS}
    ),
    _gateway(
        "redispatched_total",
        _C,
        "Work sent again to another replica.",
        {
            "component": LEAVES,
            "reason": ("unavailable", "draining", "embedding_missing", "fingerprint", "deadline"),
        },
    ),
    _gateway("admission_rejected_total", _C, "Requests refused.", {"reason": _REASONS}),
    _gateway("media_decode_seconds", _H, "Decoding one media item.", {"kind": _MODALITIES}, FAST),
    _gateway(
        "media_bytes_total",
        _C,
        "Compressed media bytes taken in.",
        {"kind": _MODALITIES, "source": ("inline", "url", "upload")},
    ),
    _gateway(
        "upstream_endpoints",
        _G,
        "Known replicas by state.",
        {"component": LEAVES, "state": ("ready", "connecting", "failing", "draining")},
    ),
    _gateway("event_loop_lag_seconds", _H, "How late the event loop wakes.", None, FAST),
    # ── encoders ──
    _encoder(
        "items_total",
        _C,
        "Items by how they ended.",
        {
            "kind": _MODALITIES,
            "outcome": (
                "encoded",
                "hit",
                "joined",
                "repaired",
                "expired",
                "cancelled",
                "rejected",
                "failed",
            ),
        },
    ),
    _encoder("admitted_work_total", _C, "Work accepted into the queue."),
    _encoder("completed_work_total", _C, "Work encoded."),
    _encoder("busy_seconds_total", _C, "Seconds the device worked."),
    _encoder("queued_work", _G, "Work waiting for the device."),
    _encoder("running_work", _G, "Work on the device."),
    _encoder("capacity_work_per_second", _G, "Measured rate of the device."),
    _encoder("queue_wait_seconds", _H, "From admission to the device.", None, FAST),
    _encoder(
        "encode_seconds",
        _H,
        "Time per stage.",
        {"stage": ("fetch", "preprocess", "tower", "store_put")},
        FAST,
    ),
    _encoder("batch_work", _H, "Work in one batch.", None, WORK),
    _encoder("batch_fill_ratio", _H, "Work in a batch over its budget.", None, RATIO),
    # ── every leaf ──
    Metric("mimo_replica_predicted_wait_seconds", _G, "Wait a new item would see.", LEAVES),
    Metric("mimo_replica_wait_slo_seconds", _G, "Wait the replica is scaled for.", LEAVES),
    Metric("mimo_replica_serving", _G, "1 while readiness is SERVING.", COMPONENTS),
    Metric("mimo_replica_draining", _G, "1 while draining.", COMPONENTS),
    # ── language model ──
    _llm("requests", _G, "Requests by state.", {"state": ("running", "waiting", "preempted")}),
    _llm("waiting_prompt_tokens", _G, "Prompt tokens waiting for prefill."),
    _llm("kv_demand_blocks", _G, "Blocks that waiting and running requests need."),
    _llm(
        "kv_blocks",
        _G,
        "KV blocks; used excludes evictable prefix blocks.",
        {"pool": ("full", "window"), "state": ("total", "used", "cached")},
    ),
    _llm("capacity_tokens_per_second", _G, "Measured rate.", {"phase": ("prefill", "decode")}),
    _llm("prompt_tokens_total", _C, "Prompt tokens.", {"source": ("computed", "cached")}),
    _llm("output_tokens_total", _C, "Sampled tokens."),
    _llm(
        "requests_finished_total",
        _C,
        "Requests by how they ended.",
        {"reason": ("stop", "length", "abort", "error")},
    ),
    _llm("queue_wait_seconds", _H, "From arrival to the first step.", None, FAST),
    _llm(
        "step_seconds",
        _H,
        "Duration of one engine step.",
        {"phase": ("prefill", "decode", "mixed")},
        FAST,
    ),
    _llm("batch_sequences", _H, "Sequences in one step.", None, SEQUENCES),
    _llm("draft_tokens_total", _C, "Drafted tokens.", {"position": ("1", "2", "3")}),
    _llm("accepted_tokens_total", _C, "Accepted drafts.", {"position": ("1", "2", "3")}),
    _llm(
        "preemptions_total",
        _C,
        "Requests that gave their blocks back.",
        {"reason": ("blocks", "priority")},
    ),
    _llm(
        "plain_fallback_total",
        _C,
        "Requests that went on without drafts.",
        {"reason": ("draft_error", "load")},
    ),
    # ── store ──
    Metric(
        "mimo_store_lookups_total",
        _C,
        "Lookups by outcome.",
        COMPONENTS,
        {"outcome": ("hit", "miss", "torn", "corrupt", "timeout", "bypass")},
    ),
    Metric(
        "mimo_store_bytes_total", _C, "Embedding bytes moved.", COMPONENTS, {"op": ("get", "put")}
    ),
    Metric(
        "mimo_store_op_seconds",
        _H,
        "Duration of store operations.",
        COMPONENTS,
        {"op": ("manifest", "chunks", "commit", "lease")},
        FAST,
    ),
    Metric("mimo_store_breaker_open", _G, "1 while the store is not asked.", COMPONENTS),
    Metric(
        "mimo_lease_total",
        _C,
        "Leases by outcome.",
        ENCODERS,
        {"outcome": ("acquired", "joined", "stolen", "fenced")},
    ),
    # ── life of a process ──
    Metric(
        "mimo_startup_seconds",
        _G,
        "Duration of start-up phases.",
        COMPONENTS,
        {"phase": ("import", "weights", "calibrate", "probe", "warmup", "total")},
    ),
    Metric("mimo_drain_seconds", _H, "Duration of a drain.", COMPONENTS, {}, LONG),
    Metric("mimo_drain_aborted_requests_total", _C, "Requests cut off by a drain.", COMPONENTS),
    Metric(
        "mimo_drain_migrated_requests_total", _C, "Requests moved elsewhere by a drain.", COMPONENTS
    ),
    Metric(
        "mimo_attention_demoted",
        _G,
        "1 when the start-up probe demoted a backend.",
        LEAVES,
        {"layer_kind": ("full", "band", "window", "mtp", "local")},
    ),
    Metric(
        "mimo_tls_certificate_expiry_seconds", _G, "Seconds until the certificate ends.", COMPONENTS
    ),
    Metric(
        "mimo_build_info",
        _G,
        "Always 1; what is running.",
        COMPONENTS,
        {
            "version": None,
            "encoder_fingerprint": None,
            "numeric_profile": None,
            "wire_version": None,
        },
    ),
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


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
