"""From trained modules to the published layout, through the same writer as random weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from models import config, generate, tokenizer
from models.training.networks import Networks, model_config
from services.llm.model.weights import published_tensors

LARGEST_BYTES = 25_000_000


def export(networks: Networks, directory: Path) -> int:
    """Write the checkpoint, weights rounded to bfloat16. Returns its size in bytes."""
    model, audio = model_config(), config.audio_tokenizer_config()
    generate.write_checkpoint(
        directory,
        model,
        audio,
        tokenizer.build(),
        tensors=model_tensors(networks),
        codes=codes_tensors(networks),
        dtype=torch.bfloat16,
    )
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if size > LARGEST_BYTES:
        raise ValueError(f"{directory} has {size} bytes, more than {LARGEST_BYTES}")
    return size


def model_tensors(networks: Networks) -> dict[str, Tensor]:
    """Tensors of model.safetensors by their published names, projections still apart."""
    embedder = networks.embedder.state_dict()
    return {
        **published_tensors(networks.decoder, networks.mtp),
        **_under("visual.", networks.tower.state_dict()),
        **{
            name if name.startswith("speech_embeddings.") else f"audio_encoder.{name}": tensor
            for name, tensor in embedder.items()
        },
    }


def codes_tensors(networks: Networks) -> dict[str, Tensor]:
    """Tensors of audio_tokenizer/model.safetensors by their published names."""
    tensors = {}
    for name, tensor in networks.tokenizer.state_dict().items():
        prefix, _, level = name.rpartition(".")
        is_codebook = prefix == "quantizer.codebooks"
        published = f"quantizer.vq.layers.{level}._codebook.embed" if is_codebook else name
        tensors[published] = tensor
    return _under("encoder.", tensors)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
