"""The main model: token or encoder rows in, hidden states and logits out.

Plain differentiable modules. Caches, graphs and inference mode belong to whoever runs them.
"""

import torch
from torch import Tensor, nn

from mimo.errors import InvalidRequest, Reason
from mimo.nn.attention import AttentionSelector
from mimo.nn.linear import Linear
from mimo.nn.mlp import SwiGLU
from mimo.nn.norm import RMSNorm
from services.llm.model.attention import Attend, Attention, Rotary
from services.llm.model.config import DecoderConfig, LayerSpec
from services.llm.model.moe import SparseMoe
from services.llm.model.parallel import WHOLE, Shard, embedding, vocabulary_rows


def merge_embeddings(x: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Put encoder rows in the place of placeholder embeddings.

    x: [T, D] embedded tokens, rows: [M, D] in the order of their positions, positions: [M] indices
    into x -> [T, D] of x's dtype. Raises InvalidRequest when rows and positions differ in number.
    """
    if len(rows) != len(positions):
        raise InvalidRequest(
            f"{len(positions)} placeholders for {len(rows)} embedding rows",
            reason=Reason.EMBEDDING_MISMATCH,
        )
    return x.index_copy(0, positions, rows.to(x.dtype))


class Decoder(nn.Module):
    """A MiMo-V2 language model without its MTP blocks.

    Parameters are made in ``dtype`` on torch's current default device, so that a loader can build
    them on "meta"; ``device`` is where the arithmetic will run. As one rank of several it has the
    rank's ``shard`` and its share of the configuration.
    """

    def __init__(
        self,
        config: DecoderConfig,
        selector: AttentionSelector,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__()
        self.config = config
        self.shard = shard
        self.model = Trunk(config, selector, dtype=dtype, device=device, shard=shard)
        rows = vocabulary_rows(config.vocab_size, shard.rank, shard.size)
        self.lm_head = Linear(config.hidden_size, len(rows), bias=False, dtype=dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """ids: [T] -> [T, D]; of one rank of several, what its :meth:`Shard.sum` adds up."""
        return self.model.embed_tokens(ids)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers over a step's packed rows.

        x: [T, D] from :meth:`embed`, merged with encoder rows; positions: [T] int64 -> [T, D]
        after the final norm, which is what the head and the MTP blocks read.
        """
        return self.model(x, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [T, D] -> [T, V]; on other ranks than the first, only the rank's columns."""
        return self.shard.columns(self.lm_head(hidden), self.config.vocab_size)


class Trunk(nn.Module):
    """Embedding, layers and final norm: what checkpoints call ``model``."""

    def __init__(
        self,
        config: DecoderConfig,
        selector: AttentionSelector,
        *,
        dtype: torch.dtype,
        device: str,
        shard: Shard,
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size, shard, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, spec, selector, dtype=dtype, device=device, shard=shard)
            for spec in config.layers
        )
        self.norm = RMSNorm(config.hidden_size, config.layernorm_epsilon).to(dtype)
        self.kinds = [_kind(spec) for spec in config.layers]
        self.rotary = nn.ModuleDict(
            {_kind(spec): Rotary(spec, dtype=dtype, device=device) for spec in config.layers}
        )

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x: [T, D], positions: [T] -> [T, D]."""
        angles = {kind: rotary(positions) for kind, rotary in self.rotary.items()}
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            x = layer(x, *angles[kind], attend)
        return self.norm(x)


class DecoderLayer(nn.Module):
    """Attention, then a dense or sparse feed-forward, each behind its norm and added back."""

    def __init__(
        self,
        config: DecoderConfig,
        spec: LayerSpec,
        selector: AttentionSelector,
        *,
        dtype: torch.dtype,
        device: str,
        shard: Shard,
    ) -> None:
        super().__init__()
        self.shard = shard
        eps = config.layernorm_epsilon
        self.input_layernorm = RMSNorm(config.hidden_size, eps).to(dtype)
        self.self_attn = Attention(config, spec, selector, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps).to(dtype)
        self.mlp = (
            SparseMoe(config, dtype=dtype, device=device)
            if spec.is_moe
            else SwiGLU(config.hidden_size, config.intermediate_size, bias=False).to(dtype)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x: [T, D], cos and sin: [T, rotary_dim / 2] -> [T, D]."""
        x = x + self.shard.sum(self.self_attn(self.input_layernorm(x), cos, sin, attend))
        return x + self.shard.sum(self.mlp(self.post_attention_layernorm(x)))


def _kind(spec: LayerSpec) -> str:
    return "sliding" if spec.sliding else "full"
