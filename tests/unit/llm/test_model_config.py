"""Reading a config.json: defaults, derived layers, refusals."""

from typing import Any

import pytest

from mimo.errors import CheckpointError
from services.llm.model.config import DecoderConfig
from tests.support import golden_decoder

MINIMAL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def parse(**fields: Any) -> DecoderConfig:
    return DecoderConfig.from_checkpoint(MINIMAL | fields)


def sliding(config: DecoderConfig) -> list[int]:
    return [spec.index for spec in config.layers if spec.sliding]


def test_absent_fields_take_the_published_defaults() -> None:
    config = parse()
    assert config.layernorm_epsilon == 1e-6
    assert config.attention_value_scale == 1.0
    assert config.routed_scaling_factor == 1.0
    assert config.norm_topk_prob
    assert config.num_nextn_predict_layers == 0
    assert not config.fused_qkv
    assert sliding(config) == []
    layer = config.layers[0]
    assert (layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.rotary_dim) == (
        4,
        16,
        16,
        16,
    )
    assert layer.rope_theta == 10_000
    assert not layer.has_sink
    assert not layer.is_moe


def test_null_counts_as_absent() -> None:
    assert (
        parse(attention_value_scale=None, routed_scaling_factor=None, n_shared_experts=None)
        == parse()
    )


def test_sliding_fields_fall_back_to_the_full_ones() -> None:
    config = parse(
        num_key_value_heads=2,
        head_dim=24,
        v_head_dim=12,
        partial_rotary_factor=0.334,
        rope_theta=5e6,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0],
        sliding_window=8,
    )
    full, window = config.layers[0], config.layers[1]
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.v_head_dim) == (4, 2, 24, 12)
    # The sliding value width defaults to the sliding head width, not to the full value width.
    assert (window.num_heads, window.num_kv_heads, window.head_dim, window.v_head_dim) == (
        4,
        2,
        24,
        24,
    )
    assert full.rotary_dim == window.rotary_dim == 8
    assert window.rope_theta == 5e6
    assert config.swa_visible == 9


def test_published_shape_of_the_golden_model() -> None:
    config = DecoderConfig.from_checkpoint(golden_decoder.config("base_vis6"))
    assert sliding(config) == [1, 2, 4]
    assert [spec.is_moe for spec in config.layers] == [False, True, True, True, True]
    assert [spec.has_sink for spec in config.layers] == [False, True, True, False, True]
    assert [spec.index for spec in config.mtp_layers] == [5, 6, 7]
    assert all(spec.sliding and spec.has_sink and not spec.is_moe for spec in config.mtp_layers)
    assert config.swa_visible == 6


def test_layer_pattern_from_the_block_size() -> None:
    config = parse(hybrid_block_size=3, sliding_window_size=4)
    assert sliding(config) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("frequency", "sparse"),
    [
        (None, []),
        (0, []),
        (1, [0, 1, 2, 3, 4, 5]),
        (2, [0, 2, 4]),
        ([0, 1, True, False, 1, 1], [1, 2, 4, 5]),
    ],
)
def test_sparse_layers(frequency: Any, sparse: list[int]) -> None:
    config = parse(moe_layer_freq=frequency, n_routed_experts=4, num_experts_per_tok=2)
    assert [spec.index for spec in config.layers if spec.is_moe] == sparse


@pytest.mark.parametrize("name", ["sliding_window", "sliding_window_size"])
def test_either_name_of_the_window_does(name: str) -> None:
    assert parse(hybrid_layer_pattern=[1] * 6, **{name: 128}).swa_visible == 129


def test_profile_overrides_the_checkpoints_numeric_profile() -> None:
    fields = MINIMAL | {"sliding_window": 128, "numeric_profile": {"swa_visible": 128}}
    assert DecoderConfig.from_checkpoint(fields).swa_visible == 128
    assert DecoderConfig.from_checkpoint(fields, {"swa_visible": 100}).swa_visible == 100


def test_fields_of_a_nested_text_config_stand_in_for_missing_ones() -> None:
    nested = {"text_config": {"num_key_value_heads": 2}}
    assert parse(**nested, attention_projection_layout="fused_qkv").num_key_value_heads == 2


def test_placeholder_ids_come_from_either_place() -> None:
    config = parse(image_token_id=7, processor_config={"image_token_id": 8, "audio_token_id": 9})
    assert (config.image_token_id, config.video_token_id, config.audio_token_id) == (7, None, 9)


def test_plain_rope_parameters_are_accepted() -> None:
    assert (
        parse(rope_scaling={"type": "default"}, rope_parameters={"rope_type": "default"}) == parse()
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "field vocab_size is missing"),
        ({"vocab_size": "97"}, "vocab_size must be a whole number of at least 1, found '97'"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling .*yarn.* is not supported"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "is not supported"),
        ({"attention_projection_layout": "qkv"}, "attention_projection_layout must be split or"),
        ({"attention_projection_layout": "fused_qkv"}, "field num_key_value_heads is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling must be an object"),
        ({"text_config": 7}, "text_config must be an object"),
        ({"numeric_profile": [1]}, "numeric_profile must be an object"),
        ({"processor_config": "x"}, "processor_config must be an object"),
        ({"quantization_config": {"store_dtype": "mxfp4"}}, "as MXFP4.* use a BF16 checkpoint"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8' is not.* use a BF16 checkpoint"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must be a list of 6 entries"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq must be a list of 6 entries"),
        ({"hybrid_layer_pattern": [1] * 6}, "layer 0 is sliding, but neither sliding_window_size"),
        ({"num_nextn_predict_layers": 1}, "layer 6 is sliding, but neither"),
        ({"sliding_window": 4, "sliding_window_size": 5}, "sliding_window_size disagree"),
        ({"num_key_value_heads": 3}, "4 query heads, not a multiple of its 3 key-value heads"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor rotates 3 of layer 0's 16"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor rotates 0 of"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor rotates 24 of layer 0's 16"),
        (
            {"num_attention_heads": 0},
            "num_attention_heads must be a whole number of at least 1, found 0",
        ),
        (
            {"num_key_value_heads": 0},
            "num_key_value_heads must be a whole number of at least 1, found 0",
        ),
        ({"hidden_size": -64}, "hidden_size must be a whole number of at least 1, found -64"),
        ({"moe_layer_freq": 1}, "num_experts_per_tok 0 is more than"),
        (
            {"moe_layer_freq": 1, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 4},
            "n_routed_experts 6, n_group 4 and topk_group 1 do not fit",
        ),
        (
            {
                "attention_projection_layout": "fused_qkv",
                "num_key_value_heads": 4,
                "swa_num_key_value_heads": 2,
                "hybrid_layer_pattern": [0, 1, 0, 0, 0, 0],
                "sliding_window": 4,
            },
            "num_key_value_heads = 4 chunks, which do not divide layer 1's 2",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(**fields)


def test_a_window_of_no_keys_is_refused() -> None:
    fields = MINIMAL | {"hybrid_layer_pattern": [1] * 6, "sliding_window": 4}
    with pytest.raises(CheckpointError, match="swa_visible gives it a key to see"):
        DecoderConfig.from_checkpoint(fields, {"swa_visible": 0})
