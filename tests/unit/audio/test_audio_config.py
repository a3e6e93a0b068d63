"""The two configurations: what they derive and what they refuse."""

import pytest

from mimo.errors import CheckpointError
from services.audio.config import AudioEncoderConfig, AudioTokenizerConfig
from tests.support.tiny_audio import (
    bidirectional_fields,
    encoder_config,
    encoder_fields,
    tokenizer_config,
    tokenizer_fields,
)


def test_short_codebook_list_repeats_its_last_size_and_is_copied():
    fields = tokenizer_fields(codebook_size=[1024, 1024, 256, 128], num_quantizers=20)
    config = AudioTokenizerConfig.from_checkpoint(fields)
    assert config.codebook_size == (1024, 1024, 256, *[128] * 17)
    assert fields["codebook_size"] == [1024, 1024, 256, 128]


def test_missing_fmax_is_half_the_rate():
    assert tokenizer_config(fmax=None).fmax == 12000.0
    assert tokenizer_config(fmax=8000).fmax == 8000.0


def test_even_layers_are_windowed_in_hybrid_attention():
    config = tokenizer_config()
    assert [config.is_windowed(layer) for layer in range(4)] == [True, False, True, False]


def test_only_the_last_layer_of_a_block_is_full():
    config = tokenizer_config(swa_per_block=4)
    assert [config.is_windowed(layer) for layer in range(4)] == [True, True, True, False]


def test_first_generation_has_no_window_anywhere():
    fields = bidirectional_fields()
    del fields["hybrid_attention"], fields["swa_per_block"]
    config = AudioTokenizerConfig.from_checkpoint(fields)
    assert not any(config.is_windowed(layer) for layer in range(config.encoder_layers))


def test_roundings_default_to_bf16_and_the_profile_turns_them_off():
    assert set(tokenizer_config().numeric_profile.values()) == {"bf16"}
    plain = {"audio_codebook_round": "none", "audio_inv_freq_round": "none"}
    assert tokenizer_config(plain).numeric_profile == plain


def test_unknown_rounding_is_refused():
    with pytest.raises(CheckpointError, match="audio_codebook_round"):
        tokenizer_config({"audio_codebook_round": "fp8"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kernel_size", 5),
        ("stride_size", 1),
        ("avg_pooler", 1),
        ("ln_type", "RMSNorm"),
        ("activation_function", "relu"),
        ("rope_type", "linear"),
        ("encoder_attention_heads", 3),
        ("encoder_attention_heads", 16),
        ("encoder_skip_layer_id", 5),
        ("encoder_skip_layer_id", 0),
        ("encoder_attn_window_size", [5]),
        ("encoder_attn_window_size", [-2, 0]),
        ("codebook_size", []),
        ("codebook_size", [32, 0]),
        ("codebook_size", [8] * 6),
        ("d_model", None),
        ("n_mels", "8"),
        ("window_size", 1000),
        ("fmax", 13000),
    ],
)
def test_tokenizer_config_refuses_by_name(field, value):
    with pytest.raises(CheckpointError, match=field):
        tokenizer_config(**{field: value})


def test_scalar_vocabulary_applies_to_every_channel():
    config = encoder_config(speech_vocab_size="1280", speech_zeroemb_idx=1024)
    assert config.speech_vocab_size == (1280,) * 4
    assert config.speech_zeroemb_idx == (1024,) * 4


def test_dash_list_gives_one_number_per_channel():
    config = encoder_config(speech_vocab_size="1025-1025-129-129", audio_channels=3)
    assert config.speech_vocab_size == (1025, 1025, 129)


def test_speech_recognition_checkpoint_without_audio_config_is_read_from_the_top_level():
    flat = {**encoder_fields()["audio_config"], "hidden_size": 12}
    assert AudioEncoderConfig.from_checkpoint(flat) == encoder_config()


def test_projection_width_is_four_times_the_group_unless_written():
    assert encoder_config(projection_hidden_dim=20).projection_hidden_dim == 20
    assert encoder_config(projection_hidden_dim=None).projection_hidden_dim == 4 * 4 * 16


def test_embedding_width_falls_back_to_the_language_models():
    fields = encoder_fields(out_hidden_size=None)
    assert AudioEncoderConfig.from_checkpoint(fields).out_hidden_size == 12


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partial_rotary_factor", 0.334),
        ("input_local_head_dim", 16),
        ("projection_layers", 3),
        ("speech_vocab_size", "40-40"),
        ("audio_channels", 0),
        ("group_size", None),
    ],
)
def test_encoder_config_refuses_by_name(field, value):
    with pytest.raises(CheckpointError, match=field):
        encoder_config(**{field: value})


def test_segments_must_hold_whole_embeddings():
    encoder_config(audio_segment_size=32).check_tokenizer(tokenizer_config())
    with pytest.raises(CheckpointError, match="not a multiple of 16"):
        encoder_config(audio_segment_size=100).check_tokenizer(tokenizer_config())


def test_more_channels_than_codebooks_is_refused():
    with pytest.raises(CheckpointError, match="5 codebooks"):
        encoder_config(audio_channels=6).check_tokenizer(tokenizer_config())


@pytest.mark.parametrize("zero", ["31", "40"])
def test_zero_id_inside_a_codebook_or_outside_the_table_is_refused(zero):
    with pytest.raises(CheckpointError, match="speech_zeroemb_idx"):
        encoder_config(speech_zeroemb_idx=zero).check_tokenizer(tokenizer_config())


def test_zero_id_of_each_channel_is_held_against_its_own_codebook():
    config = encoder_config(speech_vocab_size="33-17-17-17", speech_zeroemb_idx="32-16-16-16")
    config.check_tokenizer(tokenizer_config())
