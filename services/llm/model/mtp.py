"""Multi-token prediction: light blocks that guess further ahead than the main model.

Block n at position i reads the embedding of the token at i + 1 + n and the main model's hidden
state of position i, and predicts the token at i + 2 + n. Blocks are not chained: all of them read
the same hidden state, and only the tokens move left by one from block to block. Positions, and with
them rotary angles and cache slots, stay at i.
"""

import torch
from torch import Tensor, nn

from mimo.nn.attention import AttentionSelector
from mimo.nn.linear import Linear
from mimo.nn.mlp import SwiGLU
from mimo.nn.norm import RMSNorm
from services.llm.model.attention import Attend, Attention, Rotary
from services.llm.model.config import DecoderConfig, LayerSpec
from services.llm.model.parallel import WHOLE, Shard


class Mtp(nn.Module):
    """The MTP blocks of a checkpoint. Embedding and head are the decoder's."""

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
        self.layers = nn.ModuleList(
            MtpLayer(config, spec, selector, dtype=dtype, device=device, shard=shard)
            for spec in config.mtp_layers
        )
        self.rotary = Rotary(config.mtp_layer, dtype=dtype, device=device)

    def layer(
        self,
        depth: int,
        token_embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Run block ``depth``. -> [T, D], for :meth:`Decoder.logits`.

        token_embeddings: [T, D] of the tokens at positions + 1 + depth, encoder rows included;
        hidden: [T, D] as the decoder returns it, of the tokens at positions: [T].
        """
        cos, sin = self.rotary(positions)
        return self.layers[depth](token_embeddings, hidden, cos, sin, attend)


class MtpLayer(nn.Module):
    """One block: joins embedding and hidden state, then sliding attention and a dense SwiGLU."""

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
        hidden_size, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = RMSNorm(hidden_size, eps).to(dtype)
        self.hnorm = RMSNorm(hidden_size, eps).to(dtype)
        self.eh_proj = Linear(2 * hidden_size, hidden_size, bias=False, dtype=dtype)
        self.input_layernorm = RMSNorm(hidden_size, eps).to(dtype)
        self.self_attn = Attention(config, spec, selector, dtype=dtype, device=device)
        self.pre_mlp_layernorm = RMSNorm(hidden_size, eps).to(dtype)
        self.mlp = SwiGLU(hidden_size, config.intermediate_size, bias=False).to(dtype)
        self.final_layernorm = RMSNorm(hidden_size, eps).to(dtype)

    def forward(
        self, token_embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """token_embeddings and hidden: [T, D], cos and sin: [T, rotary_dim / 2] -> [T, D]."""
        joined = torch.cat((self.enorm(token_embeddings), self.hnorm(hidden)), dim=-1)  # [T, 2D]
        x = self.eh_proj(joined)
        x = x + self.shard.sum(self.self_attn(self.input_layernorm(x), cos, sin, attend))
        x = x + self.shard.sum(self.mlp(self.pre_mlp_layernorm(x)))
        return self.final_layernorm(x)
