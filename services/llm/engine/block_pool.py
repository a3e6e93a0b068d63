"""The blocks of one layer group: who holds them, and what can still be found in them.

A block is *used* while requests hold it, *cached* when nobody does but its content can be found
again, and *blank* otherwise. Blank blocks are handed out first, then cached ones, the one let go
longest ago first; only then is its content forgotten.

Law: blank + cached + used == num_blocks, whatever happened before.
"""

from collections import deque


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = deque(range(num_blocks))
        self._cached: dict[int, None] = {}  # in the order in which they were let go
        self._holders: dict[int, int] = {}  # block -> how many requests hold it
        self._content: dict[int, bytes] = {}  # block -> hash of what is in it
        self._blocks: dict[bytes, int] = {}  # the other way round

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def take(self) -> int:
        """A free block to write to. Raises KeyError or IndexError when there is none."""
        if self._blank:
            block = self._blank.popleft()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            self.forget(block)
        self._holders[block] = 1
        return block

    def give_back(self, block: int) -> None:
        """One holder less."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        del self._holders[block]
        if block in self._content:
            self._cached[block] = None
        else:
            self._blank.append(block)

    def publish(self, block: int, content: bytes) -> None:
        """The block is complete and will not be written again. An equal one found before stays."""
        if content not in self._blocks and block not in self._content:
            self._content[block] = content
            self._blocks[content] = block

    def find(self, content: bytes) -> int | None:
        return self._blocks.get(content)

    def share(self, block: int) -> None:
        """One more holder of a block that was found."""
        self._cached.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def forget(self, block: int) -> None:
        """Nobody finds the block's content any more."""
        content = self._content.pop(block, None)
        if content is not None:
            del self._blocks[content]

    def is_used(self, block: int) -> bool:
        return block in self._holders

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def is_published(self, block: int) -> bool:
        return block in self._content
