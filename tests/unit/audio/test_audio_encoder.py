"""Waveforms to embeddings: lengths, batches, passes, and what the device thread accepts."""

import pytest
import torch

from mimo.errors import InvalidRequest, Reason
from mimo.nn.interop import from_torch, to_torch
from mimo.tensor import RawTensor
from services.audio import model
from services.audio.encoder import AudioEncoder
from services.audio.plan import AudioPlan, Product
from tests.support.tiny_audio import make_tower, make_waveform


@pytest.mark.parametrize(
    ("num_samples", "num_codes", "num_tokens"),
    [(1, 1, 1), (480, 1, 1), (481, 1, 1), (2400, 3, 1), (24000, 26, 7), (7680, 9, 3)],
)
def test_clip_gives_one_embedding_per_16_frames(num_samples, num_codes, num_tokens):
    tower = make_tower()
    waveform = make_waveform(num_samples)
    assert tower.tokenize([waveform])[0].shape == (num_codes, 4)
    assert tower([waveform])[0].shape == (num_tokens, 12)


def test_clips_in_a_batch_equal_clips_alone():
    tower = make_tower()
    waveforms = [make_waveform(size, seed=size) for size in (5000, 1, 12345, 480, 24000)]
    for waveform, codes, rows in zip(
        waveforms, tower.tokenize(waveforms), tower(waveforms), strict=True
    ):
        assert torch.equal(codes, tower.tokenize([waveform])[0])
        torch.testing.assert_close(rows, tower([waveform])[0], rtol=1e-5, atol=1e-5)


def test_batch_in_small_passes_equals_one_pass(monkeypatch):
    tower = make_tower()
    waveforms = [make_waveform(size, seed=size) for size in (24000, 5000, 9000)]
    whole = tower.tokenize(waveforms)
    monkeypatch.setattr(model, "PASS_FRAMES", 40)
    for codes, expected in zip(tower.tokenize(waveforms), whole, strict=True):
        assert torch.equal(codes, expected)


def test_same_batch_gives_the_same_bits():
    tower = make_tower()
    waveforms = [make_waveform(24000), make_waveform(5000)]
    for first, second in zip(tower(waveforms), tower(waveforms), strict=True):
        assert torch.equal(first, second)


def item(waveform: torch.Tensor, product: Product = Product.EMBEDDINGS):
    return AudioPlan(len(waveform), 24000, product), from_torch(waveform)


def test_encoder_answers_each_item_with_what_its_plan_asks_for():
    tower = make_tower()
    waveforms = [make_waveform(size, seed=size) for size in (5000, 24000, 3000)]
    products = [Product.EMBEDDINGS, Product.CODES, Product.EMBEDDINGS]
    results = AudioEncoder(tower, "cpu").encode(
        [item(waveform, product) for waveform, product in zip(waveforms, products, strict=True)]
    )
    codes = tower.tokenize(waveforms)
    assert [result.dtype for result in results] == ["float32", "int16", "float32"]
    assert torch.equal(to_torch(results[1]).long(), codes[1])
    expected = tower.embed([codes[0], codes[2]])
    assert torch.equal(to_torch(results[0]), expected[0])
    assert torch.equal(to_torch(results[2]), expected[1])


def test_encoder_that_only_tokenises_embeds_nothing():
    (codes,) = AudioEncoder(make_tower(), "cpu").encode([item(make_waveform(900), Product.CODES)])
    assert codes.dtype == "int16" and codes.shape == (1, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_encoder_refuses_samples_that_are_not_numbers(bad):
    waveform = make_waveform(1000)
    waveform[500] = bad
    with pytest.raises(InvalidRequest, match="NaN or infinity"):
        AudioEncoder(make_tower(), "cpu").encode([item(waveform)])


def plan(dtype="float32", shape=(24000,), rate=24000) -> AudioPlan:
    return AudioPlan.of(dtype, shape, rate, expected_rate=24000, max_seconds=2.0)


def test_plan_costs_its_seconds():
    assert plan(shape=(36000,)).seconds == 1.5


@pytest.mark.parametrize(
    ("arguments", "reason", "field"),
    [
        ({"shape": (0,)}, Reason.MEDIA_EMPTY, "waveform"),
        ({"shape": (48001,)}, Reason.MEDIA_LIMIT, "waveform"),
        ({"shape": (2, 100)}, Reason.INVALID_VALUE, "waveform"),
        ({"shape": ()}, Reason.INVALID_VALUE, "waveform"),
        ({"dtype": "int16"}, Reason.INVALID_VALUE, "waveform"),
        ({"rate": 16000}, Reason.INVALID_VALUE, "sample_rate"),
    ],
)
def test_plan_refuses_an_upload_by_its_header(arguments, reason, field):
    with pytest.raises(InvalidRequest) as refused:
        plan(**arguments)
    assert refused.value.reason is reason and refused.value.field == field


def test_raw_waveform_of_the_wire_is_little_endian_float32():
    raw = RawTensor("float32", (2,), b"\x00\x00\x80\x3f\x00\x00\x00\xbf")
    assert to_torch(raw).tolist() == [1.0, -0.5]
