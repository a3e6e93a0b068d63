"""In which order a block sees the patches of a frame, and where each patch lies.

Patches arrive in row order: unit row, unit column, then row and column inside the unit. Blocks with
a vertical band see the same units column by column; inside a unit nothing moves. A frame keeps its
place among the frames, so segment borders are the same in both orders, and the first patch of a
frame is its top left one in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Grid = tuple[int, int, int]  # (t, h, w) in patches; h and w are multiples of the merge size


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Segments, positions and orders of packed patches."""

    segment_lens: tuple[int, ...]  # one segment per frame pair: h * w patches
    positions: Tensor  # [P, 2] int64: row and column of each patch in its frame, in row order
    column_order: Tensor  # [M] int64: which unit comes at each place of the column order
    row_order: Tensor  # [M] int64: the inverse

    @classmethod
    def of(cls, grids: Sequence[Grid], merge_size: int, device: torch.device) -> "PatchLayout":
        """Layout of items with these grids, one after the other."""
        positions, column_orders, segment_lens = [], [], []
        num_units = 0
        for t, h, w in grids:
            frame_positions, frame_order = _frame(h, w, merge_size)
            for _ in range(t):
                positions.append(frame_positions)
                column_orders.append(frame_order + num_units)
                segment_lens.append(h * w)
                num_units += frame_order.numel()
        column_order = torch.cat(column_orders)
        return cls(
            segment_lens=tuple(segment_lens),
            positions=torch.cat(positions).to(device),
            column_order=column_order.to(device),
            row_order=column_order.argsort().to(device),
        )


def reorder(x: Tensor, unit_order: Tensor, unit_size: int) -> Tensor:
    """Move whole units of ``unit_size`` rows. x: [P, ...], unit_order: [P / unit_size]."""
    return x.reshape(-1, unit_size, *x.shape[1:])[unit_order].flatten(0, 1)


@lru_cache(maxsize=64)
def _frame(h: int, w: int, merge_size: int) -> tuple[Tensor, Tensor]:
    """Positions [h * w, 2] and column order [h * w / merge_size^2] of one frame, on the host."""
    # A tensor born in inference mode could not be used in training later; this one is shared.
    with torch.inference_mode(False):
        unit_rows, unit_columns = h // merge_size, w // merge_size
        units = torch.arange(unit_rows * unit_columns).view(unit_rows, unit_columns)
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        positions = torch.stack([y, x], dim=-1)  # [h, w, 2]
        positions = positions.view(unit_rows, merge_size, unit_columns, merge_size, 2)
        return positions.transpose(1, 2).reshape(h * w, 2), units.T.reshape(-1)
