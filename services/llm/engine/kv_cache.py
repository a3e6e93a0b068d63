"""The tensors behind the block tables: keys and values of every layer, by layer group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mimo.errors import ConfigError
from services.llm.engine.block_manager import BlockGroup, least_blocks
from services.llm.model.config import LayerSpec

FULL, WINDOW = "full", "window"

MAX_LAG = 16  # rows that an MTP block may owe while it has nothing to guess


def group_of(spec: LayerSpec) -> str:
    """Sliding layers and MTP blocks share slots, tables and the moment of dropping a block."""
    return WINDOW if spec.sliding else FULL


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What decides the size of a KV cache. ``layers``: main layers and MTP blocks by index.

    A sliding layer sees ``swa_visible`` keys, the query's own included. With N draft tokens the
    last N rows of the MTP blocks are computed again once their tokens are certain, up to N rows lie
    ahead, and a block that has nothing to guess may lag by MAX_LAG rows, so the window group keeps
    2 N + MAX_LAG positions more.
    """

    layers: tuple[LayerSpec, ...]
    swa_visible: int
    num_draft_tokens: int
    block_size: int
    dtype: torch.dtype

    @property
    def retention(self) -> int:
        drafts = self.num_draft_tokens
        return self.swa_visible - 1 + (2 * drafts + MAX_LAG if drafts else 0)

    @property
    def reach(self) -> int:
        """Positions behind a cached prefix that must be there: a window, and N rows of drafts."""
        return self.swa_visible - 1 + self.num_draft_tokens

    def block_bytes(self, group: str) -> int:
        """Size of one block: keys and values of all layers of the group."""
        width = sum(
            spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
            for spec in self.layers
            if group_of(spec) == group
        )
        return width * self.block_size * self.dtype.itemsize

    def groups(
        self, kv_bytes: int, *, max_running: int, max_step_tokens: int, max_context: int
    ) -> tuple[BlockGroup, ...]:
        """Divide ``kv_bytes`` between the groups. Raises ConfigError when it is too little.

        The window group gets what ``max_running`` requests can use at most, though never more than
        half; the full group gets the rest, though never more than it can use.
        """
        full_bytes, window_bytes = self.block_bytes(FULL), self.block_bytes(WINDOW)
        num_window = 0
        if window_bytes:
            window = BlockGroup(WINDOW, 0, self.retention)
            least = least_blocks(window, self.block_size)
            useful = max_running * least_blocks(window, self.block_size, self.num_draft_tokens + 1)
            useful += -(-max_step_tokens // self.block_size)
            share = kv_bytes // 2 if full_bytes else kv_bytes
            num_window = max(min(useful, share // window_bytes), least)
        num_full = max_running * -(-max_context // self.block_size)
        if full_bytes:
            num_full = min(num_full, (kv_bytes - num_window * window_bytes) // full_bytes)
        if num_full < 1 or num_window * window_bytes > kv_bytes:
            raise ConfigError(
                f"--kv-memory-mib: {kv_bytes} bytes cannot hold one request; a block of "
                f"{self.block_size} tokens takes {full_bytes} bytes in full layers and "
                f"{window_bytes} in sliding ones"
            )
        groups = [BlockGroup(FULL, num_full)]
        if window_bytes:
            groups.append(BlockGroup(WINDOW, num_window, self.retention, self.reach))
        return tuple(groups)


class KVCache:
    """Keys and values of every layer. A *slot* is ``block * block_size + offset``."""

    def __init__(self, layout: KVLayout, groups: Sequence[BlockGroup], device: str) -> None:
        self.block_size = layout.block_size
        self._group_of = {spec.index: group_of(spec) for spec in layout.layers}
        num_blocks = {group.name: group.num_blocks for group in groups}
        self.groups = tuple(num_blocks)
        self._keys: dict[int, Tensor] = {}  # layer -> [num_blocks, block_size, K, H]
        self._values: dict[int, Tensor] = {}  # layer -> [num_blocks, block_size, K, Hv]
        for spec in layout.layers:
            shape = (spec.num_kv_heads, num_blocks[group_of(spec)], layout.block_size)
            # Zeros, because masked slots are still multiplied: 0 x NaN would be NaN. In memory the
            # heads come first: products are by head, and a gather then leaves nothing to reorder.
            for tensors, width in ((self._keys, spec.head_dim), (self._values, spec.v_head_dim)):
                by_head = torch.zeros((*shape, width), dtype=layout.dtype, device=device)
                tensors[spec.index] = by_head.permute(1, 2, 0, 3)
        self._rows = {  # layer -> [num_blocks * block_size, K, H] and [.., Hv]
            layer: (self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1))
            for layer in self._keys
        }

    @property
    def num_bytes(self) -> int:
        tensors = (*self._keys.values(), *self._values.values())
        return sum(math.prod(tensor.shape) * tensor.itemsize for tensor in tensors)

    def group_of(self, layer: int) -> str:
        return self._group_of[layer]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [num_blocks, block_size, K, H] and values [.., Hv] of a layer."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows. slots: [T], k: [T, K, H], v: [T, K, Hv]."""
        keys, values = self._rows[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def scrub(self, group: str, blocks: Sequence[int]) -> None:
        """Zero blocks that hold NaN, before anyone else gets them."""
        for layer, name in self._group_of.items():
            if name == group:
                self._keys[layer][list(blocks)] = 0
                self._values[layer][list(blocks)] = 0
