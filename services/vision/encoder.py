"""Encodes a batch of images and clips: cut to a patch budget, preprocess, run the tower."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mimo.errors import InvalidRequest
from mimo.nn.interop import from_torch, to_torch
from mimo.tensor import RawTensor
from services.vision.model import VisionTower
from services.vision.plan import VisionPlan
from services.vision.preprocess import Preprocessor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive temporal grids of one item that go through the tower together."""

    item: int
    first_grid: int
    num_grids: int


class VisionEncoder:
    """Frames in, embeddings out, for items of many requests at once.

    At most ``max_patches`` patches pass through the tower in one call, so memory stays bounded
    however long a clip is. Cutting a clip between its temporal grids is exact: attention never
    crosses them. A single grid larger than the budget still runs, alone.
    """

    def __init__(self, tower: VisionTower, preprocessor: Preprocessor, *, max_patches: int) -> None:
        self._tower = tower
        self._preprocessor = preprocessor
        self._max_patches = max_patches

    @torch.inference_mode()
    def encode(self, items: Sequence[tuple[VisionPlan, RawTensor]]) -> list[RawTensor]:
        """Embeddings [tokens, out_hidden_size] of each item, in the tower's dtype.

        Raises InvalidRequest when an item's float frames hold NaN or infinity.
        """
        outputs: list[list[Tensor]] = [[] for _ in items]
        for pieces in self._batches([plan for plan, _ in items]):
            patches = torch.cat([self._patches(*items[piece.item], piece) for piece in pieces])
            grids = [(piece.num_grids, *items[piece.item][0].grid_thw[1:]) for piece in pieces]
            embeddings = self._tower(patches, grids)  # [M, D]
            lens = [t * h * w // self._tower.config.merge_factor for t, h, w in grids]
            for piece, rows in zip(pieces, embeddings.split(lens), strict=True):
                outputs[piece.item].append(rows)
        return [from_torch(torch.cat(rows)) for rows in outputs]

    def _batches(self, plans: Sequence[VisionPlan]) -> Iterator[list[_Piece]]:
        """Fill batches with whole grids, in order."""
        batch: list[_Piece] = []
        room = self._max_patches
        for item, plan in enumerate(plans):
            grid = 0
            while grid < plan.grid_thw[0]:
                if batch and room < plan.patches_per_grid:
                    yield batch
                    batch, room = [], self._max_patches
                count = max(room // plan.patches_per_grid, 1)
                count = min(count, plan.grid_thw[0] - grid)
                batch.append(_Piece(item, grid, count))
                room -= count * plan.patches_per_grid
                grid += count
        if batch:
            yield batch

    def _patches(self, plan: VisionPlan, frames: RawTensor, piece: _Piece) -> Tensor:
        """Patches of one piece: [P, C * T * P * P] float32 on the device."""
        per_grid = self._tower.config.temporal_patch_size
        first = piece.first_grid * per_grid
        last = min(first + piece.num_grids * per_grid, plan.num_frames)
        pixels = to_torch(frames.rows(first, last))  # [F, H, W, C]
        if plan.resized and not pixels.isfinite().all():
            raise InvalidRequest("the frames hold NaN or infinity", field="frames")
        return self._preprocessor(pixels, plan)
