"""The simplest key-value cache: one sequence, rows addressed by position."""

import torch
from torch import Tensor

from mimo.nn.attention import BoundAttention
from mimo.nn.attention.base import Varlen


class SequenceCache:
    """An Attend for steps of one sequence. Set ``start`` to the position of a step's first row;
    what was stored from there on is forgotten."""

    def __init__(self) -> None:
        self.start = 0
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: [S, K, H], [S, K, Hv]

    def __call__(
        self,
        layer: int,
        attention: BoundAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        if layer in self.stored:
            old_k, old_v = self.stored[layer]
            assert len(old_k) >= self.start, f"layer {layer} has a gap before {self.start}"
            k, v = torch.cat((old_k[: self.start], k)), torch.cat((old_v[: self.start], v))
        self.stored[layer] = (k, v)
        return attention(q, k, v, Varlen((len(q),), (len(k),)), sinks)
