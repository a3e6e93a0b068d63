"""Which block of the KV cache holds which tokens of which request. No torch, no I/O.

Layers that keep the same positions share a *group*, and with it one table per request. The full
group keeps everything; the window group (sliding layers and MTP blocks) gives a block back once
every position in it lies behind what any later query can see. Tables stay aligned with positions:
entry i covers tokens ``[i * block_size, (i + 1) * block_size)`` in every group, and a dropped entry
reads NO_BLOCK, so that one chain of block hashes serves both groups.

A block is published under its hash once nothing will write to it again; a later request that begins
with the same tokens takes it over instead of computing it. It can start at a position when the full
group has every block before it and the window group has those that its first rows see.

Law: in each group, blank + cached + used == num_blocks, whatever happened before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.llm.engine.block_pool import BlockPool
from services.llm.engine.prefix import PrefixHasher
from services.llm.engine.request import Request

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """``retention``: how many positions behind the next one stay readable; None for all.

    ``reach``: how many of them a request needs that starts behind a cached prefix.
    """

    name: str
    num_blocks: int
    retention: int | None = None
    reach: int = 0


def least_blocks(group: BlockGroup, block_size: int, chunk: int = 1) -> int:
    """Blocks a request may need in a group to run ``chunk`` tokens at any position in a window."""
    readable = (group.retention or 0) + chunk
    return -(-readable // block_size) + (group.retention is not None)  # +1: borders do not align


class BlockManager:
    """``lookahead``: tokens behind a prefix that are always computed, besides the newest one.

    Raises ValueError for a group too small to ever run a request.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        block_size: int,
        *,
        lookahead: int = 0,
        identity: bytes = b"",
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        for group in groups:
            least = least_blocks(group, block_size)
            if group.num_blocks < least:
                raise ValueError(f"group {group.name} needs at least {least} blocks")
        self._pools = {group.name: BlockPool(group.num_blocks) for group in groups}
        self._lookahead = lookahead
        self._hasher = PrefixHasher(block_size, identity)

    def num_free(self, group: str) -> int:
        """Blocks that can be handed out, what is cached in some of them included."""
        return self._pools[group].num_free

    def num_cached(self, group: str) -> int:
        return self._pools[group].num_cached

    def num_used(self, group: str) -> int:
        return self._pools[group].num_used

    def is_findable(self, group: str, block: int) -> bool:
        """Whether another request may take the block over, so that nobody may write to it."""
        return self._pools[group].is_published(block)

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the largest request that can run alone."""
        return self.block_size * min(
            group.num_blocks for group in self.groups if group.retention is None
        )

    def num_coverable_tokens(self, request: Request) -> int:
        """Tokens of the request that its blocks and the free ones could hold."""
        return self.block_size * min(
            len(request.block_tables.get(group.name, ())) + self._pools[group.name].num_free
            for group in self.groups
        )

    # ── what a request holds ──

    def can_admit(self, request: Request, num_found: int) -> bool:
        """Whether a new request fits now, its next token included: all of it, or one window of it.

        ``num_found`` blocks are taken over; those that nobody uses count as free until then.
        """
        num_needed = self._blocks(request.num_tokens + 1)
        for group in self.groups:
            pool = self._pools[group.name]
            held = [b for b in self._found(request, group, num_found) if b != NO_BLOCK]
            demand = num_needed - num_found
            if group.retention is not None:
                demand = min(demand, max(least_blocks(group, self.block_size) - len(held), 1))
            demand += sum(not pool.is_used(block) for block in held)
            if demand > pool.num_free:
                return False
        return True

    def take_over(self, request: Request, num_found: int) -> None:
        """Begin a request's tables with blocks that :meth:`find` counted."""
        for group in self.groups:
            table = self._found(request, group, num_found)
            for block in table:
                if block != NO_BLOCK:
                    self._pools[group.name].share(block)
            request.block_tables[group.name] = table
        request.num_published_blocks = num_found
        request.num_cached_tokens = request.num_settled_tokens = num_found * self.block_size

    def reserve(self, request: Request, num_tokens: int, *, only_full: bool = False) -> bool:
        """Grow the tables to hold ``num_tokens``. All groups or, when one is short, none."""
        groups = [group for group in self.groups if not only_full or group.retention is None]
        missing = {
            group.name: self._blocks(num_tokens) - len(request.block_tables.get(group.name, ()))
            for group in groups
        }
        if any(count > self._pools[name].num_free for name, count in missing.items()):
            return False
        for name, count in missing.items():
            table = request.block_tables.setdefault(name, [])
            table.extend(self._pools[name].take() for _ in range(count))
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
                self._pools[group.name].give_back(table[index])
                table[index] = NO_BLOCK

    def release(self, request: Request) -> None:
        """Give all blocks of the request back, so that a prefix outlives what followed it."""
        for name, table in request.block_tables.items():
            for block in reversed(table):
                if block != NO_BLOCK:
                    self._pools[name].give_back(block)
        request.block_tables.clear()
        request.num_published_blocks = request.num_settled_tokens = 0

    def disown(self, request: Request) -> dict[str, list[int]]:
        """Make the request's blocks unfindable; returns, by group, those it holds alone."""
        alone: dict[str, list[int]] = {}
        for name, table in request.block_tables.items():
            pool = self._pools[name]
            held = [block for block in table if block != NO_BLOCK]
            for block in held:
                pool.forget(block)
            alone[name] = [block for block in held if not pool.is_shared(block)]
        return alone

    # ── what can be found ──

    def publish(self, request: Request) -> None:
        """Let others find the blocks of the request that will not be written again."""
        if not request.use_prefix_cache:
            return
        num_settled = request.num_settled_tokens // self.block_size
        if num_settled == request.num_published_blocks:
            return
        hashes = self._hasher.extend(request)
        for name, table in request.block_tables.items():
            for index in range(request.num_published_blocks, num_settled):
                if table[index] != NO_BLOCK:
                    self._pools[name].publish(table[index], hashes[index])
        request.num_published_blocks = num_settled

    def find(self, request: Request) -> int:
        """Blocks at the request's beginning that it need not compute."""
        if not request.use_prefix_cache:
            return 0
        hashes = self._hasher.extend(request)[: self.max_found(request)]
        count = 0
        for group in self.groups:
            if group.retention is None:
                pool = self._pools[group.name]
                known = (pool.find(content) is None for content in hashes)
                count = next((i for i, is_missing in enumerate(known) if is_missing), len(hashes))
                hashes = hashes[:count]
        while count and not self._is_readable(hashes, count):
            count -= 1
        return count

    def max_found(self, request: Request) -> int:
        """Blocks that may be taken over, so that enough tokens are left to compute."""
        return max(request.num_tokens - self._lookahead - 1, 0) // self.block_size

    def _is_readable(self, hashes: Sequence[bytes], count: int) -> bool:
        """Whether the groups that forget still hold what is seen from behind ``count`` blocks."""
        return all(
            self._pools[group.name].find(content) is not None
            for group in self.groups
            for content in hashes[self._first_needed(group, count) : count]
        )

    def _found(self, request: Request, group: BlockGroup, count: int) -> list[int]:
        """The group's table over ``count`` blocks that can be found."""
        first = self._first_needed(group, count)
        blocks = [self._pools[group.name].find(h) for h in request.block_hashes[first:count]]
        return [NO_BLOCK] * first + [block for block in blocks if block is not None]

    def _first_needed(self, group: BlockGroup, count: int) -> int:
        if group.retention is None:
            return 0
        return max(count * self.block_size - group.reach, 0) // self.block_size

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
