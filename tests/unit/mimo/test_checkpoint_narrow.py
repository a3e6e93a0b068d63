"""A part of a tensor: rows, columns, and rows of rows that lie apart."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from mimo.checkpoint.index import CheckpointIndex
from mimo.checkpoint.loader import load
from mimo.checkpoint.rules import Narrow, Part, SplitFusedQkv, parts_of
from mimo.errors import CheckpointError


def test_rows_and_columns_are_read(tmp_path: Path) -> None:
    weight, bias = torch.arange(24.0).view(4, 6), torch.arange(4.0)
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": weight, "bias": bias}, tmp_path / "m.safetensors")
    with torch.device("meta"):
        module = nn.Linear(2, 3)
    rows, columns = Narrow("weight|bias", 0, 1, 4, 4), Narrow("weight", 1, 2, 4, 6)
    load(module, CheckpointIndex.open(tmp_path), (rows, columns))
    assert torch.equal(module.weight, weight[1:4, 2:4])
    assert torch.equal(module.bias, bias[1:4])
    assert module.weight.is_contiguous()
    assert module.weight.untyped_storage().nbytes() == 3 * 2 * 4


def test_a_part_of_interleaved_rows_keeps_the_order_of_heads() -> None:
    fused = SplitFusedQkv("qkv_proj", 4, 2, 1, 1, chunks=2, rows="interleaved")
    # Two chunks of [q q k v]: queries 0 1 4 5, keys 2 6, values 3 7. The middle two queries.
    middle = Narrow("q_proj", 0, 1, 3, 4)
    q, k, v = parts_of("qkv_proj.weight", (8, 5), (fused, middle))
    assert q == Part("q_proj.weight", ((1, 2), (4, 5)))
    assert (k.rows, v.rows) == (((2, 3), (6, 7)), ((3, 4), (7, 8)))


@pytest.mark.parametrize(("dim", "shape"), [(0, (5, 6)), (1, (4, 7)), (1, (4,))])
def test_another_size_than_announced_is_refused(dim: int, shape: tuple[int, ...]) -> None:
    rule = Narrow("weight", dim, 0, 2, (4, 6)[dim])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="tensor weight: expected [46] in dimension"):
        parts_of("weight", shape, (rule,))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5),
    st.data(),
)
def test_rows_of_rows_are_what_slicing_twice_gives(
    pieces: list[tuple[int, int]], data: st.DataObject
) -> None:
    part = Part("weight", tuple((start, start + length) for start, length in pieces))
    rows = [row for first, last in part.rows or () for row in range(first, last)]
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    kept = Narrow("weight", 0, start, stop, len(rows)).narrow(part, (60, 1))
    assert [row for first, last in kept.rows or () for row in range(first, last)] == rows[
        start:stop
    ]
