"""What an attention layer asks for, what a backend offers, and how a batch is described."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor


class Sink(Enum):
    """What the learned per-head scalar of a layer does to the softmax."""

    NONE = "none"
    COLUMN = "column"  # one more logit in the denominator, without a value
    KEY0 = "key0"  # added to the logit of the segment's first key, where that key is visible


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Everything a backend must honour; it is chosen only if it can honour all of it.

    ``left`` and ``right`` count the keys visible before and after the query's own position, which
    is always visible; None is no limit. With ``causal`` nothing after it is visible whatever
    ``right`` says. Query head n reads kv head ``n // (num_heads // num_kv_heads)``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    causal: bool
    left: int | None
    right: int | None
    sink: Sink
    paged: bool
    dtype: torch.dtype
    device: str

    @property
    def keys_after(self) -> int | None:
        """How many keys after its own position a query sees; None is no limit."""
        return 0 if self.causal else self.right


@dataclass(frozen=True, slots=True)
class Varlen:
    """Packed segments that never see each other. The queries are the last ``q_len`` positions of
    their segment, so ``k_len >= q_len``."""

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Packed queries whose keys lie in cache blocks, this step's keys included.

    Compared by identity: a backend may remember what it worked out for the layers of a step.
    """

    q_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor  # [B, max_blocks] int32
    block_size: int


class AttentionBackend(Protocol):
    """One implementation. Stateless: the same inputs give the same bits.

    A segment's output does not depend on which other segments share the call.
    """

    @property
    def name(self) -> str: ...

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve the layer, or None when it can."""

    def varlen(
        self,
        needs: AttentionNeeds,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: Varlen,
        sinks: Tensor | None,
    ) -> Tensor:
        """q: [T, N, H], k: [S, K, H], v: [S, K, Hv], sinks: [N] -> [T, N, Hv]."""

    def paged(
        self,
        needs: AttentionNeeds,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: Paged,
        sinks: Tensor | None,
    ) -> Tensor:
        """q: [T, N, H], caches: [num_blocks, block_size, K, H or Hv] -> [T, N, Hv]."""
