"""Options of the vision process."""

from dataclasses import dataclass

from mimo.config import option
from mimo.rpc.server import ServerConfig
from services.vision.config import MergerNorm, PixelStats, SinkMode

SWITCHES = ("vision_sinks", "vision_merger_norm", "vision_pixel_stats")


@dataclass(frozen=True, kw_only=True)
class VisionSettings(ServerConfig):
    """Encodes images and video frames into embeddings for the language model."""

    model: str = option("", help="checkpoint directory; models/mimo-tiny of the checkout if there")
    served_model_name: str = option("", help="name in answers; the directory's name by default")
    address: str = option("127.0.0.1:50051", help="gRPC address of the service")
    store: str = option("redis://127.0.0.1:6379", help="URL of the embedding store")
    device: str = option("auto", help="auto, cpu, cuda or cuda:N")
    dtype: str = option(
        "auto",
        help="compute dtype; auto is float32 on a CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int = option(0, help="CPU threads; 0 is one for a narrow tower, else one per core")
    attention: str = option("", help="attention backend, for all or as vision=NAME")
    max_batch_patches: int = option(16_384, help="patches that pass the tower in one call")
    max_queued_patches: int = option(1 << 20, help="patches that may wait for the device")
    max_item_patches: int = option(1 << 20, help="patches of the largest image or clip")
    max_item_bytes: int = option(1 << 31, help="bytes of the largest upload of frames")
    fingerprint_from_index: bool = option(
        False, help="identify weights by names, shapes and sizes instead of reading every byte"
    )
    vision_sinks: str = option("", help="what sinks do", choices=("", *SinkMode))
    vision_merger_norm: str = option("", help="the merger's first norm", choices=("", *MergerNorm))
    vision_pixel_stats: str = option(
        "", help="where pixel mean and deviation come from", choices=("", *PixelStats)
    )

    def __post_init__(self) -> None:
        limits = ("max_batch_patches", "max_queued_patches", "max_item_patches", "max_item_bytes")
        for name in limits:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be positive")
        if self.threads < 0:
            raise ValueError("--threads must not be negative")

    @property
    def numeric_overrides(self) -> dict[str, str]:
        """Switches that were given; they beat the checkpoint's ``numeric_profile``."""
        return {name: getattr(self, name) for name in SWITCHES if getattr(self, name)}
