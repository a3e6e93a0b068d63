"""Options of the audio process."""

from dataclasses import dataclass

from mimo.config import option
from mimo.rpc.server import ServerConfig
from services.audio.config import Rounding

SWITCHES = ("audio_codebook_round", "audio_inv_freq_round")


@dataclass(frozen=True, kw_only=True)
class AudioSettings(ServerConfig):
    """Encodes sound into embeddings for the language model."""

    model: str = option("", help="checkpoint directory; models/mimo-tiny of the checkout if there")
    audio_tokenizer_path: str = option(
        "", help="directory of the audio tokenizer; the model's audio_tokenizer by default"
    )
    served_model_name: str = option("", help="name in answers; the directory's name by default")
    address: str = option("127.0.0.1:50052", help="gRPC address of the service")
    store: str = option("redis://127.0.0.1:6379", help="URL of the embedding store")
    device: str = option("auto", help="auto, cpu, cuda or cuda:N")
    dtype: str = option(
        "auto",
        help="compute dtype; auto is float32 on a CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int = option(0, help="CPU threads; 0 is one for a narrow model, else one per core")
    attention: str = option("", help="attention backend, for all or as audio=NAME")
    max_batch_seconds: float = option(60.0, help="sound that is encoded in one batch")
    max_queued_seconds: float = option(7200.0, help="sound that may wait for the device")
    max_item_seconds: float = option(3600.0, help="length of the longest clip")
    fingerprint_from_index: bool = option(
        False, help="identify weights by names, shapes and sizes instead of reading every byte"
    )
    audio_codebook_round: str = option(
        "", help="rounding of the codebooks", choices=("", *Rounding)
    )
    audio_inv_freq_round: str = option(
        "", help="rounding of the tokenizer's rotary frequencies", choices=("", *Rounding)
    )

    def __post_init__(self) -> None:
        for name in ("max_batch_seconds", "max_queued_seconds", "max_item_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be positive")

    @property
    def numeric_overrides(self) -> dict[str, str]:
        """Switches that were given; they beat the checkpoint's ``numeric_profile``."""
        return {name: getattr(self, name) for name in SWITCHES if getattr(self, name)}
