"""Audio models small enough to compute by hand, with seeded random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mimo.nn.attention import AttentionSelector
from services.audio.config import AudioEncoderConfig, AudioTokenizerConfig
from services.audio.embedder import CodeEmbedder
from services.audio.mel import LogMel
from services.audio.model import AudioTower
from services.audio.tokenizer import AudioTokenizer


def tokenizer_fields(**changes: Any) -> dict[str, Any]:
    """``audio_tokenizer/config.json`` of a toy of the second generation: causal, hybrid."""
    return {
        "model_type": "mimo_audio_tokenizer",
        "sampling_rate": 24000,
        "nfft": 960,
        "window_size": 960,
        "hop_length": 240,
        "n_mels": 8,
        "fmin": 0,
        "fmax": None,
        "d_model": 16,
        "encoder_layers": 4,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "encoder_skip_layer_id": 3,
        "encoder_causal": True,
        "encoder_attn_window_size": [5, 0],
        "hybrid_attention": True,
        "swa_per_block": 2,
        "hybrid_block_size": 8,
        "kernel_size": 3,
        "stride_size": 2,
        "avg_pooler": 2,
        "num_quantizers": 5,
        "codebook_size": [32, 16],
        "rope_theta": 10000,
        "rope_type": "default",
        "position_embedding_type": "rope",
        "ln_type": "LayerNorm",
        "activation_function": "gelu",
        "scale_embedding": False,
        **changes,
    }


def bidirectional_fields(**changes: Any) -> dict[str, Any]:
    """The same toy of the first generation: every position sees its whole segment."""
    return tokenizer_fields(
        encoder_causal=False,
        encoder_attn_window_size=[-1, -1],
        hybrid_attention=False,
        **changes,
    )


def encoder_fields(**changes: Any) -> dict[str, Any]:
    """``config.json`` with the ``audio_config`` of a toy that uses four of the five codebooks."""
    audio = {
        "audio_channels": 4,
        "group_size": 4,
        "speech_vocab_size": "40",
        "speech_zeroemb_idx": "32",
        "input_local_layers": 2,
        "input_local_dim": 16,
        "input_local_attn_heads": 2,
        "input_local_head_dim": 8,
        "input_local_intermediate_size": 24,
        "input_full_attention": True,
        "out_hidden_size": 12,
        "rope_theta": 640000,
        "partial_rotary_factor": 1.0,
        "projection_layers": 2,
        "projection_hidden_dim": 20,
        "add_post_norm": True,
        "audio_segment_size": 6000,
        **changes,
    }
    return {"hidden_size": 12, "audio_config": audio}


def tokenizer_config(
    switches: dict[str, str] | None = None, **changes: Any
) -> AudioTokenizerConfig:
    return AudioTokenizerConfig.from_checkpoint(tokenizer_fields(**changes), switches)


def encoder_config(**changes: Any) -> AudioEncoderConfig:
    return AudioEncoderConfig.from_checkpoint(encoder_fields(**changes))


def randomize(module: nn.Module, seed: int = 0, scale: float = 0.4) -> nn.Module:
    """Fill every parameter from a seeded generator. Large enough that masks and order matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.1 * noise if is_norm else scale * noise)
    return module


def make_tower(seed: int = 0, **changes: Any) -> AudioTower:
    """The whole toy: 4 codebooks of 16 mel frames per embedding of 12 numbers, float32."""
    tokenizer = AudioTokenizer(tokenizer_config(), AttentionSelector("audio"))
    tower = AudioTower(
        LogMel(tokenizer.config),
        tokenizer,
        CodeEmbedder(encoder_config(audio_segment_size=32, **changes)),
    )
    randomize(tower, seed)
    return tower.eval().requires_grad_(False)


def make_waveform(num_samples: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.1 * torch.randn(num_samples, generator=generator)


def tokenizer_tensors(tower: AudioTower) -> dict[str, Tensor]:
    """The tokenizer as published: its own directory, codebooks with their training state."""
    tensors = {}
    for name, value in tower.tokenizer.state_dict().items():
        if name.startswith("quantizer."):
            book = f"encoder.quantizer.vq.layers.{name.rsplit('.', 1)[1]}._codebook"
            tensors[f"{book}.embed"] = value
            tensors[f"{book}.embed_avg"] = value.clone()
            tensors[f"{book}.cluster_size"] = torch.ones(len(value))
            tensors[f"{book}.inited"] = torch.ones(1)
        else:
            tensors[f"encoder.{name}"] = value
    return tensors


def omni_tensors(tower: AudioTower) -> dict[str, Tensor]:
    """The encoder as the omni checkpoint names it, among tensors of the language model."""
    tensors = {
        name if name.startswith("speech_embeddings") else f"audio_encoder.{name}": value
        for name, value in tower.embedder.state_dict().items()
    }
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(2, 2)
    tensors["audio_tokenizer.encoder.conv1.bias"] = torch.ones(2)
    return tensors


def write_checkpoint(
    directory: Path,
    tower: AudioTower,
    config: dict[str, Any] | None = None,
    *,
    model: dict[str, Tensor] | None = None,
    tokenizer: dict[str, Tensor] | None = None,
) -> None:
    """A model directory with its ``audio_tokenizer``; tensors default to the tower's."""
    write_tensors(
        directory,
        config or encoder_fields(audio_segment_size=32),
        omni_tensors(tower) if model is None else model,
    )
    write_tensors(
        directory / "audio_tokenizer",
        tokenizer_fields(),
        tokenizer_tensors(tower) if tokenizer is None else tokenizer,
    )


def write_tensors(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        directory / "model.safetensors",
    )
