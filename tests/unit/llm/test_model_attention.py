"""What one attention layer sees, through the module: window, sinks, rotary, grouped heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.nn.attention import AttentionSelector
from services.llm.model.attention import Attention, FullSequences, Rotary
from services.llm.model.config import DecoderConfig
from tests.support.sequence_cache import SequenceCache

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, ROTARY_DIM = 32, 4, 2, 24, 16, 8
WINDOW = 4


@pytest.fixture(params=["reference", "sdpa"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def layer(
    backend: str, *, sliding: bool = True, visible: int = WINDOW + 1, **fields: Any
) -> Attention:
    config = DecoderConfig.from_checkpoint(
        {
            "vocab_size": 32,
            "hidden_size": HIDDEN,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "v_head_dim": V_HEAD_DIM,
            "swa_v_head_dim": V_HEAD_DIM,
            "partial_rotary_factor": 0.334,
            "hybrid_layer_pattern": [int(sliding)],
            "sliding_window": WINDOW,
            "add_swa_attention_sink_bias": True,
            "max_position_embeddings": 64,
            **fields,
        },
        {"swa_visible": visible},
    )
    torch.manual_seed(0)
    selector = AttentionSelector("llm", override=backend)
    return Attention(config, config.layers[0], selector, dtype=torch.float64, device="cpu")


def run(attention: Attention, x: Tensor, first_position: int = 0) -> Tensor:
    positions = torch.arange(first_position, first_position + len(x))
    rotary = Rotary(attention.spec, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        return attention(x, *rotary(positions), FullSequences((len(x),)))


def rows(count: int) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(count, HIDDEN, dtype=torch.float64)


@pytest.mark.parametrize("visible", [WINDOW, WINDOW + 1])
def test_a_sliding_layer_sees_exactly_its_visible_keys(backend: str, visible: int) -> None:
    attention = layer(backend, visible=visible)
    x = rows(16)
    before = run(attention, x)
    x[5] += 1.0
    changed = (run(attention, x) - before).abs().amax(dim=-1) > 0
    assert changed.nonzero().flatten().tolist() == list(range(5, 5 + visible))


def test_a_full_layer_sees_everything_before(backend: str) -> None:
    attention = layer(backend, sliding=False)
    x = rows(16)
    before = run(attention, x)
    x[5] += 1.0
    changed = (run(attention, x) - before).abs().amax(dim=-1) > 0
    assert changed.nonzero().flatten().tolist() == list(range(5, 16))


def test_packed_sequences_do_not_see_each_other(backend: str) -> None:
    attention = layer(backend)
    x = rows(11)
    rotary = Rotary(attention.spec, dtype=torch.float64, device="cpu")
    positions = torch.cat((torch.arange(4), torch.arange(7)))
    with torch.no_grad():
        packed = attention(x, *rotary(positions), FullSequences((4, 7)))
    alone = torch.cat((run(attention, x[:4]), run(attention, x[4:])))
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-13)


def test_a_sink_of_minus_infinity_is_a_plain_softmax(backend: str) -> None:
    attention = layer(backend)
    plain = layer(backend, add_swa_attention_sink_bias=False)
    assert attention.attention_sink_bias is not None
    attention.attention_sink_bias.data[:] = float("-inf")
    torch.testing.assert_close(run(attention, rows(12)), run(plain, rows(12)), rtol=0, atol=1e-13)


def test_a_large_sink_takes_all_the_attention(backend: str) -> None:
    attention = layer(backend)
    assert attention.attention_sink_bias is not None
    attention.attention_sink_bias.data[:] = 800.0
    assert run(attention, rows(12)).abs().max().item() < 1e-100


def test_a_sink_leaves_weights_that_sum_to_less_than_one(backend: str) -> None:
    """With values all one, a row of attention is the sum of its weights."""
    attention = layer(backend)
    sums: list[Tensor] = []

    def ones(_layer: int, bound: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        segments = FullSequences((len(q),))
        out = segments(_layer, bound, q, k, torch.ones_like(v), sinks)
        sums.append(out)
        return out

    x = rows(12)
    rotary = Rotary(attention.spec, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        attention(x, *rotary(torch.arange(12)), ones)
    assert sums[0].min().item() > 0
    assert sums[0].max().item() < 1
    # Row 0 sees one key, unrotated: its weight is exp(a) / (exp(s) + exp(a)), with s = 0.
    qkv = attention.qkv_proj(x[0])
    q = qkv[: HEADS * HEAD_DIM].view(HEADS, HEAD_DIM)
    k = qkv[HEADS * HEAD_DIM :][: KV_HEADS * HEAD_DIM].view(KV_HEADS, HEAD_DIM)
    logits = (q * k.repeat_interleave(HEADS // KV_HEADS, dim=0)).sum(dim=-1) / HEAD_DIM**0.5
    torch.testing.assert_close(sums[0][0, :, 0], torch.sigmoid(logits).detach())


def test_rotation_touches_only_its_dimensions_of_the_stored_keys() -> None:
    attention = layer("reference")
    x = rows(6)
    cache = SequenceCache()
    rotary = Rotary(attention.spec, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        attention(x, *rotary(torch.arange(6)), cache)
        plain = attention.qkv_proj(x)[:, HEADS * HEAD_DIM :][:, : KV_HEADS * HEAD_DIM]
    keys, _ = cache.stored[0]
    plain = plain.view(6, KV_HEADS, HEAD_DIM)
    assert torch.equal(keys[..., ROTARY_DIM:], plain[..., ROTARY_DIM:])
    assert torch.equal(keys[0], plain[0])
    assert not torch.isclose(keys[1:, :, :ROTARY_DIM], plain[1:, :, :ROTARY_DIM]).any()


def test_only_relative_positions_matter(backend: str) -> None:
    attention = layer(backend)
    torch.testing.assert_close(
        run(attention, rows(12)), run(attention, rows(12), first_position=1000), rtol=0, atol=1e-10
    )


def test_full_and_sliding_layers_turn_at_their_own_speed() -> None:
    config = {"rope_theta": 5e6, "swa_rope_theta": 1e4}
    for sliding, theta in ((False, 5e6), (True, 1e4)):
        rotary = Rotary(
            layer("reference", sliding=sliding, **config).spec, dtype=torch.float64, device="cpu"
        )
        cos, _ = rotary(torch.tensor([3]))
        expected = [theta ** (-2 * pair / ROTARY_DIM) * 3 for pair in range(ROTARY_DIM // 2)]
        torch.testing.assert_close(cos[0], torch.tensor(expected).double().cos(), rtol=0, atol=1e-6)


def test_values_are_scaled_before_they_are_stored() -> None:
    attention = layer("reference", attention_value_scale=0.5)
    cache = SequenceCache()
    x = rows(6)
    rotary = Rotary(attention.spec, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        attention(x, *rotary(torch.arange(6)), cache)
        plain = attention.qkv_proj(x)[:, -KV_HEADS * V_HEAD_DIM :]
    _, values = cache.stored[0]
    assert torch.equal(values, 0.5 * plain.view(6, KV_HEADS, V_HEAD_DIM))


def test_neighbouring_query_heads_share_a_key_value_head(backend: str) -> None:
    attention = layer(backend)
    before = heads(attention, rows(8))
    first_kv_head = slice(HEADS * HEAD_DIM, HEADS * HEAD_DIM + HEAD_DIM)
    attention.qkv_proj.weight.data[first_kv_head] *= 2
    moved = (heads(attention, rows(8)) - before).abs().amax(dim=(0, 2)) > 1e-12
    assert moved.tolist() == [True, True, False, False]


def heads(attention: Attention, x: Tensor) -> Tensor:
    """Each head's output before o_proj. [T, N, Hv]."""
    seen: list[Tensor] = []
    attention.o_proj.register_forward_hook(lambda _m, args, _out: seen.append(args[0]))
    run(attention, x)
    return seen[-1].view(len(x), HEADS, V_HEAD_DIM)
