"""The audio stack's tensors, of the omni and of the speech-recognition checkpoints, strictly.

Two directories hold them: the tokenizer's own, and the model's, where they lie among those of the
language model under names that changed between generations.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mimo.checkpoint.index import CheckpointIndex, FingerprintMode, TensorInfo
from mimo.checkpoint.loader import load
from mimo.checkpoint.rules import Cast, Rename, parts_of
from mimo.errors import CheckpointError
from mimo.nn.attention import AttentionSelector
from mimo.nn.meta import without_weights
from services.audio.config import AudioEncoderConfig, AudioTokenizerConfig
from services.audio.embedder import CodeEmbedder
from services.audio.mel import LogMel
from services.audio.model import AudioTower
from services.audio.tokenizer import AudioTokenizer

logger = logging.getLogger(__name__)

TOKENIZER_FOLDER = "audio_tokenizer"

TOKENIZER_RULES = (
    Rename(r"^quantizer\.vq\.layers\.(\d+)\._codebook\.embed$", r"quantizer.codebooks.\1"),
    Cast(r"^quantizer\.", "float32"),  # the quantiser computes in float32 whatever the model does
)
TRAINING_STATE = r"\._codebook\.(embed_avg|cluster_size|inited)$"

ENCODER_RULES = (
    Rename(r"^audio_encoder\.", ""),
    Rename(r"^audio_projection\.", "projection."),
    Rename(r"^speech_group_downcast\.", "projection."),
    Rename(r"^audio_input_local_transformer\.", "input_local_transformer."),
)
# Anchored: `local_transformer.*` of the same file belongs to speech output, which is not ours.
_ENCODER_TENSOR = re.compile(
    r"^(audio_(?!tokenizer\.)|input_local_transformer\.|speech_group_downcast\.)"
    r"|(^|\.)speech_embeddings\."
)


@dataclass(frozen=True)
class AudioCheckpoint:
    """Where the tensors lie and the configurations they fit."""

    model: CheckpointIndex  # only the tensors of the audio encoder
    tokenizer: CheckpointIndex  # only the tensors under ``encoder.``
    encoder_config: AudioEncoderConfig
    tokenizer_config: AudioTokenizerConfig

    @classmethod
    def open(
        cls,
        directory: Path | str,
        tokenizer_directory: Path | str | None = None,
        switches: Mapping[str, str] | None = None,
    ) -> "AudioCheckpoint":
        """Read headers and configurations; no tensor.

        The tokenizer lies in ``tokenizer_directory``, by default the model's subfolder
        ``audio_tokenizer``. ``switches`` override the checkpoint's numeric profile. Raises
        CheckpointError when a part is missing or the two do not fit each other.
        """
        model = CheckpointIndex.open(directory)
        tokenizer = CheckpointIndex.open(_tokenizer_directory(model, tokenizer_directory))
        profile = {**(model.config.get("numeric_profile") or {}), **(switches or {})}
        tokenizer_config = AudioTokenizerConfig.from_checkpoint(tokenizer.config, profile)
        if tokenizer_config.hybrid_attention and not tokenizer_config.encoder_causal:
            logger.warning("the audio tokenizer has hybrid attention but is not causal")
        model = replace(model, tensors=model.select(_is_encoder_tensor))
        if not model.tensors:
            raise CheckpointError(f"no tensor of an audio encoder in {directory}")
        encoder_config = _fit(AudioEncoderConfig.from_checkpoint(model.config), model)
        encoder_config.check_tokenizer(tokenizer_config)
        _check_rate(model, tokenizer_config)
        tokenizer = replace(tokenizer, tensors=_select_encoder(tokenizer))
        return cls(model, tokenizer, encoder_config, tokenizer_config)

    def load(self, *, dtype: torch.dtype, device: str, selector: AttentionSelector) -> AudioTower:
        """Build the audio stack and fill it. Raises CheckpointError naming a tensor that is
        missing, unexpected or of another shape."""
        with without_weights():
            tokenizer = AudioTokenizer(self.tokenizer_config, selector, dtype=dtype, device=device)
            embedder = CodeEmbedder(self.encoder_config)
        load(
            tokenizer,
            self.tokenizer,
            TOKENIZER_RULES,
            prefix="encoder.",
            dtype=dtype,
            device=device,
            ignore=(TRAINING_STATE,),
        )
        load(embedder, self.model, ENCODER_RULES, dtype=dtype, device=device)
        mel = LogMel(self.tokenizer_config, device)
        return AudioTower(mel, tokenizer, embedder).eval().requires_grad_(False)

    def fingerprint(self, mode: FingerprintMode) -> str:
        """Identifies all tensors of the audio stack, which lie in two directories."""
        halves = (self.tokenizer, self.model)
        return ":".join(half.fingerprint(half.tensors, mode=mode) for half in halves)


def _tokenizer_directory(model: CheckpointIndex, explicit: Path | str | None) -> Path:
    if explicit is not None:
        return Path(explicit)
    folder = model.directory / TOKENIZER_FOLDER
    if not folder.is_dir():
        raise CheckpointError(
            f"no audio tokenizer: {folder} does not exist and --audio-tokenizer-path is not given"
        )
    return folder


def _is_encoder_tensor(name: str) -> bool:
    return _ENCODER_TENSOR.search(name) is not None


def _select_encoder(tokenizer: CheckpointIndex) -> dict[str, TensorInfo]:
    """The tokenizer's encoding half. The decoding half may be there; nothing else may."""
    strangers = tokenizer.select(lambda name: not name.startswith(("encoder.", "decoder.")))
    if strangers:
        raise CheckpointError(
            f"unexpected tensors of an audio tokenizer: {', '.join(sorted(strangers)[:5])}"
        )
    return tokenizer.select("encoder.")


def _fit(config: AudioEncoderConfig, model: CheckpointIndex) -> AudioEncoderConfig:
    """Settle from the tensors what the configuration leaves open.

    Tables may be padded with rows that no code names; they stay, unread.
    """
    shapes = {
        parts_of(name, info.shape, ENCODER_RULES)[0].name: info.shape
        for name, info in model.tensors.items()
    }
    has_norm = "input_local_transformer.norm.weight" in shapes
    if config.add_post_norm is False and has_norm:
        raise CheckpointError(
            "audio_config.add_post_norm is false, but the checkpoint has "
            "input_local_transformer.norm.weight"
        )
    hidden = shapes.get("projection.mlp.0.weight")
    tables = [shapes.get(f"speech_embeddings.{c}.weight") for c in range(config.audio_channels)]
    return replace(
        config,
        add_post_norm=has_norm if config.add_post_norm is None else config.add_post_norm,
        projection_hidden_dim=hidden[0] if hidden else config.projection_hidden_dim,
        speech_vocab_size=tuple(
            max(rows, table[0]) if table else rows
            for rows, table in zip(config.speech_vocab_size, tables, strict=True)
        ),
    )


def _check_rate(model: CheckpointIndex, tokenizer: AudioTokenizerConfig) -> None:
    processor = model.config.get("processor_config") or {}
    rate = processor.get("audio_sampling_rate")
    if rate not in (None, tokenizer.sampling_rate):
        raise CheckpointError(
            f"processor_config.audio_sampling_rate is {rate}, but the audio tokenizer takes "
            f"{tokenizer.sampling_rate}"
        )
