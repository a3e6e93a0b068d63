"""A decoder in float32 safetensors as a GGUF file of architecture `mimo2`, with a dummy vocabulary.

    python to_gguf.py DIRECTORY FILE bf16|f32

Runs in llama.cpp's environment, which has no torch.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
MLP = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
KINDS = {"bf16": (gguf.GGMLQuantizationType.BF16, 32), "f32": (gguf.GGMLQuantizationType.F32, 0)}


def main() -> None:
    source, target, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "mimo2")
    _write_config(writer, config)
    _write_vocabulary(writer, config["vocab_size"])
    dtype, file_type = KINDS[kind]
    writer.add_file_type(file_type)
    for name, tensor in _tensors(load_file(source / "model.safetensors"), config).items():
        if tensor.ndim == 1 or name.endswith("ffn_gate_inp.weight"):  # llama.cpp keeps these so
            writer.add_tensor(name, tensor.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    sliding = [bool(kind) for kind in config["hybrid_layer_pattern"]]
    full_heads, swa_heads = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    writer.add_name("bench")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([swa_heads if kind else full_heads for kind in sliding])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_layer_norm_rms_eps(config["layernorm_epsilon"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_float32("mimo2.rope.freq_base_swa", float(config["swa_rope_theta"]))
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_sliding_window(config["sliding_window_size"])
    writer.add_array("mimo2.attention.sliding_window_pattern", sliding)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    writer.add_vocab_size(config["vocab_size"])


def _write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Printable ASCII alone: the server holds back bytes that are no whole character."""
    letters = [*map(chr, range(33, 127)), chr(0x120), chr(0x10A)]
    tokens = ["<pad>", "<s>", "</s>", *letters]
    types = [3] * 3 + [1] * len(letters) + [4] * (size - len(tokens))
    tokens += [f"<f{number}>" for number in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _tensors(source: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    named = {
        "token_embd.weight": source["model.embed_tokens.weight"],
        "output_norm.weight": source["model.norm.weight"],
        "output.weight": source["lm_head.weight"],
    }
    for index in range(config["num_hidden_layers"]):
        theirs, ours = f"blk.{index}", f"model.layers.{index}"
        named[f"{theirs}.attn_norm.weight"] = source[f"{ours}.input_layernorm.weight"]
        named[f"{theirs}.ffn_norm.weight"] = source[f"{ours}.post_attention_layernorm.weight"]
        for name, other in ATTENTION.items():
            named[f"{theirs}.{other}.weight"] = source[f"{ours}.self_attn.{name}.weight"]
        sinks = f"{ours}.self_attn.attention_sink_bias"
        if sinks in source:
            named[f"{theirs}.attn_sinks.weight"] = source[sinks]
        if f"{ours}.mlp.gate.weight" not in source:
            for name, other in MLP.items():
                named[f"{theirs}.{other}.weight"] = source[f"{ours}.mlp.{name}.weight"]
            continue
        named[f"{theirs}.ffn_gate_inp.weight"] = source[f"{ours}.mlp.gate.weight"]
        named[f"{theirs}.exp_probs_b.bias"] = source[f"{ours}.mlp.gate.e_score_correction_bias"]
        for name, other in MLP.items():
            experts = (
                source[f"{ours}.mlp.experts.{expert}.{name}.weight"]
                for expert in range(config["n_routed_experts"])
            )
            named[f"{theirs}.{other}_exps.weight"] = np.stack(list(experts))
    return named


if __name__ == "__main__":
    main()
