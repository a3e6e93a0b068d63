"""Bounds on media, checked before anything is allocated for them."""

from dataclasses import dataclass

from gateway.items import Modality

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Defaults of the service; a tenant may have lower ones."""

    max_items: int = 64
    max_images: int = 64
    max_audios: int = 16
    max_videos: int = 8

    max_image_bytes: int = 20 * MIB
    max_audio_bytes: int = 64 * MIB
    max_video_bytes: int = 256 * MIB

    max_image_pixels: int = 64_000_000
    max_image_side: int = 32768
    max_image_aspect: int = 200
    max_jpeg_scans: int = 64
    max_jpeg_scan_pixels: int = 640_000_000  # pixels times scans

    max_audio_s: float = 3600.0
    max_audio_channels: int = 32
    min_sample_rate: int = 4000
    max_sample_rate: int = 384_000

    max_frame_pixels: int = 16_700_000
    max_frame_side: int = 8192
    max_video_s: float = 3600.0
    max_video_frames: int = 216_000
    max_decoded_pixels: int = 10_000_000_000  # of all frames that must be decoded
    max_streams: int = 16

    # CPU seconds and address space of one decoding job.
    image_cpu_s: int = 10
    audio_cpu_s: int = 60
    video_cpu_s: int = 90
    image_memory_bytes: int = 2048 * MIB
    audio_memory_bytes: int = 1024 * MIB
    video_memory_bytes: int = 2048 * MIB

    def source_bytes(self, modality: Modality) -> int:
        """Largest compressed size of one item."""
        return {
            Modality.IMAGE: self.max_image_bytes,
            Modality.AUDIO: self.max_audio_bytes,
            Modality.VIDEO: self.max_video_bytes,
        }[modality]

    def items(self, modality: Modality) -> int:
        """Most items of one kind in a request."""
        return {
            Modality.IMAGE: self.max_images,
            Modality.AUDIO: self.max_audios,
            Modality.VIDEO: self.max_videos,
        }[modality]

    def cpu_s(self, modality: Modality) -> int:
        return {
            Modality.IMAGE: self.image_cpu_s,
            Modality.AUDIO: self.audio_cpu_s,
            Modality.VIDEO: self.video_cpu_s,
        }[modality]

    def memory_bytes(self, modality: Modality) -> int:
        return {
            Modality.IMAGE: self.image_memory_bytes,
            Modality.AUDIO: self.audio_memory_bytes,
            Modality.VIDEO: self.video_memory_bytes,
        }[modality]
