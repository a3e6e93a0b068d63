"""Orders of units and positions of patches."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.vision.window import PatchLayout, reorder

CPU = torch.device("cpu")
HALF = st.integers(1, 6)


def layout(*grids: tuple[int, int, int]) -> PatchLayout:
    return PatchLayout.of(grids, 2, CPU)


def test_patches_of_a_unit_are_neighbours_in_row_order() -> None:
    positions = [f"{y}{x}" for y, x in layout((1, 4, 6)).positions.tolist()]
    assert " ".join(positions) == (
        "00 01 10 11 02 03 12 13 04 05 14 15 20 21 30 31 22 23 32 33 24 25 34 35"
    )


def test_column_order_walks_down_each_column_of_units() -> None:
    one = layout((1, 4, 6))
    assert one.column_order.tolist() == [0, 3, 1, 4, 2, 5]
    assert one.row_order.tolist() == [0, 2, 4, 1, 3, 5]
    assert layout((2, 4, 6)).column_order.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_every_temporal_grid_is_a_segment() -> None:
    assert layout((1, 4, 6), (2, 8, 4)).segment_lens == (24, 32, 32)


@given(st.lists(st.tuples(st.integers(1, 3), HALF, HALF), min_size=1, max_size=3))
def test_row_order_undoes_column_order(halves: list[tuple[int, int, int]]) -> None:
    packed = layout(*[(t, 2 * h, 2 * w) for t, h, w in halves])
    patches = torch.arange(sum(packed.segment_lens))
    there = reorder(patches, packed.column_order, 4)
    assert reorder(there, packed.row_order, 4).equal(patches)
    # No patch leaves its frame, and each frame keeps its first patch.
    start = 0
    for length in packed.segment_lens:
        frame = there[start : start + length]
        assert frame[0] == start
        assert frame.sort().values.equal(patches[start : start + length])
        start += length
