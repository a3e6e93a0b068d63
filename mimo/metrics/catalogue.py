"""The list: every metric with its labels, their closed values, and buckets.

Nothing unbounded (tenant, request, model, URL, replica) is ever a label.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class _Family:
    """Metrics of the same components, whose names begin alike."""

    prefix: str
    components: tuple[str, ...]
    has_component: bool = True

    def __call__(
        self,
        name: str,
        kind: Kind,
        text: str,
        labels: Mapping[str, Sequence[str] | None] | None = None,
        buckets: tuple[float, ...] = (),
    ) -> Metric:
        return Metric(
            self.prefix + name,
            kind,
            text,
            self.components,
            labels or {},
            buckets,
            self.has_component,
        )


_gateway = _Family("mimo_gateway_", (GATEWAY,), has_component=False)
_encoder = _Family("mimo_encoder_", ENCODERS)
_llm = _Family("mimo_llm_", (LLM,))
_leaf = _Family("mimo_replica_", LEAVES)
_process = _Family("mimo_", COMPONENTS)

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
    _leaf("predicted_wait_seconds", _G, "Wait a new item would see."),
    _leaf("wait_slo_seconds", _G, "Wait the replica is scaled for."),
    _process("replica_serving", _G, "1 while readiness is SERVING."),
    _process("replica_draining", _G, "1 while draining."),
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
    _process(
        "store_lookups_total",
        _C,
        "Lookups by outcome.",
        {"outcome": ("hit", "miss", "torn", "corrupt", "timeout", "bypass")},
    ),
    _process("store_bytes_total", _C, "Embedding bytes moved.", {"op": ("get", "put")}),
    _process(
        "store_op_seconds",
        _H,
        "Duration of store operations.",
        {"op": ("manifest", "chunks", "commit", "lease")},
        FAST,
    ),
    _process("store_breaker_open", _G, "1 while the store is not asked."),
    Metric(
        "mimo_lease_total",
        _C,
        "Leases by outcome.",
        ENCODERS,
        {"outcome": ("acquired", "joined", "stolen", "fenced")},
    ),
    # ── life of a process ──
    _process(
        "startup_seconds",
        _G,
        "Duration of start-up phases.",
        {"phase": ("import", "weights", "calibrate", "probe", "warmup", "total")},
    ),
    _process("drain_seconds", _H, "Duration of a drain.", {}, LONG),
    _process("drain_aborted_requests_total", _C, "Requests cut off by a drain."),
    _process("drain_migrated_requests_total", _C, "Requests moved elsewhere by a drain."),
    Metric(
        "mimo_attention_demoted",
        _G,
        "1 when the start-up probe demoted a backend.",
        LEAVES,
        {"layer_kind": ("full", "band", "window", "mtp", "local")},
    ),
    _process("tls_certificate_expiry_seconds", _G, "Seconds until the certificate ends."),
    _process(
        "build_info",
        _G,
        "Always 1; what is running.",
        {
            "version": None,
            "encoder_fingerprint": None,
            "numeric_profile": None,
            "wire_version": None,
        },
    ),
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
