"""Portable backends against a dense float64 softmax."""

import numpy as np
import pytest
import torch

from mimo.nn import attention
from mimo.nn.attention import Sink, Varlen
from tests.support.attention_cases import MASKS, TOLERANCES, dense, into_blocks, make_case

PORTABLE = ("sdpa", "reference")  # backends that serve every layer
HEADS = {  # query heads, kv heads, head dim, value head dim
    "mha": (2, 2, 8, 8),
    "gqa": (4, 2, 8, 8),
    "gqa, narrow values": (4, 1, 12, 8),
}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sink", Sink)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", PORTABLE)
def test_backend_equals_the_dense_softmax(
    name: str, mask: str, sink: Sink, heads: str, dtype: torch.dtype
) -> None:
    case = make_case(mask, sink, HEADS[heads], dtype)
    backend = attention.create(name)
    meta = Varlen(case.q_lens, case.k_lens)
    actual = backend.varlen(case.needs, case.q, case.k, case.v, meta, case.sinks)
    assert actual.dtype == dtype
    assert np.abs(actual.double().numpy() - dense(case)).max() < TOLERANCES[dtype]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sink", Sink)
@pytest.mark.parametrize("mask", ["causal", "causal window", "short causal window"])
@pytest.mark.parametrize("name", PORTABLE)
def test_paged_keys_give_the_bits_of_packed_keys(
    name: str, mask: str, sink: Sink, heads: str
) -> None:
    case = make_case(mask, sink, HEADS[heads], torch.float32, paged=True)
    backend = attention.create(name)
    k_cache, v_cache, meta = into_blocks(case)
    paged = backend.paged(case.needs, case.q, k_cache, v_cache, meta, case.sinks)
    packed_meta = Varlen(case.q_lens, case.k_lens)
    packed = backend.varlen(case.needs, case.q, case.k, case.v, packed_meta, case.sinks)
    assert torch.equal(paged, packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sink", Sink)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", PORTABLE)
def test_a_segment_alone_has_the_bits_it_has_in_company(
    name: str, mask: str, sink: Sink, heads: str, dtype: torch.dtype
) -> None:
    case = make_case(mask, sink, HEADS[heads], dtype)
    backend = attention.create(name)
    # Doubled, so that every segment also has a twin of its own shape in the batch.
    q, k, v = (torch.cat((x, x.flip(0))) for x in (case.q, case.k, case.v))
    q_lens, k_lens = case.q_lens + case.q_lens[::-1], case.k_lens + case.k_lens[::-1]
    together = backend.varlen(case.needs, q, k, v, Varlen(q_lens, k_lens), case.sinks)
    parts = zip(
        torch.split(together, list(q_lens)),
        torch.split(q, list(q_lens)),
        torch.split(k, list(k_lens)),
        torch.split(v, list(k_lens)),
        strict=True,
    )
    for expected, queries, keys, values in parts:
        meta = Varlen((len(queries),), (len(keys),))
        alone = backend.varlen(case.needs, queries, keys, values, meta, case.sinks)
        assert torch.equal(alone, expected)
