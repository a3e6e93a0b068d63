"""The kernel for CPUs against a dense float64 softmax, and the bits that it promises."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mimo.nn.attention import Paged, Sink, Varlen
from mimo.nn.attention.native import NativeBackend
from tests.support.attention_cases import TOLERANCES, Case, dense, into_blocks, make_case

DTYPES = (torch.float32, torch.bfloat16)
SINKS = (Sink.NONE, Sink.COLUMN)
HEADS = {  # query heads, kv heads, head dim, value head dim
    "mha": (2, 2, 16, 16),
    "gqa of two": (4, 2, 96, 64),
    "gqa of seven, wide values": (7, 1, 48, 80),
    "gqa of eight": (16, 2, 192, 128),
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_head = pytest.mark.parametrize("heads", HEADS)
each_sink = pytest.mark.parametrize("sink", SINKS)
each_mask = pytest.mark.parametrize("mask", ["causal", "causal window", "short causal window"])


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    backend = NativeBackend()
    obstacle = backend.unsupported(
        make_case("causal", Sink.NONE, HEADS["mha"], torch.float32, paged=True).needs
    )
    if obstacle is not None:
        pytest.skip(f"no kernel here: {obstacle}")
    return backend


@each_dtype
@each_head
@each_sink
@each_mask
def test_cached_keys_give_the_dense_softmax(
    native: NativeBackend, mask: str, sink: Sink, heads: str, dtype: torch.dtype
) -> None:
    case = make_case(mask, sink, HEADS[heads], dtype, paged=True)
    actual = native.paged(case.needs, case.q, *into_blocks(case), case.sinks)
    assert actual.dtype == dtype
    assert np.abs(actual.double().numpy() - dense(case)).max() < TOLERANCES[dtype]


@each_dtype
@each_head
@each_sink
@each_mask
def test_packed_keys_give_the_bits_of_cached_ones(
    native: NativeBackend, mask: str, sink: Sink, heads: str, dtype: torch.dtype
) -> None:
    case = make_case(mask, sink, HEADS[heads], dtype, paged=True)
    cached = native.paged(case.needs, case.q, *into_blocks(case), case.sinks)
    meta = Varlen(case.q_lens, case.k_lens)
    packed = native.varlen(case.needs, case.q, case.k, case.v, meta, case.sinks)
    assert torch.equal(packed, cached)


@each_dtype
@each_sink
@each_mask
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(
    native: NativeBackend, mask: str, sink: Sink, dtype: torch.dtype, block_size: int
) -> None:
    """Not only a segment: every row of a prompt, as if the prompt came a token at a time."""
    case = make_case(mask, sink, HEADS["gqa of two"], dtype, paged=True)
    k_cache, v_cache, meta = into_blocks(case, block_size)
    together = native.paged(case.needs, case.q, k_cache, v_cache, meta, case.sinks)
    row = 0
    for request, (q_len, k_len) in enumerate(zip(case.q_lens, case.k_lens, strict=True)):
        table = meta.block_tables[request : request + 1]
        for position in range(k_len - q_len, k_len):
            alone = Paged((1,), (position + 1,), table, block_size)
            q = case.q[row : row + 1]
            expected = native.paged(case.needs, q, k_cache, v_cache, alone, case.sinks)
            assert torch.equal(together[row : row + 1], expected), (request, position)
            row += 1


@each_dtype
def test_two_threads_give_the_bits_of_one(native: NativeBackend, dtype: torch.dtype) -> None:
    case = make_case("causal", Sink.COLUMN, HEADS["gqa of seven, wide values"], dtype, paged=True)
    cache = into_blocks(case)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = native.paged(case.needs, case.q, *cache, case.sinks)
        torch.set_num_threads(2)
        two = native.paged(case.needs, case.q, *cache, case.sinks)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


@each_dtype
def test_heads_may_lie_apart_and_in_any_order(native: NativeBackend, dtype: torch.dtype) -> None:
    """Queries cut out of a fused projection, caches that put heads first, sinks that lie apart."""
    case = make_case("causal window", Sink.COLUMN, HEADS["gqa of two"], dtype, paged=True)
    assert case.sinks is not None
    k_cache, v_cache, meta = into_blocks(case)
    expected = native.paged(case.needs, case.q, k_cache, v_cache, meta, case.sinks)
    q = torch.cat((case.q, case.q), dim=1)[:, : case.needs.num_heads]
    by_head = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (k_cache, v_cache)]
    sinks = torch.stack((case.sinks, case.sinks), dim=1)[:, 0]
    assert torch.equal(native.paged(case.needs, q, *by_head, meta, sinks), expected)
    scattered = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(native.paged(case.needs, scattered, *by_head, meta, sinks), expected)


@each_dtype
def test_a_nan_stays_with_the_rows_that_see_it(native: NativeBackend, dtype: torch.dtype) -> None:
    case = make_case("short causal window", Sink.COLUMN, HEADS["mha"], dtype, paged=True)
    clean = native.varlen(
        case.needs, case.q, case.k, case.v, Varlen(case.q_lens, case.k_lens), case.sinks
    )
    case.k[-20] = float("nan")  # seven keys before it and none after it see it
    out = native.varlen(
        case.needs, case.q, case.k, case.v, Varlen(case.q_lens, case.k_lens), case.sinks
    )
    poisoned = out.isnan().flatten(1).any(dim=1)
    assert poisoned.nonzero().flatten().tolist() == list(range(len(out) - 20, len(out) - 12))
    assert torch.equal(out[~poisoned], clean[~poisoned])


def test_scores_far_apart_and_lone_sinks(native: NativeBackend) -> None:
    """Scores of hundreds neither overflow nor lose their sum; a sink takes what it is due."""
    case = make_case("causal", Sink.COLUMN, HEADS["mha"], torch.float32, paged=True)
    case = replace(case, q=case.q * 300)
    out = native.paged(case.needs, case.q, *into_blocks(case), case.sinks)
    np.testing.assert_allclose(out.numpy(), dense_stable(case), atol=2e-4)
    nothing = torch.full((2,), float("-inf"))
    plain = replace(case.needs, sink=Sink.NONE)
    cache = into_blocks(case)
    assert torch.equal(
        native.paged(case.needs, case.q, *cache, nothing),
        native.paged(plain, case.q, *cache, None),
    )
    everything = torch.full((2,), 1e5)
    assert native.paged(case.needs, case.q, *cache, everything).abs().max() == 0


def dense_stable(case: Case) -> np.ndarray:
    """torch's float64 softmax: the formulas alone overflow for such scores."""
    from mimo.nn.attention.reference import ReferenceBackend

    q, k, v = (x.double() for x in (case.q, case.k, case.v))
    meta = Varlen(case.q_lens, case.k_lens)
    return ReferenceBackend().varlen(case.needs, q, k, v, meta, case.sinks).numpy()


def test_gradients_of_packed_keys_are_left_to_torch(native: NativeBackend) -> None:
    case = make_case("causal window", Sink.COLUMN, HEADS["mha"], torch.float32, paged=True)
    assert case.sinks is not None
    expected, meta = dense(case), Varlen(case.q_lens, case.k_lens)
    for leaf in (case.q, case.k, case.v, case.sinks):  # each alone
        leaf.requires_grad_()
        out = native.varlen(case.needs, case.q, case.k, case.v, meta, case.sinks)
        out.sum().backward()
        assert leaf.grad is not None and leaf.grad.abs().sum() > 0
        leaf.requires_grad_(False)
        assert np.abs(out.detach().double().numpy() - expected).max() < 2e-6


def test_no_queries_give_no_rows(native: NativeBackend) -> None:
    case = make_case("causal", Sink.NONE, HEADS["mha"], torch.float32, paged=True)
    empty = native.varlen(case.needs, case.q[:0], case.k[:0], case.v[:0], Varlen((), ()), None)
    assert empty.shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"paged": False}, "for layers with a cache"),
        ({"device": "cuda:0"}, "for CPUs"),
        ({"dtype": torch.float64}, "no torch.float64"),
        ({"causal": False}, "for causal layers"),
        ({"sink": Sink.KEY0}, "for causal layers"),
        ({"head_dim": 24}, "heads of (24, 16) are not multiples of 16"),
        ({"v_head_dim": 528}, "up to 512"),
    ],
)
def test_what_it_declines_is_told(change: dict[str, object], reason: str) -> None:
    needs = make_case("causal", Sink.NONE, HEADS["mha"], torch.float32, paged=True).needs
    obstacle = NativeBackend().unsupported(replace(needs, **change))
    assert obstacle is not None and reason in obstacle
