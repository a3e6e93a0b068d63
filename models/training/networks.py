"""The services' own modules at the bundled model's size, ready to be trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mimo.nn.attention import AttentionSelector
from models import config, tokenizer
from models.files import stored_dtype
from models.training.draw import stream
from services.audio.config import AudioEncoderConfig, AudioTokenizerConfig
from services.audio.embedder import CodeEmbedder
from services.audio.mel import LogMel
from services.audio.tokenizer import AudioTokenizer
from services.llm.model.config import DecoderConfig
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.vision.config import VisionTowerConfig
from services.vision.model import VisionTower

_RESIDUAL = ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight", "fc2.weight",
             "attn.proj.weight")  # fmt: skip
_RESIDUAL_GAIN = 0.4  # what a layer adds at first, so that depth does not drown the input
_EMBEDDING_STD = 0.5
_LOGIT_STD = 0.02

# Log-mel values lie around -7 with a deviation of 4; the first convolution takes that out.
_MEL_MEAN, _MEL_GAIN = -7.0, 0.25


@dataclass(frozen=True, slots=True)
class Networks:
    """Everything that a checkpoint of the bundled model holds, in float32."""

    tower: VisionTower
    tokenizer: AudioTokenizer
    embedder: CodeEmbedder
    decoder: Decoder
    mtp: Mtp

    @classmethod
    def fresh(cls, seed: int) -> "Networks":
        """Initial weights. A function of the seed alone."""
        model = model_config()
        codes = AudioTokenizerConfig.from_checkpoint(
            config.audio_tokenizer_config(), model["numeric_profile"]
        )
        decoder = DecoderConfig.from_checkpoint(model)
        vision = VisionTowerConfig.from_checkpoint(model, preprocessor=config.preprocessor_config())
        networks = cls(
            VisionTower(vision, AttentionSelector("vision")),
            AudioTokenizer(codes, AttentionSelector("audio")),
            CodeEmbedder(AudioEncoderConfig.from_checkpoint(model)),
            Decoder(decoder, AttentionSelector("llm")),
            Mtp(decoder, AttentionSelector("llm")),
        )
        for name, module in networks.modules().items():
            initialise(module, f"{seed}/{name}")
        _centre(networks.tokenizer.conv1)
        return networks

    def modules(self) -> dict[str, nn.Module]:
        return {
            "tower": self.tower,
            "tokenizer": self.tokenizer,
            "embedder": self.embedder,
            "decoder": self.decoder,
            "mtp": self.mtp,
        }

    def mel(self) -> LogMel:
        return LogMel(self.tokenizer.config)


def model_config() -> dict[str, Any]:
    """config.json of the bundled model."""
    return config.model_config(tokenizer.control_ids(tokenizer.build()))


@torch.no_grad()
def initialise(module: nn.Module, seed: str) -> None:
    """Norms to one, biases and sinks to zero, maps so that they keep the size of what they read."""
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(stream(seed, name).getrandbits(48))
        if parameter.dim() == 1:
            parameter.fill_(float("norm" in name or "ln_q" in name) if "bias" not in name else 0.0)
        else:
            parameter.normal_(0, _deviation(name, parameter), generator=generator)


def _deviation(name: str, parameter: Tensor) -> float:
    if "embed_tokens" in name or "speech_embeddings" in name:
        return _EMBEDDING_STD
    if "lm_head" in name or name.endswith("mlp.gate.weight"):
        return _LOGIT_STD
    # Experts are stacked in front; the kernel of a convolution lies behind.
    is_stack = name.endswith(("gate_up_proj", "down_proj"))
    fan_in = parameter.shape[-1] if is_stack else parameter[0].numel()
    gain = _RESIDUAL_GAIN if name.endswith(_RESIDUAL) else 1.0
    return float(gain * fan_in**-0.5)


@torch.no_grad()
def _centre(convolution: nn.Conv1d) -> None:
    convolution.weight.mul_(_MEL_GAIN)
    assert convolution.bias is not None
    convolution.bias.copy_(-_MEL_MEAN * convolution.weight.sum(dim=(1, 2)))


@torch.no_grad()
def round_to_bf16(module: nn.Module) -> None:
    """Give every parameter the value it will have after it is stored."""
    for name, parameter in module.named_parameters():
        parameter.copy_(parameter.to(stored_dtype(name, torch.bfloat16)))
