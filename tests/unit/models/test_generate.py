"""The bundled checkpoint: published layout, seeded, sane numbers, readable answers."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gateway.model import Model
from mimo.checkpoint.index import CheckpointIndex
from mimo.nn.attention import AttentionSelector
from models.config import model_config
from models.files import fuse_qkv
from models.generate import generate
from models.tokenizer import CONTROL_TOKENS, build, control_ids
from models.weights import Draw, decoder_tensors
from services.audio.weights import AudioCheckpoint
from services.llm.model.attention import FullSequences
from services.llm.model.weights import load_decoder
from services.vision.weights import load_vision_tower, read_tower_config
from tests.support import tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "mimo-tiny"
    generate(directory)
    return directory


def test_the_files_of_a_checkpoint_are_there(directory: Path) -> None:
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert files == {
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "audio_tokenizer/config.json",
        "audio_tokenizer/model.safetensors",
    }
    assert sum((directory / file).stat().st_size for file in files) < 25_000_000


def count(index: CheckpointIndex, *prefixes: str) -> int:
    return sum(math.prod(info.shape) for info in index.select(prefixes).values())


def test_parameters_per_component(directory: Path) -> None:
    model = CheckpointIndex.open(directory)
    audio = CheckpointIndex.open(directory / "audio_tokenizer")
    correction_biases = 7 * 8
    assert count(model, "model.embed_tokens.") == count(model, "lm_head.") == 768 * 192
    assert count(model, "model.layers.") == 5_776_944 + correction_biases
    assert count(model, "model.mtp.") == 1_440_600
    assert count(model, "visual.") == 1_449_616
    assert count(model, "speech_embeddings.") == 6 * 80 * 128
    assert count(model, "audio_encoder.") == 738_688 - 6 * 64 * 128
    assert count(audio, "encoder.quantizer.") == 6 * 64 * 128
    assert count(audio, "encoder.") == 792_832 + 6 * 64 * 128


def test_names_shapes_and_dtypes_of_the_published_layout(directory: Path) -> None:
    tensors = CheckpointIndex.open(directory).tensors
    layer, mtp = "model.layers.1", "model.mtp.layers.2"
    expected = {
        "model.layers.0.self_attn.qkv_proj.weight": ("BF16", (8 * 48 + 2 * 48 + 2 * 32, 192)),
        "model.layers.0.mlp.down_proj.weight": ("BF16", (192, 384)),
        f"{layer}.self_attn.qkv_proj.weight": ("BF16", (8 * 48 + 4 * 48 + 4 * 32, 192)),
        f"{layer}.self_attn.o_proj.weight": ("BF16", (192, 256)),
        f"{layer}.self_attn.attention_sink_bias": ("BF16", (8,)),
        f"{layer}.mlp.gate.weight": ("F32", (8, 192)),
        f"{layer}.mlp.gate.e_score_correction_bias": ("F32", (8,)),
        f"{layer}.mlp.experts.7.down_proj.weight": ("BF16", (192, 128)),
        f"{layer}.post_attention_layernorm.weight": ("BF16", (192,)),
        f"{mtp}.eh_proj.weight": ("BF16", (192, 384)),
        f"{mtp}.self_attn.qkv_proj.weight": ("BF16", (704, 192)),
        f"{mtp}.pre_mlp_layernorm.weight": ("BF16", (192,)),
        "visual.patch_embed.proj.weight": ("BF16", (128, 3, 2, 16, 16)),
        "visual.blocks.1.attn.qkv.bias": ("BF16", (256,)),
        "visual.blocks.1.attn.sinks": ("BF16", (4,)),
        "visual.merger.mlp.2.weight": ("BF16", (192, 512)),
        "speech_embeddings.5.weight": ("BF16", (80, 128)),
        "audio_encoder.projection.mlp.0.weight": ("BF16", (512, 512)),
        "audio_encoder.input_local_transformer.layers.1.self_attn.q_proj.bias": ("BF16", (128,)),
    }
    assert {name: (tensors[name].dtype, tensors[name].shape) for name in expected} == expected
    assert "model.layers.0.self_attn.attention_sink_bias" not in tensors
    assert "visual.blocks.0.attn.sinks" not in tensors
    assert not [name for name in tensors if ".q_proj" in name and name.startswith("model.")]
    codes = CheckpointIndex.open(directory / "audio_tokenizer").tensors
    assert codes["encoder.quantizer.vq.layers.0._codebook.embed"].dtype == "F32"
    assert "encoder.layers.0.self_attn.k_proj.bias" not in codes


def test_every_value_is_finite(directory: Path) -> None:
    for file in directory.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.isfinite().all(), name


def test_fused_rows_are_chunks_of_heads() -> None:
    """Row by row for a sliding layer: 4 kv heads in 2 chunks."""
    config = tiny.decoder_config(qkv="interleaved")
    split = decoder_tensors(config, Draw(0))
    fused = fuse_qkv(split, config)
    path = "model.layers.1.self_attn"
    q, k, v = (split[f"{path}.{letter}_proj.weight"] for letter in "qkv")
    heads_q, heads_k, heads_v = q.split(6), k.split(6), v.split(4)
    expected = torch.cat(
        [*heads_q[:2], *heads_k[:2], *heads_v[:2], *heads_q[2:], *heads_k[2:], *heads_v[2:]]
    )
    assert torch.equal(fused[f"{path}.qkv_proj.weight"], expected)


def test_the_seed_decides_every_byte(directory: Path, tmp_path: Path) -> None:
    generate(tmp_path / "again")
    generate(tmp_path / "other", seed=1)
    for file in directory.rglob("*"):
        if file.is_file():
            name = file.relative_to(directory)
            assert (tmp_path / "again" / name).read_bytes() == file.read_bytes()
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (directory / weights).read_bytes()


def test_the_gateway_can_open_it(directory: Path) -> None:
    model = Model.open(directory)
    assert model.name == "mimo-tiny"
    assert model.max_context_tokens == 8192
    assert model.defaults.temperature == 0.0 and model.defaults.max_tokens == 256
    tokenizer = build()
    ends = (tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>"))
    assert model.stop_token_ids == ends
    assert model.processor is not None and model.processor.image_max_pixels == 36_864


def test_vision_and_audio_towers_load_and_tell_inputs_apart(directory: Path) -> None:
    index = CheckpointIndex.open(directory)
    tower = load_vision_tower(
        index,
        read_tower_config(index),
        dtype=torch.float32,
        device="cpu",
        selector=AttentionSelector("vision"),
    )
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(16, 1536, generator=generator)
    images = torch.cat((patches, -patches))
    first, second = tower(images, [(1, 4, 4), (1, 4, 4)]).split(4)
    audio = AudioCheckpoint.open(directory).load(
        dtype=torch.float32, device="cpu", selector=AttentionSelector("audio")
    )
    noise = torch.randn(12_000, generator=generator)
    loud, quiet = audio([noise, torch.zeros(12_000)])
    for ours, other in ((first, second), (loud, quiet)):
        assert ours.shape[1] == 192 and ours.isfinite().all()
        assert 0.3 < float(ours.std()) < 3 and float((ours - other).std()) > 0.3


def test_greedy_answers_are_varied_and_readable(directory: Path) -> None:
    decoder, mtp = load_decoder(
        CheckpointIndex.open(directory),
        dtype=torch.float32,
        device="cpu",
        selector=AttentionSelector("llm"),
    )
    assert mtp is not None and len(mtp.layers) == 3
    tokenizer = build()
    answers = set()
    for question in ("What is in the picture?", "Hello!"):
        ids = [tokenizer.token_to_id("<|im_start|>"), *tokenizer.encode(f"user\n{question}").ids]
        prompt_len = len(ids)
        for _ in range(40):
            with torch.inference_mode():
                x = decoder.embed(torch.tensor(ids))
                attend = FullSequences((len(ids),))
                logits = decoder.logits(decoder(x, torch.arange(len(ids)), attend))[-1]
            assert logits.isfinite().all()
            ids.append(int(logits[: tokenizer.get_vocab_size()].argmax()))
        answer = ids[prompt_len:]
        text = tokenizer.decode(answer)
        assert len(set(answer)) > 20
        assert np.mean([character.isprintable() for character in text]) > 0.95
        answers.add(text)
    assert len(answers) == 2


def test_text_survives_the_tokenizer() -> None:
    tokenizer = build()
    for text in ("What colour is the circle?", "Ünï 🙂 the end\n\n  x", "\x00\x7f", "漢字 ру"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_and_capitals_are_tokens_of_their_own() -> None:
    tokenizer = build()
    assert tokenizer.encode("The text says: AB 2026").tokens == [
        "The", "Ġtext", "Ġsays", ":", "Ġ", "A", "B", "Ġ", "2", "0", "2", "6",
    ]  # fmt: skip


def test_ids_fit_the_embedding_and_leave_room() -> None:
    tokenizer = build()
    ids = control_ids(tokenizer)
    vocab_size = model_config(ids)["vocab_size"]
    assert 650 < tokenizer.get_vocab_size() == max(ids.values()) + 1 < vocab_size
    assert [ids[text] for text in CONTROL_TOKENS] == sorted(ids[text] for text in CONTROL_TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layouts_of_one_seed_give_the_same_decoder(tmp_path: Path, dtype: torch.dtype) -> None:
    outputs = []
    for qkv in ("split", "interleaved", "plain"):
        index = CheckpointIndex.open(tiny.write_decoder(tmp_path / qkv, qkv=qkv, dtype=dtype))
        decoder, mtp = load_decoder(
            index, dtype=dtype, device="cpu", selector=AttentionSelector("llm")
        )
        assert mtp is not None
        with torch.inference_mode():
            ids, positions = torch.arange(9), torch.arange(9)
            hidden = decoder(decoder.embed(ids), positions, FullSequences((9,)))
            drafted = mtp.layer(0, decoder.embed(ids), hidden, positions, FullSequences((9,)))
            outputs.append((decoder.logits(hidden), decoder.logits(drafted)))
    for logits, drafts in outputs[1:]:
        assert torch.equal(logits, outputs[0][0]) and torch.equal(drafts, outputs[0][1])


def test_the_smallest_omni_checkpoint_loads(tmp_path: Path) -> None:
    directory = tiny.write_omni(tmp_path / "omni", max_position_embeddings=512)
    assert Model.open(directory).max_context_tokens == 512
    index = CheckpointIndex.open(directory)
    options = {"dtype": torch.float32, "device": "cpu"}
    load_decoder(index, selector=AttentionSelector("llm"), **options)
    vision = AttentionSelector("vision")
    load_vision_tower(index, read_tower_config(index), selector=vision, **options)
    AudioCheckpoint.open(directory).load(selector=AttentionSelector("audio"), **options)
    files = [path.stat().st_size for path in directory.rglob("*.safetensors")]
    assert sum(files) < 300_000


def test_the_command_writes_where_it_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "models.generate", "--out", str(tmp_path / "m"), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert str(tmp_path / "m") in done.stdout
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "mimo_v2"
