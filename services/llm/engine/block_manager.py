"""Which block of the KV cache holds which tokens of which request. No torch, no I/O.

Layers that keep the same positions share a *group*, and with it one table per request. The full
group keeps everything; the window group (sliding layers and MTP blocks) gives a block back once
every position in it lies behind what any later query can see. Tables stay aligned with positions:
entry i covers tokens ``[i * block_size, (i + 1) * block_size)`` in every group, and a dropped entry
reads NO_BLOCK, so that a chain of block hashes can serve both groups.

Law: in each group, free + used == num_blocks, whatever happened before.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.llm.engine.request import Request

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """``retention``: how many positions behind the next one stay readable; None for all."""

    name: str
    num_blocks: int
    retention: int | None = None


def least_blocks(group: BlockGroup, block_size: int, chunk: int = 1) -> int:
    """Blocks a request may need in a group to run ``chunk`` tokens at any position in a window."""
    readable = (group.retention or 0) + chunk
    return -(-readable // block_size) + (group.retention is not None)  # +1: borders do not align


class BlockManager:
    """Raises ValueError for a group too small to ever run a request."""

    def __init__(self, groups: Sequence[BlockGroup], block_size: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        for group in groups:
            least = least_blocks(group, block_size)
            if group.num_blocks < least:
                raise ValueError(f"group {group.name} needs at least {least} blocks")
        self._free = {group.name: deque(range(group.num_blocks)) for group in groups}

    def num_free(self, group: str) -> int:
        return len(self._free[group])

    def num_used(self, group: str) -> int:
        return self._group(group).num_blocks - len(self._free[group])

    def can_admit(self, num_tokens: int) -> bool:
        """Whether a new request of ``num_tokens`` fits now: all of it, or one window of it."""
        for group in self.groups:
            demand = self._blocks(num_tokens)
            if group.retention is not None:
                demand = min(demand, least_blocks(group, self.block_size))
            if demand > len(self._free[group.name]):
                return False
        return True

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the largest request that can run alone."""
        return self.block_size * min(
            group.num_blocks for group in self.groups if group.retention is None
        )

    def num_coverable_tokens(self, request: Request) -> int:
        """Tokens of the request that its blocks and the free ones could hold."""
        return self.block_size * min(
            len(request.block_tables.get(group.name, ())) + len(self._free[group.name])
            for group in self.groups
        )

    def reserve(self, request: Request, num_tokens: int, *, only_full: bool = False) -> bool:
        """Grow the tables to hold ``num_tokens``. All groups or, when one is short, none."""
        groups = [group for group in self.groups if not only_full or group.retention is None]
        missing = {
            group.name: self._blocks(num_tokens) - len(request.block_tables.get(group.name, ()))
            for group in groups
        }
        if any(count > len(self._free[name]) for name, count in missing.items()):
            return False
        for name, count in missing.items():
            table = request.block_tables.setdefault(name, [])
            table.extend(self._free[name].popleft() for _ in range(count))
        return True

    def drop_behind(self, request: Request) -> None:
        """Give back the blocks that no query from ``num_cached_tokens`` on can see."""
        for group in self.groups:
            if group.retention is None:
                continue
            table = request.block_tables.get(group.name, [])
            first_visible = max(request.num_cached_tokens - group.retention, 0)
            for index in range(first_visible // self.block_size - 1, -1, -1):
                if table[index] == NO_BLOCK:  # everything before it is gone already
                    break
                self._free[group.name].append(table[index])
                table[index] = NO_BLOCK

    def release(self, request: Request) -> None:
        """Give all blocks of the request back."""
        for name, table in request.block_tables.items():
            self._free[name].extend(block for block in table if block != NO_BLOCK)
        request.block_tables.clear()

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _group(self, name: str) -> BlockGroup:
        return next(group for group in self.groups if group.name == name)
