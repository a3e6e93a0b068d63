"""Bilinear resizing on the device; ``mimo.media.resize`` is the NumPy twin."""

import torch
from torch import Tensor
from torch.nn import functional as F


def bilinear(image: Tensor, height: int, width: int) -> Tensor:
    """Resize with half-pixel centres and no antialiasing; the result is not rounded or clamped.

    image: [..., rows, columns, C] of any dtype -> float32 [..., height, width, C]
    """
    batch = image.shape[:-3]
    planes = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2).to(torch.float32)
    resized = F.interpolate(  # [B, C, height, width]
        planes, (height, width), mode="bilinear", align_corners=False, antialias=False
    )
    return resized.permute(0, 2, 3, 1).reshape(*batch, height, width, image.shape[-1])
