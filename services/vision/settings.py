"""Options of the vision process."""

from dataclasses import dataclass

from mimo.config import option
from mimo.leaf.settings import LeafSettings
from services.vision.config import MergerNorm, PixelStats, SinkMode


@dataclass(frozen=True, kw_only=True)
class VisionSettings(LeafSettings):
    """Encodes images and video frames into embeddings for the language model."""

    switches = ("vision_sinks", "vision_merger_norm", "vision_pixel_stats")

    address: str = option("127.0.0.1:50051", help="gRPC address of the service")
    max_batch_patches: int = option(
        16_384, help="patches that pass the tower in one call", at_least=1
    )
    max_queued_patches: int = option(
        1 << 20, help="patches that may wait for the device", at_least=1
    )
    max_item_patches: int = option(1 << 20, help="patches of the largest image or clip", at_least=1)
    max_item_bytes: int = option(1 << 31, help="bytes of the largest upload of frames", at_least=1)
    vision_sinks: str = option("", help="what sinks do", choices=("", *SinkMode))
    vision_merger_norm: str = option("", help="the merger's first norm", choices=("", *MergerNorm))
    vision_pixel_stats: str = option(
        "", help="where pixel mean and deviation come from", choices=("", *PixelStats)
    )
