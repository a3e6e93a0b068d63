"""Checkpoints in every published layout become the same decoder; broken ones are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.index import CheckpointIndex
from mimo.errors import CheckpointError
from mimo.nn.attention import AttentionSelector
from services.llm.model.attention import FullSequences
from services.llm.model.config import DecoderConfig
from services.llm.model.decoder import Decoder
from services.llm.model.mtp import Mtp
from services.llm.model.weights import load_decoder, published_tensors
from tests.support import golden_decoder

GOLDEN = golden_decoder.golden()


def fuse(variant: str, rows: str) -> dict[str, Tensor]:
    """The variant's tensors with q, k and v joined: chunks of whole heads, or one after another."""
    config = golden_decoder.config(variant)
    chunks = config["num_key_value_heads"] if rows == "interleaved" else 1
    tensors = golden_decoder.weights(variant)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        chunked = [part.view(chunks, -1, part.shape[1]) for part in parts]
        tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(chunked, dim=1).flatten(0, 1)
    return tensors


def write(
    directory: Path, variant: str, tensors: dict[str, Tensor], **config: Any
) -> CheckpointIndex:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(golden_decoder.config(variant) | config))
    contiguous = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(contiguous, str(directory / "model.safetensors"))
    return CheckpointIndex.open(directory)


def load(
    index: CheckpointIndex, dtype: torch.dtype = torch.float64, **profile: Any
) -> tuple[Decoder, Mtp | None]:
    selector = AttentionSelector("llm", override=None)
    return load_decoder(index, dtype=dtype, device="cpu", selector=selector, profile=profile)


def logits(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        x = golden_decoder.embed_prompt(decoder, golden_decoder.prompt_ids())
        return decoder.logits(decoder(x, torch.arange(20), FullSequences((20,))))


@pytest.mark.parametrize("variant", ["base", "kv24"])
def test_the_fused_layouts_of_these_tests_are_the_published_ones(variant: str) -> None:
    checks = GOLDEN["fused_checksums"].items()
    for name, (_, interleaved, plain) in ((n, c) for n, c in checks if n.startswith(variant)):
        for rows, expected in (("interleaved", interleaved), ("plain", plain)):
            matrix = fuse(f"{variant}_vis7", rows)[name.split(":")[1]]
            weighted = (torch.arange(1, len(matrix) + 1) * matrix.sum(dim=1)).sum()
            assert weighted.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("variant", ["base_vis7", "kv24_vis7"])
def test_every_layout_gives_the_same_bits(variant: str, tmp_path: Path) -> None:
    fused = {"attention_projection_layout": "fused_qkv"}
    split = load(write(tmp_path / "split", variant, golden_decoder.weights(variant)))
    interleaved = load(write(tmp_path / "a", variant, fuse(variant, "interleaved"), **fused))
    plain = load(write(tmp_path / "b", variant, fuse(variant, "plain"), **fused), qkv_rows="plain")
    stated = {"numeric_profile": {"swa_visible": 7, "qkv_rows": "plain"}}
    told = load(write(tmp_path / "c", variant, fuse(variant, "plain"), **fused, **stated))
    expected = published_tensors(*split)
    for loaded in (interleaved, plain, told):
        for name, tensor in published_tensors(*loaded).items():
            assert torch.equal(tensor, expected[name]), name
    row19 = logits(split[0])[19, :4].tolist()
    assert row19 == pytest.approx(GOLDEN["variants"][variant]["logits"]["first4"][19], abs=1e-9)


def test_the_wrong_row_order_is_another_model(tmp_path: Path) -> None:
    fused = fuse("kv24_vis7", "plain")
    index = write(tmp_path, "kv24_vis7", fused, attention_projection_layout="fused_qkv")
    decoder, _ = load(index)
    expected = GOLDEN["variants"]["kv24_vis7"]["logits"]["first4"][19]
    assert logits(decoder)[19, :4].tolist() != pytest.approx(expected, abs=0.1)


def test_published_tensors_are_what_a_checkpoint_holds(tmp_path: Path) -> None:
    tensors = golden_decoder.weights("base_vis7")
    decoder, mtp = load(write(tmp_path, "base_vis7", tensors))
    published = published_tensors(decoder, mtp)
    assert published.keys() == tensors.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, tensors[name]), name


def test_a_bfloat16_model_keeps_gates_and_sinks_in_float32(tmp_path: Path) -> None:
    decoder, mtp = load(
        write(tmp_path, "base_vis7", golden_decoder.weights("base_vis7")), torch.bfloat16
    )
    wide = {
        name
        for name, tensor in published_tensors(decoder, mtp).items()
        if tensor.dtype != torch.bfloat16
    }
    assert wide == {
        *(f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3, 4)),
        *(f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3, 4)),
        *(f"model.layers.{layer}.self_attn.attention_sink_bias" for layer in (1, 2, 4)),
        *(f"model.mtp.layers.{block}.self_attn.attention_sink_bias" for block in (0, 1, 2)),
    }
    x = golden_decoder.embed_prompt(decoder, golden_decoder.prompt_ids())
    hidden = decoder(x, torch.arange(20), FullSequences((20,)))
    assert x.dtype == hidden.dtype == torch.bfloat16


def test_a_checkpoint_without_mtp_blocks_has_none(tmp_path: Path) -> None:
    tensors = {
        name: tensor
        for name, tensor in golden_decoder.weights("base_vis7").items()
        if not name.startswith("model.mtp.")
    }
    decoder, mtp = load(write(tmp_path, "base_vis7", tensors))
    assert mtp is None
    assert decoder.config.num_nextn_predict_layers == 0


def test_tensors_of_other_services_are_left_alone(tmp_path: Path) -> None:
    others = {
        "visual.blocks.0.norm1.weight": torch.ones(2),
        "audio_encoder.projection.weight": torch.ones(2),
        "speech_embeddings.0.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    load(write(tmp_path, "base_vis7", golden_decoder.weights("base_vis7") | others))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight", None, "expected but not found: .*up_proj"),
        ("model.layers.9.input_layernorm.weight", torch.ones(32), "found but not expected: .*rs.9"),
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(23, 32), "k_proj.*expected shape"),
        ("model.mtp.layers.4.enorm.weight", torch.ones(32), r"not found: model\.mtp\.layers\.3"),
        (
            "model.layers.1.mlp.experts.3.up_proj.weight",
            torch.ones(16, 16, dtype=torch.uint8),
            "experts.3.up_proj.weight is stored as MXFP4",
        ),
    ],
)
def test_a_broken_checkpoint_is_named(
    name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors = golden_decoder.weights("base_vis7")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, "base_vis7", tensors))


def test_a_model_can_be_made_and_trained_from_scratch() -> None:
    """Modules are plain: random weights, gradients everywhere, and none for the gate's bias."""
    config = DecoderConfig.from_checkpoint(golden_decoder.config("base_vis7"))
    selector = AttentionSelector("llm", override=None)
    torch.manual_seed(0)
    decoder, mtp = Decoder(config, selector), Mtp(config, selector)
    ids = golden_decoder.prompt_ids()
    x = decoder.embed(ids)
    hidden = decoder(x, torch.arange(20), FullSequences((20,)))
    loss = decoder.logits(hidden).logsumexp(dim=-1).sum()
    for depth in range(3):
        attend = FullSequences((17,))
        rows = mtp.layer(depth, x[1 + depth :][:17], hidden[:17], torch.arange(17), attend)
        loss = loss + decoder.logits(rows).logsumexp(dim=-1).sum()
    loss.backward()
    for name, parameter in (*decoder.named_parameters(), *mtp.named_parameters()):
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    gate = decoder.model.layers[1].mlp.gate
    assert "e_score_correction_bias" in dict(gate.named_buffers())
