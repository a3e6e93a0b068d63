"""The decoder's configuration: a checkpoint's config.json, typed, completed and checked.

Field names are those of the checkpoint wherever it has one. What the checkpoint leaves out gets the
default of its published configuration class; what this decoder cannot compute exactly is refused
here, by name, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from mimo.errors import CheckpointError

RouterDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What distinguishes one decoder layer or MTP block from another."""

    index: int  # layer of the KV cache: 0..L-1 the main model, L+n the MTP block n
    sliding: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    v_head_dim: int
    rotary_dim: int  # leading dimensions of a head that rotate
    rope_theta: float
    has_sink: bool
    is_moe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A MiMo-V2 decoder. Build it with :meth:`from_checkpoint`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense layers and MTP blocks
    layernorm_epsilon: float
    max_position_embeddings: int
    initializer_range: float

    layers: tuple[LayerSpec, ...]
    mtp_layer: LayerSpec  # block 0; block n differs only in its index
    num_nextn_predict_layers: int  # MTP blocks

    attention_bias: bool
    attention_value_scale: float
    swa_visible: int  # keys a sliding layer sees, the query's own included

    num_key_value_heads: int  # of full layers; also the number of chunks in a fused qkv_proj
    fused_qkv: bool

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    has_correction_bias: bool
    moe_router_dtype: RouterDtype

    image_token_id: int | None  # placeholders whose rows come from an encoder
    video_token_id: int | None
    audio_token_id: int | None

    @classmethod
    def from_checkpoint(
        cls, config: Mapping[str, Any], profile: Mapping[str, Any] | None = None
    ) -> Self:
        """Read a config.json. ``profile`` overrides entries of its ``numeric_profile``.

        Raises CheckpointError naming the field that is missing, malformed or unsupported.
        """
        whole = _Fields(config)
        fields = _Fields({**whole.object("text_config"), **config})
        numerics = _Fields(
            {**whole.object("numeric_profile"), **(profile or {})}, "numeric_profile."
        )
        _refuse_unsupported(fields)

        num_heads = fields.whole("num_attention_heads")
        fused_qkv = fields.choice("attention_projection_layout", "split", ("split", "fused_qkv"))
        num_kv_heads = fields.whole(
            "num_key_value_heads", None if fused_qkv == "fused_qkv" else num_heads
        )
        hidden_size = fields.whole("hidden_size")
        intermediate_size = fields.whole("intermediate_size")
        num_experts = fields.whole("n_routed_experts", 0, least=0)
        layers = _layers(fields, num_heads, num_kv_heads)
        window = _sliding_window(fields)
        placeholders = {**whole.object("processor_config"), **config}

        return cls(
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            layernorm_epsilon=fields.number("layernorm_epsilon", 1e-6),
            max_position_embeddings=fields.whole("max_position_embeddings"),
            initializer_range=fields.number("initializer_range", 0.02),
            layers=layers[:-1],
            mtp_layer=layers[-1],
            num_nextn_predict_layers=fields.whole("num_nextn_predict_layers", 0, least=0),
            attention_bias=fields.flag("attention_bias", False),
            attention_value_scale=fields.number("attention_value_scale", 1.0),
            swa_visible=numerics.whole("swa_visible", 0 if window is None else window + 1, least=0),
            num_key_value_heads=num_kv_heads,
            fused_qkv=fused_qkv == "fused_qkv",
            moe_intermediate_size=fields.whole("moe_intermediate_size", intermediate_size),
            n_routed_experts=num_experts,
            num_experts_per_tok=fields.whole("num_experts_per_tok", 0, least=0),
            n_group=fields.whole("n_group", 1, least=0),
            topk_group=fields.whole("topk_group", 1, least=0),
            norm_topk_prob=fields.flag("norm_topk_prob", True),
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
            has_correction_bias=fields.get("topk_method", "noaux_tc") == "noaux_tc",
            moe_router_dtype=fields.choice("moe_router_dtype", "float32", ("float32", "bfloat16")),
            image_token_id=placeholders.get("image_token_id"),
            video_token_id=placeholders.get("video_token_id"),
            audio_token_id=placeholders.get("audio_token_id"),
        )

    def __post_init__(self) -> None:
        for spec in (*self.layers, *self.mtp_layers):
            self._check_attention(spec)
        if any(spec.is_moe for spec in self.layers):
            self._check_experts()

    @property
    def mtp_layers(self) -> tuple[LayerSpec, ...]:
        """The MTP blocks, numbered after the main layers."""
        first = self.mtp_layer
        return tuple(
            replace(first, index=first.index + depth)
            for depth in range(self.num_nextn_predict_layers)
        )

    def _check_attention(self, spec: LayerSpec) -> None:
        where = f"layer {spec.index}"
        if spec.num_heads % spec.num_kv_heads:
            raise CheckpointError(
                f"config.json: {where} has {spec.num_heads} query heads, not a multiple of its "
                f"{spec.num_kv_heads} key-value heads"
            )
        if spec.rotary_dim % 2 or not 0 < spec.rotary_dim <= spec.head_dim:
            raise CheckpointError(
                f"config.json: partial_rotary_factor rotates {spec.rotary_dim} of {where}'s "
                f"{spec.head_dim} head dimensions; an even number of them is needed"
            )
        if self.fused_qkv and spec.num_kv_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"config.json: fused qkv_proj has num_key_value_heads = "
                f"{self.num_key_value_heads} chunks, which do not divide {where}'s "
                f"{spec.num_kv_heads} key-value heads"
            )
        if spec.sliding and self.swa_visible < 1:
            raise CheckpointError(
                f"config.json: {where} is sliding, but neither sliding_window_size nor "
                "numeric_profile.swa_visible gives it a key to see"
            )

    def _check_experts(self) -> None:
        groups, experts, topk = self.n_group, self.n_routed_experts, self.num_experts_per_tok
        if groups < 1 or experts % groups or not 1 <= self.topk_group <= groups:
            raise CheckpointError(
                f"config.json: n_routed_experts {experts}, n_group {groups} and topk_group "
                f"{self.topk_group} do not fit together"
            )
        if not 1 <= topk <= experts // groups * self.topk_group:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {topk} is more than a token may choose from"
            )
        if groups > 1 and experts // groups < 2:
            raise CheckpointError("config.json: group-limited routing needs two experts in a group")


def _refuse_unsupported(fields: "_Fields") -> None:
    quantization = fields.object("quantization_config")
    if quantization:
        method = quantization.get("store_dtype") or quantization.get("quant_method")
        if method == "mxfp4":
            raise CheckpointError(
                "config.json: experts are stored as MXFP4, which this decoder does not compute; "
                "use a BF16 checkpoint of the model"
            )
        raise CheckpointError(
            f"config.json: quantization_config.quant_method {method!r} is not supported; "
            "use a BF16 checkpoint of the model"
        )
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.object(name)
        if not (
            set(scaling) <= {"type", "rope_type"}
            and all(value == "default" for value in scaling.values())
        ):
            raise CheckpointError(
                f"config.json: {name} {scaling} is not supported; only plain rotary "
                "embeddings of one position index are computed"
            )
    for name, supported in (
        ("hidden_act", ("silu",)),
        ("scoring_func", ("sigmoid",)),
        ("n_shared_experts", (0,)),
        ("tie_word_embeddings", (False,)),
    ):
        value = fields.get(name, supported[0])
        if value not in supported:
            raise CheckpointError(f"config.json: {name} {value!r} is not supported")


def _layers(fields: "_Fields", num_heads: int, num_kv_heads: int) -> tuple[LayerSpec, ...]:
    """The specs of the main layers, then that of the first MTP block (sliding and dense)."""
    num_layers = fields.whole("num_hidden_layers")
    head_dim = fields.whole("head_dim", fields.whole("hidden_size") // num_heads)
    v_head_dim = fields.whole("v_head_dim", head_dim)
    swa_head_dim = fields.whole("swa_head_dim", head_dim)
    rotary = fields.number("partial_rotary_factor", 1.0)
    theta = fields.number("rope_theta", 10_000.0)
    full = LayerSpec(
        index=0,
        sliding=False,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        rotary_dim=int(head_dim * rotary),
        rope_theta=theta,
        has_sink=fields.flag("add_full_attention_sink_bias", False),
        is_moe=False,
    )
    sliding = LayerSpec(
        index=0,
        sliding=True,
        num_heads=fields.whole("swa_num_attention_heads", num_heads),
        num_kv_heads=fields.whole("swa_num_key_value_heads", num_kv_heads),
        head_dim=swa_head_dim,
        v_head_dim=fields.whole("swa_v_head_dim", swa_head_dim),
        rotary_dim=int(swa_head_dim * rotary),
        rope_theta=fields.number("swa_rope_theta", theta),
        has_sink=fields.flag("add_swa_attention_sink_bias", False),
        is_moe=False,
    )
    kinds = zip(_sliding_pattern(fields, num_layers), _moe_pattern(fields, num_layers), strict=True)
    return (
        *(
            replace(sliding if is_sliding else full, index=index, is_moe=is_moe)
            for index, (is_sliding, is_moe) in enumerate(kinds)
        ),
        replace(sliding, index=num_layers),
    )


def _sliding_pattern(fields: "_Fields", num_layers: int) -> list[bool]:
    pattern = fields.get("hybrid_layer_pattern", None)
    if pattern is not None:
        return fields.per_layer("hybrid_layer_pattern", pattern, num_layers)
    block_size = fields.whole("hybrid_block_size", 0, least=0)
    if block_size:
        return [(index + 1) % block_size != 0 for index in range(num_layers)]
    return [False] * num_layers


def _moe_pattern(fields: "_Fields", num_layers: int) -> list[bool]:
    frequency = fields.get("moe_layer_freq", 0)
    if isinstance(frequency, int):
        return [frequency > 0 and index % frequency == 0 for index in range(num_layers)]
    return fields.per_layer("moe_layer_freq", frequency, num_layers)


def _sliding_window(fields: "_Fields") -> int | None:
    """Two names for one number; each stands in for the other."""
    names = ("sliding_window_size", "sliding_window")
    given = {fields.whole(name, least=0) for name in names if fields.get(name, None) is not None}
    if len(given) > 1:
        raise CheckpointError("config.json: sliding_window and sliding_window_size disagree")
    return given.pop() if given else None


class _Fields:
    """Typed access to a JSON object. A null counts as absent, as published checkpoints use it."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._require(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._malformed(name, f"a whole number of at least {least}", value)
        return value

    def number(self, name: str, default: float) -> float:
        value = self._require(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._malformed(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._require(name, default)
        if not isinstance(value, bool):
            raise self._malformed(name, "true or false", value)
        return value

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> Any:
        value = self._require(name, default)
        if value not in choices:
            raise self._malformed(name, " or ".join(choices), value)
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object of its own; empty when absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self._malformed(name, "an object", value)
        return dict(value)

    def per_layer(self, name: str, value: Any, num_layers: int) -> list[Any]:
        if not isinstance(value, list) or len(value) != num_layers:
            raise self._malformed(name, f"a list of {num_layers} entries", value)
        return [bool(entry) for entry in value]

    def _require(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(f"config.json: field {self._prefix}{name} is missing")
        return value

    def _malformed(self, name: str, expected: str, found: Any) -> CheckpointError:
        return CheckpointError(
            f"config.json: {self._prefix}{name} must be {expected}, found {found!r}"
        )
