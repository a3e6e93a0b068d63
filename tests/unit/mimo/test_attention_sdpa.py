"""What the portable backend promises beyond agreement: gradients, memory, limits."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.nn.attention import AttentionNeeds, Sink, Varlen
from mimo.nn.attention.sdpa import SdpaBackend

NEEDS = AttentionNeeds(
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    v_head_dim=4,
    scale=0.4,
    causal=True,
    left=3,
    right=None,
    sink=Sink.NONE,
    paged=False,
    dtype=torch.float64,
    device="cpu",
)


def inputs(needs: AttentionNeeds, num_queries: int, num_keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (num_queries, needs.num_heads, needs.head_dim),
        (num_keys, needs.num_kv_heads, needs.head_dim),
        (num_keys, needs.num_kv_heads, needs.v_head_dim),
    ]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(needs.dtype) for s in shapes
    ]


@pytest.mark.parametrize("sink", Sink)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_reach_queries_keys_values_and_sinks(sink: Sink, causal: bool) -> None:
    needs = replace(NEEDS, sink=sink, causal=causal, right=None if causal else 3)
    meta = Varlen((5, 2, 5), (5, 4, 5))
    tensors = inputs(needs, 12, 14)
    sinks = None if sink is Sink.NONE else torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*tensors, *([] if sinks is None else [sinks]))]

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        given = leaves[3] if len(leaves) == 4 else None
        return SdpaBackend().varlen(needs, *leaves[:3], meta, given)

    assert torch.autograd.gradcheck(attend, leaves)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(("causal", "right"), [(True, None), (False, 64)])
def test_a_window_never_holds_the_square_of_the_length(causal: bool, right: int | None) -> None:
    needs = replace(NEEDS, causal=causal, left=64, right=right, sink=Sink.KEY0, dtype=torch.float32)
    length = 3000
    with LargestTensor() as largest:
        tensors = inputs(needs, length, length)
        SdpaBackend().varlen(needs, *tensors, Varlen((length,), (length,)), torch.ones(4))
    assert largest.numel <= needs.num_heads * 128 * (128 + 2 * 64 + 1)


def test_full_attention_over_a_long_segment_is_chunked() -> None:
    needs = replace(NEEDS, left=None, sink=Sink.COLUMN, dtype=torch.float32)
    length = 3000
    with LargestTensor() as largest:
        tensors = inputs(needs, length, length)
        SdpaBackend().varlen(needs, *tensors, Varlen((length,), (length,)), torch.ones(4))
    assert largest.numel <= needs.num_heads * 128 * (length + 1)


def test_an_infinitely_low_column_sink_is_no_sink() -> None:
    meta = Varlen((7,), (7,))
    tensors = inputs(NEEDS, 7, 7)
    plain = SdpaBackend().varlen(NEEDS, *tensors, meta, None)
    needs = replace(NEEDS, sink=Sink.COLUMN)
    off = torch.full((4,), float("-inf"), dtype=torch.float64)
    torch.testing.assert_close(SdpaBackend().varlen(needs, *tensors, meta, off), plain)
    on = torch.full((4,), 500.0, dtype=torch.float64)
    assert SdpaBackend().varlen(needs, *tensors, meta, on).abs().max() < 1e-12


def test_key0_touches_only_queries_that_see_the_first_key() -> None:
    needs = replace(NEEDS, causal=False, left=3, right=3)
    meta = Varlen((9, 9), (9, 9))
    tensors = inputs(needs, 18, 18)
    plain = SdpaBackend().varlen(needs, *tensors, meta, None)
    sinks = torch.full((4,), 2.0, dtype=torch.float64)
    sunk = SdpaBackend().varlen(replace(needs, sink=Sink.KEY0), *tensors, meta, sinks)
    changed = (sunk - plain).abs().amax(dim=(1, 2)) > 1e-9
    assert changed.tolist() == ([True] * 4 + [False] * 5) * 2


def test_no_segments_give_no_rows() -> None:
    out = SdpaBackend().varlen(NEEDS, *inputs(NEEDS, 0, 0), Varlen((), ()), None)
    assert out.shape == (0, 4, 4)


def test_a_segment_without_queries_leaves_its_neighbours_alone() -> None:
    q, k, v = inputs(NEEDS, 4, 9)
    out = SdpaBackend().varlen(NEEDS, q, k, v, Varlen((2, 0, 2), (3, 4, 2)), None)
    first = SdpaBackend().varlen(NEEDS, q[:2], k[:3], v[:3], Varlen((2,), (3,)), None)
    last = SdpaBackend().varlen(NEEDS, q[2:], k[7:], v[7:], Varlen((2,), (2,)), None)
    assert torch.equal(out, torch.cat((first, last)))
