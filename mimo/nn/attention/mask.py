"""What the queries of a batch of segments see, as a bias on their scores."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mask:
    """Query i of segment b stands at ``offsets[b] + i`` and the segment ends before ``ends[b]``;
    both count from the first key. One entry stands for segments that are all alike.

    ``left`` and ``right``: how many keys a query sees before and after itself; None is no limit.
    """

    offsets: tuple[int, ...]
    ends: tuple[int, ...]
    shape: tuple[int, int]  # queries, keys
    left: int | None
    right: int | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls,
        offsets: tuple[int, ...],
        ends: tuple[int, ...],
        shape: tuple[int, int],
        left: int | None,
        right: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self | None:
        """None where everything is seen."""
        num_queries, num_keys = shape
        hides_left = left is not None and max(offsets) + num_queries - 1 - left > 0
        hides_right = right is not None and min(offsets) + right < num_keys - 1
        if not (hides_left or hides_right or min(ends) < num_keys):
            return None
        if len({*zip(offsets, ends, strict=True)}) == 1:
            offsets, ends = offsets[:1], ends[:1]
        return cls(offsets, ends, shape, left, right, dtype, device)

    def tensor(self) -> Tensor:
        """0 where a query sees a key, else minus infinity. [B or 1, 1, Q, S]."""
        return _build(self)


@lru_cache(maxsize=16)
def _build(mask: Mask) -> Tensor:
    """Remembered because it is the same for the layers of a step and for a window's inner tiles."""
    num_queries, num_keys = mask.shape
    with torch.inference_mode(False):  # what is remembered must serve under autograd, too
        bounds = torch.tensor([mask.offsets, mask.ends], device=mask.device)
        offset, end = bounds[:, :, None, None, None]
        query = offset + torch.arange(num_queries, device=mask.device)[:, None]  # [B, 1, Q, 1]
        key = torch.arange(num_keys, device=mask.device)
        hidden = (key >= end).expand(-1, -1, num_queries, -1)  # [B, 1, Q, S]
        if mask.right is not None:
            hidden = hidden | (key > query + mask.right)
        if mask.left is not None:
            hidden = hidden | (key < query - mask.left)
        zeros = torch.zeros(hidden.shape, dtype=mask.dtype, device=mask.device)
        return zeros.masked_fill_(hidden, float("-inf"))
