"""The decoder against the class that transformers ships for MiMo-V2-Flash, on random checkpoints.

That class reads few of the published configuration fields, so its own are spelled out here. It has
no MTP and gives sliding layers twice the key-value heads of full ones.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.index import CheckpointIndex
from mimo.nn.attention import AttentionSelector
from services.llm.model.attention import FullSequences
from services.llm.model.config import DecoderConfig
from services.llm.model.decoder import Decoder
from services.llm.model.weights import load_decoder, published_tensors
from tests.support.sequence_cache import SequenceCache

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.check

TOLERANCE = 1e-5  # of the largest logit, in float32
WINDOW = 6


@dataclass(frozen=True)
class Case:
    """A published configuration, and how the other class spells the fields it does not read."""

    name: str
    pattern: list[int]
    value_scale: float = 0.707
    theta: float = 5e6
    eps: float = 1e-5
    kv_heads: int = 1
    visible: int = WINDOW + 1
    attention_bias: bool = False
    routing: dict[str, Any] = field(default_factory=dict)

    def published(self) -> dict[str, Any]:
        return {
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": len(self.pattern),
            "num_attention_heads": 4,
            "num_key_value_heads": self.kv_heads,
            "swa_num_key_value_heads": 2 * self.kv_heads,
            "head_dim": 24,
            "v_head_dim": 16,
            "swa_v_head_dim": 16,
            "partial_rotary_factor": 0.334,
            "rope_theta": self.theta,
            "swa_rope_theta": 1e4,
            "hybrid_layer_pattern": self.pattern,
            "sliding_window_size": WINDOW,
            "add_swa_attention_sink_bias": True,
            "attention_value_scale": self.value_scale,
            "attention_bias": self.attention_bias,
            "layernorm_epsilon": self.eps,
            "moe_layer_freq": [0] + [1] * (len(self.pattern) - 1),
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 512,
            "numeric_profile": {"swa_visible": self.visible},
            **self.routing,
        }

    def native(self) -> Any:
        kinds = ("full_attention", "sliding_attention")
        published = self.published()
        same = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads head_dim v_head_dim attention_value_scale attention_bias "
            "moe_intermediate_size n_routed_experts num_experts_per_tok max_position_embeddings"
        ).split()
        return transformers.MiMoV2FlashConfig(
            **{name: published[name] for name in same},
            **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, **self.routing},
            rms_norm_eps=self.eps,
            layer_types=[kinds[kind] for kind in self.pattern],
            mlp_layer_types=["dense"] + ["sparse"] * (len(self.pattern) - 1),
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
                for kind, theta in zip(kinds, (self.theta, 1e4), strict=True)
            },
            sliding_window=self.visible,
            attn_implementation="eager",
        )


CASES = [
    Case("flash", [0, 1, 1, 1, 1, 0, 1]),
    Case("omni", [0, 1, 1, 0], theta=1e7, kv_heads=2),
    Case("pro", [0, 1, 1, 1], theta=1e7, value_scale=0.612, eps=1e-6),
    Case("window of 128 in published terms", [1, 1, 1], visible=WINDOW),
    Case("groups", [0, 1, 1], routing={"n_group": 4, "topk_group": 2}),
    Case("scaled", [0, 1], routing={"norm_topk_prob": False, "routed_scaling_factor": 2.5}),
    Case("biased", [0, 1], attention_bias=True),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, Any]:
    """The same random checkpoint, read by us and by transformers."""
    case: Case = request.param
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "config.json").write_text(json.dumps(case.published()))
    save_file(random_tensors(case), directory / "model.safetensors", {"format": "pt"})
    selector = AttentionSelector("llm", override=None)
    ours, _ = load_decoder(
        CheckpointIndex.open(directory), dtype=torch.float32, device="cpu", selector=selector
    )
    theirs, report = transformers.MiMoV2FlashForCausalLM.from_pretrained(
        directory, config=case.native(), dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return ours, theirs.eval()


def random_tensors(case: Case) -> dict[str, Tensor]:
    config = DecoderConfig.from_checkpoint(case.published())
    places = published_tensors(Decoder(config, AttentionSelector("llm", override=None)), None)
    torch.manual_seed(0)
    return {name: random_tensor(name, place.shape) for name, place in places.items()}


def random_tensor(name: str, shape: torch.Size) -> Tensor:
    noise = torch.randn(shape)
    if len(shape) == 2:
        return noise if "embed_tokens" in name else noise / math.sqrt(shape[1])
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    return noise if name.endswith("sink_bias") else 0.3 * noise


def close(got: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE * expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0, atol=limit)


def sequence(length: int) -> Tensor:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits(models: tuple[Decoder, Any]) -> None:
    ours, theirs = models
    ids = sequence(40)
    hidden = ours(ours.embed(ids), torch.arange(40), FullSequences((40,)))
    close(ours.logits(hidden), theirs(input_ids=ids[None]).logits[0])


@torch.no_grad()
def test_packed_sequences(models: tuple[Decoder, Any]) -> None:
    ours, theirs = models
    first, second = sequence(30).split((9, 21))
    positions = torch.cat((torch.arange(9), torch.arange(21)))
    hidden = ours(ours.embed(torch.cat((first, second))), positions, FullSequences((9, 21)))
    alone = [theirs(input_ids=ids[None]).logits[0] for ids in (first, second)]
    close(ours.logits(hidden), torch.cat(alone))


@torch.no_grad()
@pytest.mark.parametrize("prefill", [1, WINDOW, 2 * WINDOW + 3])
def test_token_by_token_beyond_three_windows(models: tuple[Decoder, Any], prefill: int) -> None:
    ours, theirs = models
    ids = sequence(4 * WINDOW + 5)
    cache, logits = SequenceCache(), []
    chunks = (prefill, *[1] * (len(ids) - prefill))
    for rows in torch.arange(len(ids)).split(chunks):
        cache.start = int(rows[0])
        logits.append(ours.logits(ours(ours.embed(ids[rows]), rows, cache)))
    close(torch.cat(logits), theirs(input_ids=ids[None]).logits[0])
