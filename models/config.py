"""The sizes of mimo-tiny: MiMo-V2.5's architecture at ten million parameters.

Every value stands under the published key, so the loaders read this model as they read a large one.
``numeric_profile`` and the ``qk_channels``, ``kv_channels`` and ``swa_*`` keys are written out
because small dimensions differ from the class defaults.
"""

from collections.abc import Mapping
from typing import Any

HIDDEN_SIZE = 192
VOCAB_SIZE = 768  # rows of the embedding; the tokenizer uses fewer
CONTEXT_LENGTH = 8192

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


def model_config(ids: Mapping[str, int]) -> dict[str, Any]:
    """config.json. ``ids`` are the control tokens by their text."""
    return {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "dtype": "bfloat16",
        **decoder_config(),
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "vision_model_type": "mimovl",
        "vision_config": vision_config(),
        "audio_config": audio_config(),
        "processor_config": processor_config() | media_token_ids(ids),
        **media_token_ids(ids),
        "numeric_profile": numeric_profile(),
    }


def decoder_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "num_hidden_layers": 8,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1],  # 0 full, 1 sliding
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "v_head_dim": 32,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 48,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.334,  # 16 of 48 dimensions
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "rope_scaling": None,
        "sliding_window": 32,
        "sliding_window_size": 32,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_bias": False,
        "attention_value_scale": 0.866,  # sqrt(hidden_size / (heads * v_head_dim))
        "attention_projection_layout": "fused_qkv",
        "intermediate_size": 384,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "num_nextn_predict_layers": 3,
        "layernorm_epsilon": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def vision_config() -> dict[str, Any]:
    return {
        "depth": 6,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "num_query_groups": 2,
        "qk_channels": 32,
        "kv_channels": 32,
        "in_chans": 3,
        "patch_size": 16,
        "spatial_patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "hidden_act": "silu",
        "use_sink": True,
        "visual_token_window_size": 8,
        "window_size": 128,
        "vit_window_attn_types": [-1, 0, 1, 0, 1, -1],  # full, rows, columns
        "fullatt_block_indexes": [0, 5],
        "tokens_per_second": 2,
    }


def audio_config() -> dict[str, Any]:
    """From codes to embeddings. The id that stands for silence lies beyond every code."""
    return {
        "audio_channels": 6,
        "group_size": 4,
        "speech_vocab_size": "80",
        "speech_zeroemb_idx": "64",
        "input_local_layers": 2,
        "input_local_dim": 128,
        "input_local_attn_heads": 4,
        "input_local_head_dim": 32,
        "input_local_intermediate_size": 256,
        "input_local_hidden_dropout": 0.0,
        "input_full_attention": True,
        "out_hidden_size": HIDDEN_SIZE,
        "rope_theta": 640_000,
        "partial_rotary_factor": 1.0,
        "projection_layers": 2,
        "projection_hidden_dim": 512,
        "add_post_norm": True,
        "audio_segment_size": 6000,
    }


def audio_tokenizer_config() -> dict[str, Any]:
    """audio_tokenizer/config.json: from 24 kHz sound to 25 frames of six codes a second."""
    return {
        "model_type": "mimo_audio_tokenizer",
        "sampling_rate": 24_000,
        "nfft": 960,
        "window_size": 960,
        "hop_length": 240,
        "n_mels": 128,
        "fmin": 0,
        "fmax": None,
        "d_model": 128,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 384,
        "encoder_skip_layer_id": 3,
        "encoder_causal": True,
        "encoder_attn_window_size": [32, 0],
        "hybrid_attention": True,
        "swa_per_block": 2,
        "kernel_size": 3,
        "stride_size": 2,
        "avg_pooler": 2,
        "num_quantizers": 6,
        "codebook_size": [64],
        "rope_theta": 10_000,
        "rope_type": "default",
        "position_embedding_type": "rope",
        "ln_type": "LayerNorm",
        "activation_function": "gelu",
        "scale_embedding": False,
        "max_audio_seconds": 300,
    }


def processor_config() -> dict[str, Any]:
    """Budgets that bring any picture into the range a model of this size can be trained on.

    A picture becomes 4 to 36 tokens and a clip at most 32 frames, 16 grids of 36 tokens.
    """
    return {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "temporal_compression_ratio": 1,
        "image_min_pixels": 4096,  # 64 x 64
        "image_max_pixels": 36_864,  # 192 x 192
        "video_min_pixels": 4096,
        "video_max_pixels": 36_864,
        "video_total_max_pixels": 16 * 36_864,
        "fps": 1.0,
        "num_frames": None,
        "min_frames": 4,
        "max_frames": 32,
        "use_video_timestamps": True,
        "use_per_grid_t_timestamps": False,
        "video_audio_interleave_length": 0.0,
        "rope_type": "rope",
        "audio_sampling_rate": 24_000,
        "audio_n_mels": 128,
        "audio_hop_length": 240,
        "audio_input_id_per_second": 25.0,
        "audio_group_size": 4,
        "audio_channels": 6,
    }


def media_token_ids(ids: Mapping[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_token_id": ids["<|audio_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "video_start_token_id": ids["<|mimo_video_start|>"],
        "video_end_token_id": ids["<|mimo_video_end|>"],
        "audio_start_token_id": ids["<|mimo_audio_start|>"],
        "audio_end_token_id": ids["<|mimo_audio_end|>"],
    }


def numeric_profile() -> dict[str, Any]:
    """The choices that published files leave open; this model's weights are made for these."""
    return {
        "swa_visible": 32,
        "qkv_rows": "interleaved",
        "vision_sinks": "key0",
        "vision_merger_norm": "layer",
        "vision_pixel_stats": "clip",
        "vision_resize": "bilinear",
    }


def generation_config(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "do_sample": False,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "max_new_tokens": 256,
    }


def preprocessor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
