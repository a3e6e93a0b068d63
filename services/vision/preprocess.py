"""Frames -> patches, on the tower's device: resize, normalise, cut up."""

import torch
from torch import Tensor

from mimo.nn.resize import bilinear
from services.vision.config import VisionTowerConfig
from services.vision.plan import VisionPlan

RESIZE_VALUES = 1 << 24  # 64 MiB of float32 at source size, however many frames there are


class Preprocessor:
    """The arithmetic between decoded frames and the tower. Stateless but for its constants."""

    def __init__(self, config: VisionTowerConfig, device: str) -> None:
        self._config = config
        self._device = device
        # Statistics are on a 0..1 scale, pixels are 0..255.
        self._mean = 255 * torch.tensor(config.pixel_mean, device=device)  # [C]
        self._std = 255 * torch.tensor(config.pixel_std, device=device)  # [C]

    def __call__(self, frames: Tensor, plan: VisionPlan) -> Tensor:
        """Patches of whole frames of an item, in row order.

        frames: [F, H, W, C], uint8 at source size or float32 0..255 at target size
        -> [P, C * T * P * P] float32. Frames are padded to whole temporal patches by repeating the
        last one, which for a still image means that both halves are the same.
        """
        if plan.resized:
            pixels = frames.to(self._device)  # [F, h, w, C]
        else:
            pixels = self._resize(frames, plan.target_height, plan.target_width)  # [F, h, w, C]
        return self._patchify((pixels - self._mean) / self._std)

    def _resize(self, frames: Tensor, height: int, width: int) -> Tensor:
        """[F, H, W, C] uint8 -> [F, height, width, C] float32

        Bilinear without antialias, not rounded back to 8 bits: what the model was trained on.
        """
        run = max(1, RESIZE_VALUES // frames[0].numel())  # frames at source size and in float32
        parts = [
            bilinear(part.to(self._device), height, width) for part in torch.split(frames, run)
        ]
        return torch.cat(parts)

    def _patchify(self, pixels: Tensor) -> Tensor:
        """[F, h, w, C] -> [P, C * T * P * P]

        Rows follow units (row by row), then the patches of a unit; columns follow the flattened
        kernel of a 3-D convolution: channel, frame, row, column.
        """
        merge, size = self._config.spatial_merge_size, self._config.patch_size
        duration = self._config.temporal_patch_size
        missing = -len(pixels) % duration
        if missing:
            pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
        _, height, width, channels = pixels.shape
        unit_rows, unit_columns = height // (merge * size), width // (merge * size)
        pixels = pixels.reshape(
            -1, duration, unit_rows, merge, size, unit_columns, merge, size, channels
        )
        # -> [t, unit rows, unit columns, M, M, C, T, P, P]
        pixels = pixels.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return pixels.reshape(-1, self._config.patch_dim)
