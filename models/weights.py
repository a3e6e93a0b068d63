"""Seeded random weights under the published tensor names, one function per component.

All tensors are float32 and in the split layout; ``models.files`` rounds, fuses and stores them.
Matrices keep the size of what passes through them, so activations stay of order one at any depth.
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]

_MUTED = 0.2  # scale of logits of ids that are no readable text


class Draw:
    """Random tensors that depend on the seed and their name alone, not on the order of drawing."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, name: str, *shape: int, std: float = 1.0) -> Tensor:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
        return torch.randn(shape, generator=generator) * std

    def linear(self, name: str, *shape: int, gain: float = 1.0) -> Tensor:
        """A map that keeps the variance of its input, times ``gain`` squared."""
        fan_in = torch.Size(shape[1:]).numel()
        return self.normal(name, *shape, std=gain * fan_in**-0.5)

    def norm(self, name: str, dim: int) -> Tensor:
        return 1 + self.normal(name, dim, std=0.1)


def decoder_tensors(config: Config, draw: Draw, readable: Collection[int] = ()) -> Tensors:
    """The language model. With ``readable`` ids, the head prefers them to all others."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors: Tensors = {}
    for index in range(config["num_hidden_layers"]):
        path = f"model.layers.{index}"
        sliding = bool(config["hybrid_layer_pattern"][index])
        tensors[f"{path}.input_layernorm.weight"] = draw.norm(f"{path}.input_layernorm", hidden)
        tensors |= _attention(config, draw, f"{path}.self_attn", sliding=sliding)
        name = f"{path}.post_attention_layernorm.weight"
        tensors[name] = draw.norm(name, hidden)
        if config["moe_layer_freq"][index]:
            tensors |= _experts(config, draw, f"{path}.mlp")
        else:
            tensors |= _swiglu(draw, f"{path}.mlp", hidden, config["intermediate_size"])
    embedding = draw.normal("model.embed_tokens.weight", vocab, hidden)
    head = draw.linear("lm_head.weight", vocab, hidden, gain=2.0)
    if readable:
        loudness = torch.full((vocab, 1), _MUTED)
        loudness[list(readable)] = 1.0
        head = head * loudness
    return tensors | {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": draw.norm("model.norm.weight", hidden),
        "lm_head.weight": head,
    }


def mtp_tensors(config: Config, draw: Draw) -> Tensors:
    """The blocks that draft. Embedding and head are the language model's."""
    hidden = config["hidden_size"]
    tensors: Tensors = {}
    for index in range(config["num_nextn_predict_layers"]):
        path = f"model.mtp.layers.{index}"
        for norm in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            tensors[f"{path}.{norm}.weight"] = draw.norm(f"{path}.{norm}", hidden)
        tensors[f"{path}.eh_proj.weight"] = draw.linear(f"{path}.eh_proj", hidden, 2 * hidden)
        tensors |= _attention(config, draw, f"{path}.self_attn", sliding=True)
        tensors |= _swiglu(draw, f"{path}.mlp", hidden, config["intermediate_size"])
    return tensors


def vision_tensors(config: Config, draw: Draw) -> Tensors:
    """The vision tower, from ``vision_config``."""
    hidden, heads, head_dim = config["hidden_size"], config["num_heads"], config["qk_channels"]
    kernel = (config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    qkv_rows = (heads + 2 * config["num_key_value_heads"]) * head_dim
    name = "visual.patch_embed.proj.weight"
    tensors = {name: draw.linear(name, hidden, config["in_chans"], *kernel)}
    for index in range(config["depth"]):
        path = f"visual.blocks.{index}"
        for norm in ("norm1", "norm2"):
            tensors[f"{path}.{norm}.weight"] = draw.norm(f"{path}.{norm}", hidden)
        tensors |= _biased(draw, f"{path}.attn.qkv", qkv_rows, hidden)
        tensors |= _biased(draw, f"{path}.attn.proj", hidden, heads * head_dim)
        if config["use_sink"] and index not in config["fullatt_block_indexes"]:
            tensors[f"{path}.attn.sinks"] = draw.normal(f"{path}.attn.sinks", heads)
        intermediate = config["intermediate_size"]
        for projection in ("gate_proj", "up_proj"):
            tensors |= _biased(draw, f"{path}.mlp.{projection}", intermediate, hidden)
        tensors |= _biased(draw, f"{path}.mlp.down_proj", hidden, intermediate)
    unit = config["spatial_merge_size"] ** 2 * hidden
    return tensors | {
        "visual.merger.ln_q.weight": draw.norm("visual.merger.ln_q", hidden),
        "visual.merger.mlp.0.weight": draw.linear("visual.merger.mlp.0", unit, unit),
        "visual.merger.mlp.2.weight": draw.linear(
            "visual.merger.mlp.2", config["out_hidden_size"], unit, gain=1.5
        ),
    }


def audio_encoder_tensors(config: Config, draw: Draw) -> Tensors:
    """From codes to embeddings, from ``audio_config``."""
    dim, channels = config["input_local_dim"], config["audio_channels"]
    tensors: Tensors = {}
    for channel in range(channels):
        name = f"speech_embeddings.{channel}.weight"
        rows = int(config["speech_vocab_size"])
        tensors[name] = draw.normal(name, rows, dim, std=channels**-0.5)
    local = "audio_encoder.input_local_transformer"
    for index in range(config["input_local_layers"]):
        path = f"{local}.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{path}.{norm}.weight"] = draw.norm(f"{path}.{norm}", dim)
        for letter in "qkv":
            tensors |= _biased(draw, f"{path}.self_attn.{letter}_proj", dim, dim)
        name = f"{path}.self_attn.o_proj.weight"
        tensors[name] = draw.linear(name, dim, dim)
        tensors |= _swiglu(draw, f"{path}.mlp", dim, config["input_local_intermediate_size"])
    if config["add_post_norm"]:
        tensors[f"{local}.norm.weight"] = draw.norm(f"{local}.norm", dim)
    width, inner = config["group_size"] * dim, config["projection_hidden_dim"]
    first, second = (f"audio_encoder.projection.mlp.{layer}.weight" for layer in (0, 2))
    tensors[first] = draw.linear(first, inner, width)
    tensors[second] = draw.linear(second, config["out_hidden_size"], inner, gain=1.5)
    return tensors


def audio_tokenizer_tensors(config: Config, draw: Draw) -> Tensors:
    """From log-mel frames to codes, from ``audio_tokenizer/config.json``."""
    dim, mels, kernel = config["d_model"], config["n_mels"], config["kernel_size"]
    # Log-mel values lie around -7 with a deviation of 4; the first layer takes that out.
    name = "encoder.conv1.weight"
    conv1 = draw.linear(name, dim, mels, kernel, gain=0.25)
    tensors = {name: conv1, "encoder.conv1.bias": 7 * conv1.sum(dim=(1, 2))}
    tensors |= _biased(draw, "encoder.conv2", dim, dim, kernel)
    for index in range(config["encoder_layers"]):
        path = f"encoder.layers.{index}"
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            tensors |= _layer_norm(draw, f"{path}.{norm}", dim)
        for projection in ("q_proj", "v_proj", "out_proj"):
            tensors |= _biased(draw, f"{path}.self_attn.{projection}", dim, dim)
        name = f"{path}.self_attn.k_proj.weight"
        tensors[name] = draw.linear(name, dim, dim)
        tensors |= _biased(draw, f"{path}.fc1", config["encoder_ffn_dim"], dim)
        tensors |= _biased(draw, f"{path}.fc2", dim, config["encoder_ffn_dim"])
    tensors |= _layer_norm(draw, "encoder.layer_norm", dim)
    name = "encoder.down_sample_layer.0.weight"
    tensors[name] = draw.linear(name, dim, dim, config["avg_pooler"])
    tensors |= _layer_norm(draw, "encoder.down_sample_norm", dim)
    sizes = config["codebook_size"]
    for level in range(config["num_quantizers"]):
        name = f"encoder.quantizer.vq.layers.{level}._codebook.embed"
        size = sizes[min(level, len(sizes) - 1)]
        # Each level explains a part of what the levels before it left over.
        tensors[name] = draw.normal(name, size, dim, std=0.3 * 0.9**level)
    return tensors


def _attention(config: Config, draw: Draw, path: str, *, sliding: bool) -> Tensors:
    kind = "swa_" if sliding else ""
    hidden = config["hidden_size"]
    heads, kv_heads = config[f"{kind}num_attention_heads"], config[f"{kind}num_key_value_heads"]
    head_dim, v_head_dim = config[f"{kind}head_dim"], config[f"{kind}v_head_dim"]
    shapes = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * v_head_dim, hidden),
        "o_proj": (hidden, heads * v_head_dim),
    }
    tensors = {
        f"{path}.{name}.weight": draw.linear(f"{path}.{name}", *shape, gain=1.5)
        for name, shape in shapes.items()
    }
    if config["add_swa_attention_sink_bias" if sliding else "add_full_attention_sink_bias"]:
        name = f"{path}.attention_sink_bias"
        tensors[name] = draw.normal(name, heads)
    return tensors


def _experts(config: Config, draw: Draw, path: str) -> Tensors:
    count, hidden = config["n_routed_experts"], config["hidden_size"]
    gate, bias = f"{path}.gate.weight", f"{path}.gate.e_score_correction_bias"
    tensors = {
        gate: draw.linear(gate, count, hidden),
        bias: draw.normal(bias, count, std=0.1),
    }
    for expert in range(count):
        tensors |= _swiglu(
            draw, f"{path}.experts.{expert}", hidden, config["moe_intermediate_size"]
        )
    return tensors


def _swiglu(draw: Draw, path: str, hidden: int, intermediate: int) -> Tensors:
    shapes = {
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    return {
        f"{path}.{name}.weight": draw.linear(f"{path}.{name}", *shape, gain=1.5)
        for name, shape in shapes.items()
    }


def _biased(draw: Draw, path: str, *shape: int) -> Tensors:
    return {
        f"{path}.weight": draw.linear(f"{path}.weight", *shape),
        f"{path}.bias": draw.normal(f"{path}.bias", shape[0], std=0.1),
    }


def _layer_norm(draw: Draw, path: str, dim: int) -> Tensors:
    return {
        f"{path}.weight": draw.norm(f"{path}.weight", dim),
        f"{path}.bias": draw.normal(f"{path}.bias", dim, std=0.1),
    }
