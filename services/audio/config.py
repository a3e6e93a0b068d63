"""The two configurations of the audio stack, as the checkpoint writes them.

The tokenizer (``audio_tokenizer/config.json``) turns a waveform into codes; the encoder
(``audio_config`` of the model's ``config.json``) turns codes into embeddings of the language model.
Field names are the checkpoint's. What the modules cannot compute is refused here, by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from mimo.errors import CheckpointError


class Rounding(StrEnum):
    """Whether values pass through bfloat16 once before float32 arithmetic uses them."""

    BF16 = "bf16"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class AudioTokenizerConfig:
    """Waveform to codes: mel front end, encoder transformer, residual quantiser.

    ``audio_codebook_round`` and ``audio_inv_freq_round`` are numeric switches: the published codes
    come from a tokenizer whose codebooks and rotary frequencies passed through bfloat16 once,
    whatever dtype the arithmetic runs in.
    """

    sampling_rate: int
    nfft: int
    window_size: int
    hop_length: int
    n_mels: int
    fmin: float
    fmax: float
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    encoder_skip_layer_id: int | None  # counts from 1
    encoder_causal: bool
    encoder_attn_window_size: tuple[int, int]  # (left, right) keys besides the query; -1 = all
    hybrid_attention: bool
    swa_per_block: int
    stride_size: int
    avg_pooler: int
    num_quantizers: int
    codebook_size: tuple[int, ...]  # one per quantiser
    rope_theta: float
    audio_codebook_round: Rounding = Rounding.BF16
    audio_inv_freq_round: Rounding = Rounding.BF16

    @classmethod
    def from_checkpoint(
        cls, config: Mapping[str, Any], switches: Mapping[str, Any] | None = None
    ) -> Self:
        """Read ``audio_tokenizer/config.json``. Raises CheckpointError naming the field.

        ``switches`` is the ``numeric_profile`` of the model's ``config.json``.
        """
        read = _Reader("audio tokenizer config", config)
        for name, only in _ONLY.items():
            read.require(name, only)
        sampling_rate = read.positive("sampling_rate")
        fmax = config.get("fmax")
        num_quantizers = read.positive("num_quantizers")
        switches = switches or {}
        self = cls(
            sampling_rate=sampling_rate,
            nfft=read.positive("nfft"),
            window_size=read.positive("window_size"),
            hop_length=read.positive("hop_length"),
            n_mels=read.positive("n_mels"),
            fmin=float(config.get("fmin") or 0),
            fmax=float(sampling_rate // 2 if fmax is None else fmax),
            d_model=read.positive("d_model"),
            encoder_layers=read.positive("encoder_layers"),
            encoder_attention_heads=read.positive("encoder_attention_heads"),
            encoder_ffn_dim=read.positive("encoder_ffn_dim"),
            encoder_skip_layer_id=config.get("encoder_skip_layer_id"),
            encoder_causal=bool(read.value("encoder_causal")),
            encoder_attn_window_size=read.pair("encoder_attn_window_size"),
            hybrid_attention=bool(config.get("hybrid_attention", False)),
            swa_per_block=int(config.get("swa_per_block") or 1),
            stride_size=read.positive("stride_size"),
            avg_pooler=read.positive("avg_pooler"),
            num_quantizers=num_quantizers,
            codebook_size=read.extended("codebook_size", num_quantizers),
            rope_theta=float(config.get("rope_theta", 10000)),
            audio_codebook_round=_rounding(switches, "audio_codebook_round"),
            audio_inv_freq_round=_rounding(switches, "audio_inv_freq_round"),
        )
        self._check(read)
        return self

    @property
    def head_dim(self) -> int:
        return self.d_model // self.encoder_attention_heads

    @property
    def numeric_profile(self) -> dict[str, str]:
        """The switches in force, by the names they have on disk."""
        return {
            "audio_codebook_round": self.audio_codebook_round,
            "audio_inv_freq_round": self.audio_inv_freq_round,
        }

    @property
    def frames_per_code(self) -> int:
        """Mel frames that one code frame covers."""
        return self.stride_size * self.avg_pooler  # 4

    def is_windowed(self, layer: int) -> bool:
        """Whether ``layer`` sees a window. In hybrid attention the last layer of each block of
        ``swa_per_block`` sees everything; without it every layer shares the configured window."""
        if self.encoder_attn_window_size == (-1, -1):
            return False
        return not self.hybrid_attention or layer % self.swa_per_block < self.swa_per_block - 1

    def _check(self, read: "_Reader") -> None:
        if self.d_model % self.encoder_attention_heads or self.head_dim % 2:
            read.refuse("encoder_attention_heads", "does not give an even head dimension")
        if self.window_size > self.nfft:
            read.refuse("window_size", f"exceeds nfft {self.nfft}")
        if not 0 <= self.fmin < self.fmax <= self.sampling_rate / 2:
            read.refuse("fmax", f"{self.fmin}..{self.fmax} Hz is no band below half the rate")
        if min(self.encoder_attn_window_size) < -1:
            read.refuse("encoder_attn_window_size", "holds a number below -1")
        skip = self.encoder_skip_layer_id
        if skip is not None and not 1 <= skip <= self.encoder_layers:
            read.refuse("encoder_skip_layer_id", f"is not a layer of 1..{self.encoder_layers}")


@dataclass(frozen=True, slots=True)
class AudioEncoderConfig:
    """Codes to embeddings: one table per codebook, local transformer over groups, projection."""

    audio_channels: int  # codebooks used, coarse first
    group_size: int  # code frames per embedding
    speech_vocab_size: tuple[int, ...]  # rows of each table
    speech_zeroemb_idx: tuple[int, ...]  # the code of each channel that contributes nothing
    input_local_layers: int
    input_local_dim: int
    input_local_attn_heads: int
    input_local_intermediate_size: int
    input_full_attention: bool
    out_hidden_size: int
    rope_theta: float
    projection_layers: int
    projection_hidden_dim: int
    add_post_norm: bool | None  # None: as the checkpoint's tensors say
    audio_segment_size: int  # mel frames encoded as one sequence

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> Self:
        """Read the model's ``config.json``. Raises CheckpointError naming the field.

        Speech-recognition checkpoints repeat the keys of ``audio_config`` at the top level and may
        leave the object out.
        """
        audio = config.get("audio_config") or config
        read = _Reader("audio_config", audio)
        channels = read.positive("audio_channels")
        group_size = read.positive("group_size")
        local_dim = read.positive("input_local_dim")
        self = cls(
            audio_channels=channels,
            group_size=group_size,
            speech_vocab_size=read.per_channel("speech_vocab_size", channels),
            speech_zeroemb_idx=read.per_channel("speech_zeroemb_idx", channels),
            input_local_layers=read.positive("input_local_layers"),
            input_local_dim=local_dim,
            input_local_attn_heads=read.positive("input_local_attn_heads"),
            input_local_intermediate_size=read.positive("input_local_intermediate_size"),
            input_full_attention=bool(audio.get("input_full_attention", True)),
            out_hidden_size=int(audio.get("out_hidden_size") or read.outer(config, "hidden_size")),
            rope_theta=float(audio.get("rope_theta", 640000)),
            projection_layers=int(audio.get("projection_layers", 1)),
            projection_hidden_dim=int(
                audio.get("projection_hidden_dim") or 4 * group_size * local_dim
            ),
            add_post_norm=audio.get("add_post_norm"),
            audio_segment_size=read.positive("audio_segment_size", 6000),
        )
        self._check(read)
        return self

    @property
    def head_dim(self) -> int:
        return self.input_local_dim // self.input_local_attn_heads

    @property
    def group_dim(self) -> int:
        """Width of a group laid out frame after frame, the projection's input."""
        return self.group_size * self.input_local_dim

    def check_tokenizer(self, tokenizer: AudioTokenizerConfig) -> None:
        """Raises CheckpointError when ``tokenizer`` cannot feed this encoder."""
        if self.audio_channels > tokenizer.num_quantizers:
            raise CheckpointError(
                f"audio_config.audio_channels is {self.audio_channels}, but the audio tokenizer "
                f"has {tokenizer.num_quantizers} codebooks"
            )
        for channel, size in enumerate(tokenizer.codebook_size[: self.audio_channels]):
            # A zero id inside the codebook would silence a real code.
            zero, vocabulary = self.speech_zeroemb_idx[channel], self.speech_vocab_size[channel]
            if not size <= zero < vocabulary:
                raise CheckpointError(
                    f"audio_config.speech_zeroemb_idx of channel {channel} is {zero}; it must lie "
                    f"past the codebook of {size} and inside the table of {vocabulary} rows"
                )
        tokens = tokenizer.frames_per_code * self.group_size  # 16 mel frames per embedding
        if self.audio_segment_size % tokens:
            # Otherwise groups would straddle segments and lengths would not add up.
            raise CheckpointError(
                f"audio_config.audio_segment_size is {self.audio_segment_size}, "
                f"not a multiple of {tokens} mel frames"
            )

    def _check(self, read: "_Reader") -> None:
        head_dim = read.fields.get("input_local_head_dim", self.head_dim)
        if head_dim * self.input_local_attn_heads != self.input_local_dim or head_dim % 2:
            read.refuse("input_local_head_dim", "times the heads is not input_local_dim")
        factor = read.fields.get("partial_rotary_factor", 1.0)
        if not math.isclose(factor, 1.0):
            read.refuse("partial_rotary_factor", f"{factor} is not supported; heads rotate whole")
        if self.projection_layers not in (1, 2):
            read.refuse("projection_layers", "must be 1 or 2")


# Switches of the published tokenizer configuration of which only one position is implemented.
_ONLY: dict[str, int | str] = {
    "kernel_size": 3,
    "stride_size": 2,
    "avg_pooler": 2,
    "position_embedding_type": "rope",
    "rope_type": "default",
    "ln_type": "LayerNorm",
    "activation_function": "gelu",
}


def _rounding(switches: Mapping[str, Any], name: str) -> Rounding:
    value = switches.get(name, Rounding.BF16)
    if value not in list(Rounding):
        raise CheckpointError(f"numeric_profile.{name} must be bf16 or none, found {value!r}")
    return Rounding(value)


class _Reader:
    """Typed access to a parsed JSON object whose errors name the file's section and the field."""

    def __init__(self, section: str, fields: Mapping[str, Any]) -> None:
        self.section = section
        self.fields = fields

    def refuse(self, name: str, why: str) -> None:
        raise CheckpointError(f"{self.section}: {name} {why}")

    def require(self, name: str, only: int | str) -> None:
        found = self.fields.get(name, only)
        if found != only:
            raise CheckpointError(f"{self.section}: {name} must be {only!r}, found {found!r}")

    def value(self, name: str) -> Any:
        if self.fields.get(name) is None:
            raise CheckpointError(f"{self.section}: {name} is missing")
        return self.fields[name]

    def outer(self, config: Mapping[str, Any], name: str) -> Any:
        if config.get(name) is None:
            raise CheckpointError(f"config.json: {name} is missing")
        return config[name]

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.value(name) if default is None else self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(name, f"must be a positive integer, found {value!r}")
        return int(value)

    def pair(self, name: str) -> tuple[int, int]:
        value = self.value(name)
        if len(value) != 2:
            self.refuse(name, f"must hold two numbers, found {value!r}")
        return int(value[0]), int(value[1])

    def extended(self, name: str, count: int) -> tuple[int, ...]:
        """A list whose last number repeats until there are ``count``."""
        value = tuple(int(item) for item in self.value(name))
        if not 1 <= len(value) <= count or min(value) < 1:
            self.refuse(name, f"must hold 1..{count} positive numbers, found {list(value)}")
        return value + value[-1:] * (count - len(value))

    def per_channel(self, name: str, channels: int) -> tuple[int, ...]:
        """A number for all channels, or one per channel written as ``1025-1025-129``."""
        value = self.value(name)
        numbers = tuple(int(part) for part in str(value).split("-"))
        if len(numbers) == 1:
            return numbers * channels
        if len(numbers) < channels:
            self.refuse(name, f"must hold {channels} numbers, found {value!r}")
        return numbers[:channels]
