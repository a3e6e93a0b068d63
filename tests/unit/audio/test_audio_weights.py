"""Both published layouts and their aliases load; anything missing or foreign is refused by name."""

from pathlib import Path

import pytest
import torch

from mimo.errors import CheckpointError
from mimo.nn.attention import AttentionSelector
from services.audio.model import AudioTower
from services.audio.weights import AudioCheckpoint
from tests.support.tiny_audio import (
    encoder_fields,
    make_tower,
    make_waveform,
    omni_tensors,
    tokenizer_fields,
    tokenizer_tensors,
    write_checkpoint,
    write_tensors,
)


def load(directory: Path, dtype: torch.dtype = torch.float32, **options) -> AudioTower:
    checkpoint = AudioCheckpoint.open(directory, **options)
    return checkpoint.load(dtype=dtype, device="cpu", selector=AttentionSelector("audio"))


def assert_same(loaded: AudioTower, original: AudioTower) -> None:
    waveforms = [make_waveform(12000), make_waveform(700)]
    for found, expected in zip(loaded(waveforms), original(waveforms), strict=True):
        assert torch.equal(found, expected)


def test_omni_checkpoint_loads(tmp_path):
    tower = make_tower()
    write_checkpoint(tmp_path, tower)
    assert_same(load(tmp_path), tower)


def test_tokenizer_may_lie_elsewhere_and_bring_its_decoder(tmp_path):
    tower = make_tower()
    write_tensors(tmp_path / "model", encoder_fields(audio_segment_size=32), omni_tensors(tower))
    tensors = tokenizer_tensors(tower)
    tensors["decoder.dconv1.conv.bias"] = torch.ones(3)
    write_tensors(tmp_path / "tokenizer", tokenizer_fields(), tensors)
    assert_same(load(tmp_path / "model", tokenizer_directory=tmp_path / "tokenizer"), tower)
    with pytest.raises(
        CheckpointError, match=r"audio_tokenizer does not exist.*--audio-tokenizer-path"
    ):
        load(tmp_path / "model")


def test_speech_recognition_names_load_and_speech_output_is_skipped(tmp_path):
    tower = make_tower(projection_layers=1)
    tensors = {}
    for name, value in tower.embedder.state_dict().items():
        tensors[name.replace("projection.", "speech_group_downcast.")] = value
    for name in (
        "local_transformer.norm.weight",
        "local_transformer_lm_heads.0.weight",
        "hidden_states_downcast.weight",
        "speech_embeddings_to_local.weight",
        "lm_head.weight",
    ):
        tensors[name] = torch.ones(2)
    config = encoder_fields(audio_segment_size=32, projection_layers=1)
    del config["audio_config"]["add_post_norm"]  # the tensor says that the norm is there
    write_checkpoint(tmp_path, tower, config, model=tensors)
    assert_same(load(tmp_path), tower)


@pytest.mark.parametrize(
    ("published", "alias"),
    [
        ("speech_embeddings.", "audio_encoder.speech_embeddings."),
        ("audio_encoder.projection.", "audio_projection."),
        ("audio_encoder.input_local_transformer.", "audio_input_local_transformer."),
        ("audio_encoder.input_local_transformer.", "input_local_transformer."),
    ],
)
def test_aliases_load(tmp_path, published, alias):
    tower = make_tower()
    tensors = {
        alias + name.removeprefix(published) if name.startswith(published) else name: value
        for name, value in omni_tensors(tower).items()
    }
    write_checkpoint(tmp_path, tower, model=tensors)
    assert_same(load(tmp_path), tower)


def test_padded_table_rows_are_accepted(tmp_path):
    tower = make_tower()
    tensors = omni_tensors(tower)
    padded = torch.cat([tensors["speech_embeddings.1.weight"], torch.full((24, 16), 9.0)])
    write_checkpoint(tmp_path, tower, model={**tensors, "speech_embeddings.1.weight": padded})
    assert_same(load(tmp_path), tower)


def test_projection_width_is_taken_from_the_tensor(tmp_path):
    tower = make_tower()
    config = encoder_fields(audio_segment_size=32, projection_hidden_dim=None)
    write_checkpoint(tmp_path, tower, config)
    assert AudioCheckpoint.open(tmp_path).encoder_config.projection_hidden_dim == 20
    assert_same(load(tmp_path), tower)


def test_bf16_model_keeps_float32_codebooks(tmp_path):
    tower = make_tower()
    write_checkpoint(tmp_path, tower)
    loaded = load(tmp_path, torch.bfloat16)
    assert loaded.tokenizer.conv1.weight.dtype == torch.bfloat16
    assert torch.equal(
        loaded.tokenizer.quantizer.codebooks[0], tower.tokenizer.quantizer.codebooks[0]
    )
    (rows,) = loaded([make_waveform(5000)])
    assert rows.dtype == torch.bfloat16 and rows.shape == (2, 12) and rows.isfinite().all()


def test_switches_come_from_the_profile_and_flags_win(tmp_path):
    config = encoder_fields(audio_segment_size=32)
    config["numeric_profile"] = {"audio_codebook_round": "none"}
    write_checkpoint(tmp_path, make_tower(), config)
    opened = AudioCheckpoint.open(tmp_path)
    assert opened.tokenizer_config.numeric_profile["audio_codebook_round"] == "none"
    opened = AudioCheckpoint.open(tmp_path, switches={"audio_codebook_round": "bf16"})
    assert opened.tokenizer_config.numeric_profile["audio_codebook_round"] == "bf16"


@pytest.mark.parametrize(
    "name",
    [
        "speech_embeddings.3.weight",
        "audio_encoder.projection.mlp.2.weight",
        "audio_encoder.input_local_transformer.norm.weight",
        "audio_encoder.input_local_transformer.layers.1.self_attn.k_proj.bias",
    ],
)
def test_missing_encoder_tensor_is_named(tmp_path, name):
    tower = make_tower()
    tensors = omni_tensors(tower)
    del tensors[name]
    write_checkpoint(tmp_path, tower, model=tensors)
    with pytest.raises(CheckpointError, match=name.removeprefix("audio_encoder.")):
        load(tmp_path)


@pytest.mark.parametrize("name", ["audio_encoder.extra.weight", "speech_embeddings.4.weight"])
def test_unexpected_encoder_tensor_is_named(tmp_path, name):
    tower = make_tower()
    write_checkpoint(tmp_path, tower, model={**omni_tensors(tower), name: torch.ones(2)})
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["conv1.weight", "layers.2.self_attn.q_proj.bias", "quantizer.vq.layers.4._codebook.embed"],
)
def test_missing_tokenizer_tensor_is_named(tmp_path, name):
    tower = make_tower()
    tensors = tokenizer_tensors(tower)
    del tensors[f"encoder.{name}"]
    write_checkpoint(tmp_path, tower, tokenizer=tensors)
    with pytest.raises(CheckpointError, match=r"conv1\.weight|q_proj\.bias|codebooks\.4"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["encoder.layers.0.self_attn.k_proj.bias", "vocoder.weight"])
def test_unexpected_tokenizer_tensor_is_named(tmp_path, name):
    tower = make_tower()
    write_checkpoint(tmp_path, tower, tokenizer={**tokenizer_tensors(tower), name: torch.ones(16)})
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_mis_shaped_tensor_is_named_with_both_shapes(tmp_path):
    tower = make_tower()
    tensors = {**tokenizer_tensors(tower), "encoder.conv1.bias": torch.ones(17)}
    write_checkpoint(tmp_path, tower, tokenizer=tensors)
    with pytest.raises(CheckpointError, match=r"conv1\.bias.*\[16\].*\[17\]"):
        load(tmp_path)


def test_final_norm_that_the_configuration_denies_is_refused(tmp_path):
    write_checkpoint(tmp_path, make_tower(), encoder_fields(add_post_norm=False))
    with pytest.raises(CheckpointError, match="add_post_norm is false"):
        load(tmp_path)


def test_processor_with_another_rate_is_refused(tmp_path):
    config = encoder_fields(audio_segment_size=32)
    config["processor_config"] = {"audio_sampling_rate": 16000}
    write_checkpoint(tmp_path, make_tower(), config)
    with pytest.raises(CheckpointError, match="audio_sampling_rate is 16000"):
        load(tmp_path)


def test_model_without_sound_says_so(tmp_path):
    tower = make_tower()
    write_checkpoint(tmp_path, tower, model={"lm_head.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no tensor of an audio encoder"):
        load(tmp_path)
