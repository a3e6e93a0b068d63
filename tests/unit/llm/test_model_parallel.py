"""A decoder cut into ranks is the same decoder: every layer, and every tensor it reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mimo.checkpoint.index import CheckpointIndex
from mimo.errors import CheckpointError, ConfigError
from mimo.nn.attention import AttentionSelector
from services.llm.model.attention import FullSequences
from services.llm.model.config import DecoderConfig
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.parallel import (
    WHOLE,
    GroupShard,
    Shard,
    VocabularyShard,
    head_range,
    kv_head_range,
    share_of,
    vocabulary_rows,
)
from services.llm.model.weights import load_decoder, published_tensors
from tests.support import golden_decoder, tiny
from tests.support.parallel import on_ranks

LENGTH = 20


@pytest.fixture(scope="module", params=["split", "interleaved", "plain"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kv heads in full layers and four in sliding ones, and a vocabulary of an odd size."""
    directory = tmp_path_factory.mktemp(request.param)
    return tiny.write_decoder(directory, qkv=request.param, vocab_size=33)


def load(directory: Path, shard: Shard = WHOLE) -> tuple[Decoder, Mtp]:
    decoder, mtp = load_decoder(
        CheckpointIndex.open(directory),
        dtype=torch.float64,
        device="cpu",
        selector=AttentionSelector("llm"),
        shard=shard,
    )
    assert mtp is not None
    return decoder, mtp


def part_of(name: str, tensor: Tensor, config: DecoderConfig, shard: Shard) -> Tensor:
    """A rank's part of a published tensor, written down a second time."""
    kind = name.split(".")[-2]
    own = tensor.shape[0] // shard.size
    rows = slice(shard.rank * own, (shard.rank + 1) * own)
    if kind in ("k_proj", "v_proj"):
        number = int(name.split(".")[-4])
        specs = config.mtp_layers if ".mtp." in name else config.layers
        num_kv = specs[number].num_kv_heads
        heads = tensor.unflatten(0, (num_kv, -1))
        if num_kv >= shard.size:
            return heads.chunk(shard.size)[shard.rank].flatten(0, 1)
        return heads[shard.rank * num_kv // shard.size]
    if kind in ("embed_tokens", "lm_head"):
        first, last = (r * len(tensor) // shard.size for r in (shard.rank, shard.rank + 1))
        return tensor[first:last]
    if kind in ("o_proj", "down_proj"):
        return tensor.chunk(shard.size, dim=1)[shard.rank]
    if kind in ("q_proj", "gate_proj", "up_proj") or name.endswith("sink_bias"):
        return tensor[rows]
    return tensor


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_slices_of_the_whole(checkpoint: Path, size: int) -> None:
    decoder, mtp = load(checkpoint)
    whole = published_tensors(decoder, mtp)
    for rank in range(size):
        shard = GroupShard(rank, size)
        published = published_tensors(*load(checkpoint, shard))
        assert published.keys() == whole.keys()
        for name, tensor in published.items():
            expected = part_of(name, whole[name], decoder.config, shard)
            assert torch.equal(tensor, expected), (rank, name)


def test_slices_of_a_rank_have_memory_of_their_own(checkpoint: Path) -> None:
    decoder, mtp = load(checkpoint, GroupShard(1, 2))
    for module in (decoder, mtp):
        for name, parameter in module.named_parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes, name


def run(decoder: Decoder, mtp: Mtp, shard: Shard) -> dict[str, Tensor | None]:
    """Hidden states and logits of a text, and of every MTP block over it."""
    ids = torch.arange(LENGTH) * 7 % decoder.config.vocab_size
    positions, attend = torch.arange(LENGTH), FullSequences((LENGTH,))
    with torch.inference_mode():
        x = shard.sum(decoder.embed(ids))
        hidden = decoder(x, positions, attend)
        outputs = {"embedded": x, "hidden": hidden}
        outputs["logits"] = decoder.logits(hidden)
        for depth in range(len(mtp.layers)):
            out = mtp.layer(depth, x.roll(-1 - depth, 0), hidden, positions, attend)
            outputs[f"mtp {depth}"] = out
            outputs[f"mtp {depth} logits"] = decoder.logits(out)
    return outputs


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_compute_what_one_computes(checkpoint: Path, size: int) -> None:
    expected = run(*load(checkpoint), WHOLE)
    ranks = on_ranks(size, lambda shard: run(*load(checkpoint, shard), shard))
    for name, tensor in expected.items():
        torch.testing.assert_close(ranks[0][name], tensor, rtol=1e-12, atol=1e-12, msg=name)
    assert torch.equal(ranks[0]["embedded"], expected["embedded"])
    for name in (name for name in expected if "logits" not in name):
        for rank in ranks[1:]:
            assert torch.equal(rank[name], ranks[0][name]), f"{name}: other bits on another rank"


def split_modules(
    whole: nn.Module, build: Any, config: DecoderConfig, number: int, shard: Shard
) -> nn.Module:
    """A layer's module of one rank, filled from the whole one."""
    part = build(share_of(config, shard.size))
    state = {
        name: part_of(f"model.layers.{number}.x.{name}", tensor, config, shard)
        for name, tensor in whole.state_dict().items()
    }
    part.load_state_dict(state)
    return part


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("number", "kind"), [(0, "full, dense"), (1, "sliding, sparse")])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_each_layer_is_the_sum_of_its_ranks(part: str, number: int, kind: str, size: int) -> None:
    config = DecoderConfig.from_checkpoint(tiny.decoder_config())
    assert config.layers[number].sliding == ("sliding" in kind)
    assert config.layers[number].is_moe == ("sparse" in kind)
    torch.manual_seed(number)

    def build(config: DecoderConfig) -> nn.Module:
        decoder = Decoder(config, AttentionSelector("llm"), dtype=torch.float64)
        return getattr(decoder.model.layers[number], part)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        if part == "mlp":
            return module(x)
        spec = config.layers[number]
        angles = torch.linspace(0, 3, LENGTH).double()[:, None].expand(-1, spec.rotary_dim // 2)
        return module(x, angles.cos(), angles.sin(), FullSequences((LENGTH,)))

    whole = build(config)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(LENGTH, config.hidden_size, dtype=torch.float64)

    def work(shard: Shard) -> Tensor:
        with torch.inference_mode():
            return shard.sum(call(split_modules(whole, build, config, number, shard), x))

    with torch.inference_mode():
        expected = call(whole, x)
    for total in on_ranks(size, work):
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_a_whole_model_has_nothing_of_the_ranks() -> None:
    """Not one operation more, so the same bits as ever."""
    config = DecoderConfig.from_checkpoint(tiny.decoder_config())
    decoder = Decoder(share_of(config, 1), AttentionSelector("llm"))
    assert share_of(config, 1) is config
    assert type(decoder.model.embed_tokens) is nn.Embedding
    assert decoder.lm_head.weight.shape == (config.vocab_size, config.hidden_size)
    x = torch.zeros(3)
    assert WHOLE.sum(x) is WHOLE.from_first(x) is WHOLE.columns(x, 3) is x


def test_key_value_heads_follow_their_query_heads() -> None:
    config = DecoderConfig.from_checkpoint(golden_decoder.config("base_vis7"))
    full, sliding = config.layers[0], config.layers[1]  # 4 query heads on 1 and on 2
    assert (full.num_kv_heads, sliding.num_kv_heads) == (1, 2)
    for size, kv_full, kv_sliding in ((2, [0, 0], [0, 1]), (4, [0] * 4, [0, 0, 1, 1])):
        ranks = [GroupShard(rank, size) for rank in range(size)]
        assert [list(kv_head_range(full, rank)) for rank in ranks] == [[h] for h in kv_full]
        assert [list(kv_head_range(sliding, rank)) for rank in ranks] == [[h] for h in kv_sliding]
        assert [h for rank in ranks for h in head_range(full, rank)] == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_vocabulary_rows_are_all_held_once(size: int) -> None:
    parts = [vocabulary_rows(61, rank, size) for rank in range(size)]
    assert [row for part in parts for row in part] == list(range(61))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ids_below_zero_are_nobodys() -> None:
    table = VocabularyShard(8, 3, GroupShard(1, 2), dtype=torch.float32)
    rows = table(torch.tensor([-1, 0, 4, 7]))
    assert not rows[:2].any()
    assert torch.equal(rows[2:], table.weight[[0, 3]])


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, 3, "--tensor-parallel 3 does not divide query heads of layer 0 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "neither divides nor"),
        ({"intermediate_size": 25}, 2, "does not divide intermediate_size 25"),
        ({"moe_intermediate_size": 9}, 2, "does not divide moe_intermediate_size 9"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(
    change: dict[str, Any], size: int, message: str
) -> None:
    config = DecoderConfig.from_checkpoint(tiny.decoder_config(**change))
    with pytest.raises(ConfigError, match=message):
        share_of(config, size)


def test_a_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    directory = tiny.write_decoder(tmp_path, vocab_size=33)
    index = CheckpointIndex.open(directory)
    wider = replace(index, config={**index.config, "intermediate_size": 28})
    with pytest.raises(CheckpointError, match="0.mlp.*expected 28 in dimension"):
        load_decoder(
            wider,
            dtype=torch.float32,
            device="cpu",
            selector=AttentionSelector("llm"),
            shard=GroupShard(0, 2),
        )
