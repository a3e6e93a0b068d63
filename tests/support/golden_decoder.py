"""A decoder with three MTP blocks, small enough to write down, whose weights are a formula.

Every number is sin(12.9898 k + 78.233 j): k numbers the tensors in checkpoint order, j the
elements. A matrix takes j = i^2 mod 8191 for its i-th element, which makes it full rank; with j = i
it would have rank two and projections would fall into a plane. The expected outputs, in
decoder_golden.json, were computed by independent implementations in float64.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.nn.attention import AttentionSelector
from services.llm.model.config import DecoderConfig
from services.llm.model.decoder import Decoder, merge_embeddings
from services.llm.model.mtp import Mtp
from services.llm.model.weights import MTP_PREFIX

IMAGE_PAD, AUDIO_PAD = 58, 59


def golden() -> dict[str, Any]:
    """Configuration, checks of the fill, and the expected numbers of every variant.

    base_vis7 and base_vis6 differ in the keys a sliding layer sees; nosink removes all sinks,
    nomerge the encoder rows; kv24 has twice the key-value heads; chain has weights under which the
    MTP blocks often guess right.
    """
    path = Path(__file__).parents[1] / "unit" / "llm" / "decoder_golden.json"
    return json.loads(path.read_text())


def config(variant: str) -> dict[str, Any]:
    """The config.json of a variant."""
    values = dict(golden()["config"])
    if variant.startswith("kv24"):
        values |= {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}
    if variant.endswith("nosink"):
        values |= {"add_swa_attention_sink_bias": False}
    return values | {"numeric_profile": {"swa_visible": 6 if "vis6" in variant else 7}}


def weights(variant: str) -> dict[str, Tensor]:
    """All tensors of a variant in float64, under published names with split q, k and v."""
    values = config(variant)
    # Sinks are numbered even where they are removed.
    shapes = _shapes(values | {"add_swa_attention_sink_bias": True})
    tensors = {name: _value(name, k, shape) for k, (name, shape) in enumerate(shapes.items(), 1)}
    if variant.startswith("chain"):
        _chain(tensors, values)
    if variant.endswith("nosink"):
        tensors = {name: t for name, t in tensors.items() if not name.endswith("sink_bias")}
    return tensors


def build(variant: str, dtype: torch.dtype, attention: str = "sdpa") -> tuple[Decoder, Mtp]:
    """The variant's modules, filled."""
    parsed = DecoderConfig.from_checkpoint(config(variant))
    selector = AttentionSelector("llm", override=attention)
    decoder, mtp = Decoder(parsed, selector, dtype=dtype), Mtp(parsed, selector, dtype=dtype)
    main: dict[str, Tensor] = {}
    blocks: dict[str, Tensor] = {}
    for name, tensor in weights(variant).items():
        if name.startswith(MTP_PREFIX):
            blocks[name.removeprefix(MTP_PREFIX)] = tensor
        else:
            main[name] = tensor
    decoder.load_state_dict(main)
    mtp.load_state_dict(blocks)
    return decoder, mtp


def prompt_ids() -> Tensor:
    """20 ids; pads of images at 5, 6, 12 and of audio at 4, 11, interleaved on purpose."""
    return torch.tensor(golden()["input"]["ids"])


def media_rows() -> Tensor:
    """[5, 32]: three rows of an image encoder, then two of an audio encoder."""
    return _formula(777, torch.arange(5 * 32)).view(5, 32)


def embed_prompt(decoder: Decoder, ids: Tensor, *, merge: bool = True) -> Tensor:
    """Embed ids that start with the prompt, encoder rows in place, each modality in order."""
    x = decoder.embed(ids)
    if not merge:
        return x
    images, audio = media_rows().split((3, 2))
    x = merge_embeddings(x, images, (ids[:20] == IMAGE_PAD).nonzero().flatten())
    return merge_embeddings(x, audio, (ids[:20] == AUDIO_PAD).nonzero().flatten())


def _formula(k: int, index: Tensor) -> Tensor:
    return torch.sin(12.9898 * k + 78.233 * index.double())


def _value(name: str, k: int, shape: tuple[int, ...]) -> Tensor:
    index = torch.arange(math.prod(shape))
    if len(shape) == 2:
        scale = 1.0 if "embed_tokens" in name else 1.5 / math.sqrt(shape[1])
        return scale * _formula(k, index**2 % 8191).view(shape)
    if name.endswith("attention_sink_bias"):
        return 1.5 * _formula(k, index)
    if name.endswith("e_score_correction_bias"):
        return 0.3 * _formula(k, index)
    return 1 + 0.25 * _formula(k, index)


def _chain(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Weights under which the next token is often a function of the current one."""
    vocab, hidden = values["vocab_size"], values["hidden_size"]
    successor = (5 * torch.arange(vocab) + 3) % vocab
    head = torch.empty_like(tensors["lm_head.weight"])
    head[successor] = tensors["model.embed_tokens.weight"] * 1.5 / math.sqrt(hidden)
    tensors["lm_head.weight"] = head
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = 0.3 * tensors[name]
        elif name.endswith("eh_proj.weight"):
            tensors[name] = 1.5 * tensors[name] + torch.eye(hidden, 2 * hidden)


def _shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape by published name, in the order of the numbering."""
    hidden, vocab = values["hidden_size"], values["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    kinds = zip(values["hybrid_layer_pattern"], values["moe_layer_freq"], strict=True)
    for layer, (sliding, sparse) in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes |= _attention_shapes(prefix, values, sliding)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if not sparse:
            shapes |= _mlp_shapes(prefix + "mlp.", hidden, values["intermediate_size"])
            continue
        experts = values["n_routed_experts"]
        shapes[prefix + "mlp.gate.weight"] = (experts, hidden)
        shapes[prefix + "mlp.gate.e_score_correction_bias"] = (experts,)
        for expert in range(experts):
            shapes |= _mlp_shapes(
                f"{prefix}mlp.experts.{expert}.", hidden, values["moe_intermediate_size"]
            )
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocab, hidden)
    for block in range(values["num_nextn_predict_layers"]):
        prefix = f"model.mtp.layers.{block}."
        shapes[prefix + "enorm.weight"] = (hidden,)
        shapes[prefix + "hnorm.weight"] = (hidden,)
        shapes[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes |= _attention_shapes(prefix, values, sliding=True)
        shapes[prefix + "pre_mlp_layernorm.weight"] = (hidden,)
        shapes |= _mlp_shapes(prefix + "mlp.", hidden, values["intermediate_size"])
        shapes[prefix + "final_layernorm.weight"] = (hidden,)
    return shapes


def _attention_shapes(
    prefix: str, values: dict[str, Any], sliding: bool
) -> dict[str, tuple[int, ...]]:
    swa = "swa_" if sliding else ""
    hidden, heads = values["hidden_size"], values[swa + "num_attention_heads"]
    kv_heads = values[swa + "num_key_value_heads"]
    head_dim, v_head_dim = values[swa + "head_dim"], values[swa + "v_head_dim"]
    shapes = {
        "q_proj.weight": (heads * head_dim, hidden),
        "k_proj.weight": (kv_heads * head_dim, hidden),
        "v_proj.weight": (kv_heads * v_head_dim, hidden),
        "o_proj.weight": (hidden, heads * v_head_dim),
    }
    if sliding and values["add_swa_attention_sink_bias"]:
        shapes["attention_sink_bias"] = (heads,)
    return {f"{prefix}self_attn.{name}": shape for name, shape in shapes.items()}


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (intermediate, hidden),
        prefix + "up_proj.weight": (intermediate, hidden),
        prefix + "down_proj.weight": (hidden, intermediate),
    }
