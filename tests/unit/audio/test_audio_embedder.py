"""Codes to embeddings against a twin that takes one group, one frame, one head at a time."""

import pytest
import torch
from torch import Tensor

from mimo.nn.meta import without_weights
from services.audio import embedder as embedder_module
from services.audio.embedder import CodeEmbedder
from tests.support.tiny_audio import encoder_config, randomize


def make(**changes) -> CodeEmbedder:
    embedder = CodeEmbedder(encoder_config(**changes))
    randomize(embedder)
    return embedder.eval()


def make_codes(length: int, seed: int = 5) -> Tensor:
    return torch.randint(0, 32, (length, 5), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def embed(embedder: CodeEmbedder, codes: Tensor, lengths: list[int]) -> Tensor:
    return embedder(codes, lengths)


class Twin:
    def __init__(self, embedder: CodeEmbedder) -> None:
        self.config = embedder.config
        self.w = {name: value.double() for name, value in embedder.state_dict().items()}

    def embed(self, clip: list[list[int]]) -> Tensor:
        while len(clip) % self.config.group_size:
            clip = [*clip, clip[-1]]
        size = self.config.group_size
        groups = [clip[start : start + size] for start in range(0, len(clip), size)]
        return torch.stack([self._group(group) for group in groups])

    def _group(self, group: list[list[int]]) -> Tensor:
        x = []
        for frame in group:
            total = torch.zeros(self.config.input_local_dim, dtype=torch.float64)
            for channel in range(self.config.audio_channels):
                if frame[channel] != self.config.speech_zeroemb_idx[channel]:
                    table = self.w[f"speech_embeddings.{channel}.weight"]
                    total = total + table[frame[channel]]
            x.append(total)
        for layer in range(self.config.input_local_layers):
            x = self._layer(x, f"input_local_transformer.layers.{layer}")
        if self.config.add_post_norm:
            x = [self._norm(row, "input_local_transformer.norm.weight") for row in x]
        row = torch.cat(x)
        if self.config.projection_layers == 1:
            return self.w["projection.weight"] @ row
        hidden = self.w["projection.mlp.0.weight"] @ row
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        return self.w["projection.mlp.2.weight"] @ hidden

    def _layer(self, x: list[Tensor], name: str) -> list[Tensor]:
        y = [self._norm(row, f"{name}.input_layernorm.weight") for row in x]
        q, k, v = (
            [
                self.w[f"{name}.self_attn.{part}_proj.weight"] @ row
                + self.w[f"{name}.self_attn.{part}_proj.bias"]
                for row in y
            ]
            for part in "qkv"
        )
        x = [row + self._attend(at, q, k, v, name) for at, row in enumerate(x)]
        return [row + self._mlp(row, name) for row in x]

    def _attend(self, at: int, q, k, v, name: str) -> Tensor:
        size = self.config.head_dim
        heads = []
        for head in range(self.config.input_local_attn_heads):
            part = slice(head * size, (head + 1) * size)
            keys = range(len(k)) if self.config.input_full_attention else range(at + 1)
            query = self._rotate(q[at][part], at)
            scores = torch.stack([query @ self._rotate(k[key][part], key) for key in keys])
            weights = torch.softmax(scores / size**0.5, dim=0)
            heads.append(sum(weight * v[key][part] for weight, key in zip(weights, keys)))  # noqa: B905
        return self.w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads)

    def _mlp(self, row: Tensor, name: str) -> Tensor:
        y = self._norm(row, f"{name}.post_attention_layernorm.weight")
        gate = self.w[f"{name}.mlp.gate_proj.weight"] @ y
        up = self.w[f"{name}.mlp.up_proj.weight"] @ y
        return self.w[f"{name}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angle = position * 640000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])

    def _norm(self, row: Tensor, weight: str) -> Tensor:
        return row / (row.square().mean() + 1e-6).sqrt() * self.w[weight]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"projection_layers": 1},
        {"add_post_norm": False},
        {"input_full_attention": False},
        {"input_local_attn_heads": 8, "input_local_head_dim": 2},
    ],
    ids=["two layers", "one layer", "no norm", "causal", "narrow heads"],
)
@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_embeddings_equal_the_twin(changes, length):
    embedder = make(**changes)
    codes = make_codes(length)
    found = embed(embedder, codes, [length])
    expected = Twin(embedder).embed(codes.tolist())
    assert found.shape == (-(-length // 4), 12)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_last_frame_repeats_until_the_group_is_full():
    embedder = make()
    codes = make_codes(6)
    full = torch.cat([codes, codes[-1:], codes[-1:]])
    assert torch.equal(embed(embedder, codes, [6]), embed(embedder, full, [8]))


def test_clips_are_padded_each_for_itself():
    embedder = make()
    codes = make_codes(6 + 3 + 4)
    packed = embed(embedder, codes, [6, 3, 4])
    parts = [embed(embedder, clip, [len(clip)]) for clip in codes.split([6, 3, 4])]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=1e-5, atol=1e-5)


def test_groups_never_see_each_other():
    embedder = make()
    codes = make_codes(12)
    before = embed(embedder, codes, [12])
    codes[4:8] = (codes[4:8] + 1) % 32
    after = embed(embedder, codes, [12])
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.allclose(after[1], before[1], atol=1e-3)


def test_zero_id_contributes_nothing():
    embedder = make()
    codes = torch.full((4, 4), 32)
    assert not embedder._sum_tables(codes[None]).any()
    codes[:, 1] = 7
    assert torch.equal(
        embedder._sum_tables(codes[None])[0, 0], embedder.speech_embeddings[1].weight[7]
    )


def test_extra_codebooks_are_ignored():
    embedder = make()
    codes = make_codes(8)
    assert torch.equal(embed(embedder, codes, [8]), embed(embedder, codes[:, :4], [8]))


def test_long_clips_in_passes_equal_one_pass(monkeypatch):
    embedder = make()
    codes = make_codes(50)
    whole = embed(embedder, codes, [50])
    monkeypatch.setattr(embedder_module, "PASS_GROUPS", 3)
    torch.testing.assert_close(embed(embedder, codes, [50]), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("out_hidden_size", "num_values"), [(4096, 261_127_168), (6144, 294_681_600)]
)
def test_published_shape_has_its_published_number_of_values(out_hidden_size, num_values):
    config = encoder_config(
        audio_channels=20,
        speech_vocab_size="1280",
        speech_zeroemb_idx="1024",
        input_local_layers=6,
        input_local_dim=1024,
        input_local_attn_heads=16,
        input_local_head_dim=64,
        input_local_intermediate_size=4096,
        out_hidden_size=out_hidden_size,
        projection_hidden_dim=None,
    )
    with without_weights():
        embedder = CodeEmbedder(config)
    assert sum(value.numel() for value in embedder.parameters()) == num_values
