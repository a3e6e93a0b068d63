"""Write mimo-tiny with random weights: ``python -m models.generate --out DIR [--seed N]``.

The directory has everything a served checkpoint has, in the published layout of MiMo-V2.5, and its
answers are fluent nonsense: it serves to run, test and measure the system before any training.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models import config, files, tokenizer, weights


def generate(directory: Path, seed: int = 0) -> None:
    """Write mimo-tiny. The same seed writes the same bytes."""
    vocabulary = tokenizer.build()
    model = config.model_config(tokenizer.control_ids(vocabulary))
    write(directory, model, config.audio_tokenizer_config(), vocabulary, seed=seed)


def write(
    directory: Path,
    model: Mapping[str, Any],
    audio_tokenizer: Mapping[str, Any],
    vocabulary: Tokenizer,
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a checkpoint of any size: the two configurations say which, and in which layout."""
    ids = tokenizer.control_ids(vocabulary)
    draw = weights.Draw(seed)
    spoken = [*tokenizer.readable_ids(vocabulary), ids["<|im_end|>"]]
    tensors = {
        **weights.decoder_tensors(model, draw, readable=spoken),
        **weights.mtp_tensors(model, draw),
        **weights.vision_tensors(model["vision_config"], draw),
        **weights.audio_encoder_tensors(model["audio_config"], draw),
    }
    codes = weights.audio_tokenizer_tensors(audio_tokenizer, draw)
    write_checkpoint(
        directory, model, audio_tokenizer, vocabulary, tensors=tensors, codes=codes, dtype=dtype
    )


def write_checkpoint(
    directory: Path,
    model: Mapping[str, Any],
    audio_tokenizer: Mapping[str, Any],
    vocabulary: Tokenizer,
    *,
    tensors: Mapping[str, Tensor],
    codes: Mapping[str, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write all files of a checkpoint. ``tensors`` and ``codes`` are those of the model and of the
    audio tokenizer, by published names and with the projections of attention apart."""
    ids = tokenizer.control_ids(vocabulary)
    stored = files.fuse_qkv(files.round_tensors(tensors, dtype), model)
    files.write_tensors(directory, stored, index=True)

    subfolder = directory / "audio_tokenizer"
    files.write_tensors(subfolder, files.round_tensors(codes, dtype), index=False)
    files.write_json(subfolder / "config.json", audio_tokenizer)

    vocabulary.save(str(directory / "tokenizer.json"))
    files.write_json(directory / "tokenizer_config.json", tokenizer.tokenizer_config())
    files.write_json(directory / "generation_config.json", config.generation_config(ids))
    files.write_json(directory / "preprocessor_config.json", config.preprocessor_config())
    # Last, because a directory without it is no model: an interrupted run leaves none behind.
    files.write_json(directory / "config.json", model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args()
    generate(options.out, options.seed)
    print(f"wrote {options.out} (random weights, seed {options.seed})")


if __name__ == "__main__":
    main()
