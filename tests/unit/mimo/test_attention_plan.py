"""What the layers of a step share: groups, rows of keys and queries, masks."""

from dataclasses import replace

import torch

from mimo.nn.attention import AttentionNeeds, Paged, Sink, Varlen
from mimo.nn.attention.mask import Mask
from mimo.nn.attention.plan import QUERY_CHUNK, make_plan
from mimo.nn.attention.segment import KEY_MULTIPLE

CPU = torch.device("cpu")
FULL = AttentionNeeds(
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    v_head_dim=4,
    scale=1.0,
    causal=True,
    left=None,
    right=None,
    sink=Sink.COLUMN,
    paged=True,
    dtype=torch.float32,
    device="cpu",
)
WINDOW = replace(FULL, left=7)


def paged(q_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> Paged:
    """Blocks of four in descending order, request after request."""
    width = max(-(-length // 4) for length in context_lens)
    blocks = torch.arange(len(q_lens) * width, dtype=torch.int32).flip(0)
    return Paged(q_lens, context_lens, blocks.view(len(q_lens), width), 4)


def slot(meta: Paged, request: int, position: int) -> int:
    return int(meta.block_tables[request, position // 4]) * 4 + position % 4


def test_the_layers_of_a_step_share_a_plan_and_other_steps_do_not() -> None:
    first, second = paged((1, 1), (9, 20)), paged((1, 1), (9, 20))
    assert make_plan(FULL, first, CPU) is make_plan(FULL, first, CPU)
    assert make_plan(FULL, first, CPU) is not make_plan(FULL, second, CPU)
    assert make_plan(FULL, first, CPU) is not make_plan(WINDOW, first, CPU)


def test_requests_that_fill_their_window_go_together_as_long_as_they_are() -> None:
    meta = paged((1, 1, 1), (9, 30, 17))
    (group,) = make_plan(WINDOW, meta, CPU).groups
    (tile,) = group.tiles
    assert isinstance(tile.keys, torch.Tensor)
    seen = [slot(meta, r, p) for r, n in enumerate(meta.context_lens) for p in range(n - 8, n)]
    assert tile.keys.tolist() == seen
    assert tile.mask is None


def test_shorter_histories_are_padded_with_their_last_key_behind_a_mask() -> None:
    meta = paged((1, 1), (3, 5))
    (group,) = make_plan(FULL, meta, CPU).groups
    (tile,) = group.tiles
    assert isinstance(tile.keys, torch.Tensor)
    assert isinstance(tile.mask, torch.Tensor)
    rows = tile.keys.view(2, KEY_MULTIPLE)
    assert rows[0].tolist() == [slot(meta, 0, min(p, 2)) for p in range(KEY_MULTIPLE)]
    assert (tile.mask[:, 0, 0] == 0).sum(dim=-1).tolist() == [3, 5]


def test_groups_that_are_not_adjacent_are_put_back_in_order() -> None:
    plan = make_plan(FULL, Varlen((1, 2, 1), (1, 2, 1)), CPU)
    assert [[s.index for s in group.segments] for group in plan.groups] == [[0, 2], [1]]
    assert plan.order is not None
    packed = torch.tensor([0, 3, 1, 2])  # rows of the groups, one after the other
    assert packed[plan.order].tolist() == [0, 1, 2, 3]
    assert make_plan(FULL, Varlen((1, 1, 2), (1, 1, 2)), CPU).order is None


def test_masks_of_long_segments_wait_until_they_are_needed() -> None:
    length = 2 * QUERY_CHUNK
    (group,) = make_plan(FULL, Varlen((length,), (length,)), CPU).groups
    masks = [tile.mask for tile in group.tiles]
    assert all(isinstance(mask, Mask) for mask in masks)
