"""Codes to embeddings: sum the tables of all codebooks, mix inside each group, project."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from services.audio.config import AudioEncoderConfig
from services.audio.local_transformer import LocalTransformer
from services.audio.projection import make_projection

PASS_GROUPS = 4096  # groups per forward, 11 minutes of sound; bounds the projection's memory


class CodeEmbedder(nn.Module):
    """The language model's side of the audio stack; one embedding per group of code frames."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.speech_embeddings = nn.ModuleList(
            nn.Embedding(rows, config.input_local_dim) for rows in config.speech_vocab_size
        )
        self.input_local_transformer = LocalTransformer(config)
        self.projection = make_projection(config)

    def forward(self, codes: Tensor, lengths: Sequence[int]) -> Tensor:
        """Embeddings of packed clips. codes: [sum of lengths, C] -> [G, hidden].

        Clip i has ``lengths[i]`` code frames and gives ceil(length / group size) embeddings; extra
        codebooks are ignored. A clip's last frame repeats until its last group is full.
        """
        groups = codes[self._group_index(lengths).to(codes.device)]  # [G, S, C]
        return torch.cat([self._embed(part) for part in torch.split(groups, PASS_GROUPS)])

    def _group_index(self, lengths: Sequence[int]) -> Tensor:
        """Rows of the packed codes that make up each group. -> [G, S]."""
        size = self.config.group_size
        parts = []
        start = 0
        for length in lengths:
            index = torch.arange(-(-length // size) * size).clamp_max(length - 1)
            parts.append(start + index)
            start += length
        return torch.cat(parts).view(-1, size)

    def _embed(self, codes: Tensor) -> Tensor:
        x = self.input_local_transformer(self._sum_tables(codes))  # [G, S, D]
        rows: Tensor = self.projection(x.flatten(1))  # frame after frame: [G, S * D] -> [G, hidden]
        return rows

    def _sum_tables(self, codes: Tensor) -> Tensor:
        """Sum over codebooks, coarse first: in bfloat16 the order matters.

        [G, S, C] -> [G, S, D]
        """
        total: Tensor | None = None
        for channel, table in enumerate(self.speech_embeddings):
            code = codes[..., channel]  # [G, S]
            silent = code == self.config.speech_zeroemb_idx[channel]
            part = table(code).masked_fill(silent[..., None], 0)  # [G, S, D]
            total = part if total is None else total + part
        assert total is not None  # a configuration has at least one channel
        return total
