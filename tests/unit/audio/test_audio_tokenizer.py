"""The tokenizer's encoder against a twin that does one position at a time in float64.

The twin also imitates how published servers batch: it pads the segments of one call to the longest
with zero mel frames, convolves the padding too, and fills odd ends before the pool by their rule.
"""

import pytest
import torch
from torch import Tensor

from mimo.nn.attention import AttentionSelector
from mimo.nn.meta import without_weights
from services.audio.config import AudioTokenizerConfig
from services.audio.segments import Segment, plan_segments
from services.audio.tokenizer import AudioTokenizer
from tests.support.tiny_audio import (
    bidirectional_fields,
    randomize,
    tokenizer_config,
    tokenizer_fields,
)

GENERATIONS = pytest.mark.parametrize(
    "fields", [tokenizer_fields(), bidirectional_fields()], ids=["causal", "bidirectional"]
)


def make(fields: dict, dtype: torch.dtype = torch.float32) -> AudioTokenizer:
    config = AudioTokenizerConfig.from_checkpoint(fields)
    tokenizer = AudioTokenizer(config, AttentionSelector("audio"), dtype=dtype)
    randomize(tokenizer)
    return tokenizer.eval().to(dtype)


def make_mel(num_frames: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_frames, 8, generator=generator) * 2 - 4


@torch.no_grad()
def features(tokenizer: AudioTokenizer, mel: Tensor, segments) -> Tensor:
    return tokenizer(mel, tuple(segments))


class Twin:
    """One segment after another, one position after another."""

    def __init__(self, tokenizer: AudioTokenizer) -> None:
        self.config = tokenizer.config
        self.w = {name: value.double() for name, value in tokenizer.state_dict().items()}

    def features(self, calls: list[list[Tensor]]) -> Tensor:
        return torch.cat([self._segment(mel, call) for call in calls for mel in call])

    def codes(self, features: Tensor) -> list[list[int]]:
        rows = []
        for residual in features.double():
            codes = []
            for level in range(self.config.num_quantizers):
                book = self.w[f"quantizer.codebooks.{level}"].bfloat16().double()
                distances = [float(((residual - row) ** 2).sum()) for row in book]
                codes.append(distances.index(min(distances)))
                residual = residual - book[codes[-1]]
            rows.append(codes)
        return rows

    def _segment(self, mel: Tensor, call: list[Tensor]) -> Tensor:
        longest = max(len(other) for other in call)
        padded = torch.zeros(longest, mel.shape[1], dtype=torch.float64)
        padded[: len(mel)] = mel
        x = self._gelu(self._convolve(padded, "conv1", stride=1))
        x = self._gelu(self._convolve(x, "conv2", stride=2))
        x = x[: -(-len(mel) // 2)]
        for layer in range(self.config.encoder_layers):
            x = self._layer(x, layer)
            if layer + 1 == self.config.encoder_skip_layer_id:
                skip = x
        x = self._norm(x + skip, "layer_norm")
        if len(x) % 2:
            filler = x[-1:] if len(mel) < longest else torch.zeros_like(x[-1:])
            x = torch.cat([x, filler])
        kernel = self.w["down_sample_layer.0.weight"]
        pooled = [
            kernel[:, :, 0] @ x[2 * code] + kernel[:, :, 1] @ x[2 * code + 1]
            for code in range(len(x) // 2)
        ]
        return self._norm(self._gelu(torch.stack(pooled)), "down_sample_norm")

    def _convolve(self, x: Tensor, name: str, stride: int) -> Tensor:
        kernel, bias = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        rows = []
        for t in range((len(x) - 1) // stride + 1):
            row = bias.clone()
            for tap in range(3):
                at = stride * t + tap - 1
                if 0 <= at < len(x):
                    row = row + kernel[:, :, tap] @ x[at]
            rows.append(row)
        return torch.stack(rows)

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        name = f"layers.{layer}"
        y = self._norm(x, f"{name}.self_attn_layer_norm")
        x = x + self._attend(y, f"{name}.self_attn", layer)
        y = self._gelu(self._linear(self._norm(x, f"{name}.final_layer_norm"), f"{name}.fc1"))
        return x + self._linear(y, f"{name}.fc2")

    def _attend(self, x: Tensor, name: str, layer: int) -> Tensor:
        heads = self.config.encoder_attention_heads
        size = x.shape[1] // heads
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").reshape(len(x), heads, size) for part in "qkv"
        )
        q, k = self._rotate(q), self._rotate(k)
        out = torch.zeros_like(v)
        for query in range(len(x)):
            keys = [key for key in range(len(x)) if self._sees(query, key, layer)]
            for head in range(heads):
                scores = torch.stack([q[query, head] @ k[key, head] for key in keys])
                weights = (scores / size**0.5).exp()
                weights = weights / weights.sum()
                for weight, key in zip(weights, keys, strict=True):
                    out[query, head] += weight * v[key, head]
        return self._linear(out.reshape(len(x), -1), f"{name}.out_proj")

    def _sees(self, query: int, key: int, layer: int) -> bool:
        if self.config.encoder_causal and key > query:
            return False
        if self.config.hybrid_attention and layer % 2 == 0:
            return key >= query - self.config.encoder_attn_window_size[0]
        return True

    def _rotate(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        out = torch.empty_like(x)
        for position in range(len(x)):
            for j in range(size // 2):
                frequency = torch.tensor(10000.0 ** (-2 * j / size)).bfloat16().double()
                cos, sin = torch.cos(position * frequency), torch.sin(position * frequency)
                a, b = x[position, :, j], x[position, :, j + size // 2]
                out[position, :, j] = a * cos - b * sin
                out[position, :, j + size // 2] = b * cos + a * sin
        return out

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x - x.mean(dim=1, keepdim=True)
        x = x / (x.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    @staticmethod
    def _gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))


@GENERATIONS
@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5, 16, 17, 45])
def test_one_segment_equals_the_twin(fields, num_frames):
    tokenizer = make(fields)
    mel = make_mel(num_frames)
    found = features(tokenizer, mel, [Segment(num_frames)])
    twin = Twin(tokenizer)
    expected = twin.features([[mel]])
    assert found.shape == (-(-num_frames // 4), 16)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        codes = tokenizer.tokenize(mel, [Segment(num_frames)])
    assert codes.tolist() == twin.codes(expected)


@GENERATIONS
@pytest.mark.parametrize("rest", [1, 2, 3, 5, 6, 7, 15])
def test_short_last_segment_equals_the_twin_that_pads_to_the_longest(fields, rest):
    tokenizer = make(fields)
    mel = make_mel(16 + rest)
    found = features(tokenizer, mel, plan_segments(16 + rest, 16))
    expected = Twin(tokenizer).features([[mel[:16], mel[16:]]])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@GENERATIONS
def test_last_segment_in_a_call_of_its_own_is_padded_with_zeros(fields):
    tokenizer = make(fields)
    mel = make_mel(16 + 13)
    alone = features(tokenizer, mel, plan_segments(29, 16, call_frames=16))
    expected = Twin(tokenizer).features([[mel[:16]], [mel[16:]]])
    torch.testing.assert_close(alone.double(), expected, rtol=0, atol=1e-5)
    together = features(tokenizer, mel, plan_segments(29, 16, call_frames=32))
    assert not torch.allclose(alone[-1], together[-1], atol=1e-3)


@GENERATIONS
@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5, 16, 17, 101, 1234])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)], ids=["fp64", "fp32"]
)
def test_other_clips_do_not_change_a_clip(fields, num_frames, dtype, tolerance):
    tokenizer = make(fields, dtype)
    others = [make_mel(37, seed=8), make_mel(4, seed=9), make_mel(150, seed=10)]
    mel = make_mel(num_frames)
    segments = plan_segments(num_frames, 160)
    alone = features(tokenizer, mel, segments)
    neighbours = [plan_segments(len(other), 160) for other in others]
    packed = features(
        tokenizer,
        torch.cat([others[0], mel, *others[1:]]),
        (*neighbours[0], *segments, *neighbours[1], *neighbours[2]),
    )
    start = sum(segment.num_codes for segment in neighbours[0])
    beside = packed[start : start + len(alone)]
    torch.testing.assert_close(beside, alone, rtol=0, atol=tolerance)
    assert torch.equal(tokenizer.quantizer.encode(beside), tokenizer.quantizer.encode(alone))


@pytest.mark.parametrize("num_frames", [6000, 6001, 7233, 12077])
def test_each_minute_of_a_long_clip_is_encoded_as_if_alone(num_frames):
    tokenizer = make(tokenizer_fields(), torch.float64)
    mel = make_mel(num_frames)
    found = features(tokenizer, mel, plan_segments(num_frames, 6000))
    assert len(found) == -(-num_frames // 4)
    rest = num_frames - num_frames % 6000
    for start in range(0, rest, 6000):
        alone = features(tokenizer, mel[start : start + 6000], [Segment(6000)])
        minute = found[start // 4 : start // 4 + 1500]
        torch.testing.assert_close(minute, alone, rtol=0, atol=1e-12)
    if rest < num_frames:
        # The remainder's padding shows in its last code and, being causal, nowhere else.
        alone = features(tokenizer, mel[rest:], [Segment(num_frames - rest)])
        torch.testing.assert_close(found[rest // 4 : -1], alone[:-1], rtol=0, atol=1e-12)
        assert not torch.allclose(found[-1], alone[-1], atol=1e-4)


def test_segments_are_isolated_from_each_other():
    tokenizer = make(tokenizer_fields())
    mel = make_mel(48)
    segments = plan_segments(48, 16)
    before = features(tokenizer, mel, segments)
    mel[16:32] += 5
    after = features(tokenizer, mel, segments)
    assert torch.equal(after[:4], before[:4])
    assert not torch.allclose(after[4:8], before[4:8], atol=1e-2)
    assert torch.equal(after[8:], before[8:])


@pytest.mark.parametrize("cut", [5, 20, 33, 47])
def test_causal_codes_never_see_the_future(cut):
    tokenizer = make(tokenizer_fields())
    mel = make_mel(64)
    before = features(tokenizer, mel, [Segment(64)])
    mel[cut:] += 3
    after = features(tokenizer, mel, [Segment(64)])
    # Code c covers positions 2c and 2c + 1, whose convolutions reach mel frame 4c + 4.
    first_changed = -(-(cut - 4) // 4)
    assert torch.equal(after[:first_changed], before[:first_changed])
    assert not torch.allclose(after[first_changed], before[first_changed], atol=1e-4)


def test_bidirectional_codes_see_the_future():
    tokenizer = make(bidirectional_fields())
    mel = make_mel(64)
    before = features(tokenizer, mel, [Segment(64)])
    mel[60:] += 3
    assert not torch.allclose(features(tokenizer, mel, [Segment(64)])[0], before[0], atol=1e-4)


def test_window_reaches_as_far_as_configured_and_no_further():
    """With windowed layers only, N layers of reach 3 carry a change 3 N positions, not one more."""
    fields = tokenizer_fields(
        encoder_layers=2,
        encoder_skip_layer_id=2,
        hybrid_attention=False,
        encoder_attn_window_size=[3, 0],
    )
    tokenizer = make(fields)
    mel = make_mel(80)
    before = features(tokenizer, mel, [Segment(80)])
    mel[0] += 3  # seen by position 0 and, through conv1 and conv2, by position 1
    changed = (features(tokenizer, mel, [Segment(80)]) != before).any(dim=1)
    # Position 1 reaches positions up to 1 + 2 * 3 = 7, the second half of code 3.
    assert changed.nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_rotary_frequencies_pass_through_bf16():
    tokenizer = AudioTokenizer(
        tokenizer_config(d_model=64, encoder_attention_heads=1),
        AttentionSelector("audio"),
    )
    cos, sin = tokenizer._rotary((3, 2), torch.zeros(0))
    angles = torch.atan2(sin, cos)
    assert angles[1, :4].tolist() == pytest.approx([1.0, 0.75, 0.5625, 0.421875], abs=1e-6)
    assert torch.equal(cos[3:], cos[:2])  # positions restart with the segment


def test_unrounded_frequencies_are_a_switch():
    config = tokenizer_config(
        {"audio_inv_freq_round": "none"}, d_model=64, encoder_attention_heads=1
    )
    tokenizer = AudioTokenizer(config, AttentionSelector("audio"))
    cos, sin = tokenizer._rotary((2,), torch.zeros(0))
    angles = torch.atan2(sin, cos)[1, :4].tolist()
    assert angles == pytest.approx([1.0, 0.749894, 0.562341, 0.421697], abs=1e-6)


def test_features_are_differentiable_through_every_weight():
    tokenizer = make(tokenizer_fields())
    tokenizer(make_mel(21), plan_segments(21, 16)).square().sum().backward()
    for name, parameter in tokenizer.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_published_shape_has_its_published_number_of_values():
    fields = tokenizer_fields(
        n_mels=128,
        d_model=1024,
        encoder_layers=24,
        encoder_attention_heads=16,
        encoder_ffn_dim=4096,
        encoder_attn_window_size=[128, 0],
        num_quantizers=20,
        codebook_size=[1024, 1024, 256, 128],
    )
    with without_weights():
        tokenizer = AudioTokenizer(
            AudioTokenizerConfig.from_checkpoint(fields), AttentionSelector("audio")
        )
    codebooks = sum(value.numel() for value in tokenizer.quantizer.parameters())
    assert codebooks == 4_587_520
    assert sum(value.numel() for value in tokenizer.parameters()) == 312_514_560
