"""The transformer inside a group against Hugging Face's Qwen2, which it is by construction."""

import pytest
import torch

from services.audio.local_transformer import LocalTransformer
from tests.support.tiny_audio import encoder_config, randomize

pytestmark = [pytest.mark.check, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("is_full", [True, False], ids=["bidirectional", "causal"])
def test_local_transformer_equals_qwen2(is_full):
    transformers = pytest.importorskip("transformers", reason="needs the extra `oracles`")
    config = encoder_config(input_full_attention=is_full)
    ours = LocalTransformer(config).eval()
    randomize(ours)
    theirs = transformers.Qwen2Model(
        transformers.Qwen2Config(
            vocab_size=1,
            hidden_size=config.input_local_dim,
            intermediate_size=config.input_local_intermediate_size,
            num_hidden_layers=config.input_local_layers,
            num_attention_heads=config.input_local_attn_heads,
            num_key_value_heads=config.input_local_attn_heads,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            pad_token_id=None,
        )
    ).eval()
    loaded = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert loaded.missing_keys == ["embed_tokens.weight"] and not loaded.unexpected_keys
    x = torch.randn(6, 4, config.input_local_dim, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(inputs_embeds=x, is_causal=not is_full, use_cache=False)
        torch.testing.assert_close(ours(x), expected.last_hidden_state, rtol=0, atol=2e-6)
