"""Batches of items through the tower: what goes together, and that it does not matter."""

import math

import pytest
import torch
from torch import Tensor

from mimo.errors import InvalidRequest
from mimo.nn.attention import AttentionSelector
from mimo.nn.interop import from_torch, to_torch
from mimo.tensor import RawTensor
from services.vision.config import VisionTowerConfig
from services.vision.encoder import VisionEncoder
from services.vision.model import VisionTower
from services.vision.plan import VisionPlan
from services.vision.preprocess import Preprocessor
from services.vision.window import Grid
from tests.support import golden_vision

CONFIG = VisionTowerConfig.from_checkpoint(golden_vision.config())

IMAGE = VisionPlan(1, 20, 30, 16, 24, (1, 4, 6))
CLIP = VisionPlan(5, 32, 16, 32, 16, (3, 8, 4))
STRIP = VisionPlan(1, 9, 40, 8, 32, (1, 2, 8), resized=True)


class RecordingTower(VisionTower):
    """Remembers which grids went through together."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(CONFIG, AttentionSelector("vision"))
        self.calls: list[list[Grid]] = []

    def forward(self, patches: Tensor, grids: list[Grid]) -> Tensor:  # type: ignore[override]
        self.calls.append(grids)
        return super().forward(patches, grids)


def frames(plan: VisionPlan, seed: int) -> RawTensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, plan.frames_shape, generator=generator, dtype=torch.uint8)
    return from_torch(values.float() if plan.resized else values)


ITEMS = [(IMAGE, frames(IMAGE, 1)), (CLIP, frames(CLIP, 2)), (STRIP, frames(STRIP, 3))]


def encoder(max_patches: int) -> tuple[VisionEncoder, RecordingTower]:
    tower = RecordingTower()
    return VisionEncoder(tower, Preprocessor(CONFIG, "cpu"), max_patches=max_patches), tower


def test_one_call_when_everything_fits() -> None:
    encode, tower = encoder(24 + 96 + 16)
    rows = encode.encode(ITEMS)
    assert tower.calls == [[(1, 4, 6), (3, 8, 4), (1, 2, 8)]]
    assert [(r.dtype, r.shape) for r in rows] == [
        ("float32", (6, 24)),
        ("float32", (24, 24)),
        ("float32", (4, 24)),
    ]


def test_long_clip_is_cut_between_grids_to_fill_the_budget() -> None:
    encode, tower = encoder(60)
    encode.encode(ITEMS)
    assert tower.calls == [[(1, 4, 6), (1, 8, 4)], [(1, 8, 4)], [(1, 8, 4), (1, 2, 8)]]


def test_grid_larger_than_the_budget_runs_alone() -> None:
    encode, tower = encoder(8)
    encode.encode(ITEMS)
    assert tower.calls == [[(1, 4, 6)], [(1, 8, 4)], [(1, 8, 4)], [(1, 8, 4)], [(1, 2, 8)]]


@pytest.mark.parametrize("max_patches", [8, 60, 64, 1 << 20])
def test_company_and_cuts_do_not_change_an_embedding(max_patches: int) -> None:
    """Up to the last bits: matrix products of other sizes round differently."""
    together = encoder(max_patches)[0].encode(ITEMS)
    for item, rows in zip(ITEMS, together, strict=True):
        alone = to_torch(encoder(1 << 20)[0].encode([item])[0])
        assert (to_torch(rows) - alone).abs().max().item() <= 1e-5 * alone.abs().max().item()


def test_equal_batches_give_equal_bits() -> None:
    first, second = encoder(60)[0].encode(ITEMS), encoder(60)[0].encode(ITEMS)
    assert [bytes(rows.data) for rows in first] == [bytes(rows.data) for rows in second]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_frames_must_be_finite(value: float) -> None:
    broken = to_torch(frames(STRIP, 3)).clone()
    broken[0, 1, 2, 0] = value
    with pytest.raises(InvalidRequest, match="NaN"):
        encoder(60)[0].encode([(STRIP, from_torch(broken))])


def test_order_of_items_is_the_order_of_embeddings() -> None:
    straight = encoder(60)[0].encode(ITEMS)
    turned = encoder(60)[0].encode(ITEMS[::-1])[::-1]
    for one, other in zip(straight, turned, strict=True):
        torch.testing.assert_close(to_torch(one), to_torch(other), rtol=1e-5, atol=1e-6)
