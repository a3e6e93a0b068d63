"""Options of the audio process."""

from dataclasses import dataclass

from mimo.config import option
from mimo.leaf.settings import LeafSettings
from services.audio.config import Rounding


@dataclass(frozen=True, kw_only=True)
class AudioSettings(LeafSettings):
    """Encodes sound into embeddings for the language model."""

    switches = ("audio_codebook_round", "audio_inv_freq_round")

    address: str = option("127.0.0.1:50052", help="gRPC address of the service")
    audio_tokenizer_path: str = option(
        "", help="directory of the audio tokenizer; the model's audio_tokenizer by default"
    )
    max_batch_seconds: float = option(60.0, help="sound that is encoded in one batch", at_least=1)
    max_queued_seconds: float = option(
        7200.0, help="sound that may wait for the device", at_least=1
    )
    max_item_seconds: float = option(3600.0, help="length of the longest clip", at_least=1)
    audio_codebook_round: str = option(
        "", help="rounding of the codebooks", choices=("", *Rounding)
    )
    audio_inv_freq_round: str = option(
        "", help="rounding of the tokenizer's rotary frequencies", choices=("", *Rounding)
    )
