"""Which decoder has seen the beginning of a prompt before, and so has its keys and values.

The beginnings of a prompt are remembered at growing lengths, so that the next turn of a
conversation finds the replica that answered the last one, and different conversations behind one
system prompt may live on different replicas. It is a guess that saves work; a wrong one costs a
prefill.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

SHORTEST = 64  # tokens; prompts that differ earlier share nothing worth having
LONGEST = 1 << 20
STEPS_PER_OCTAVE = 4  # lengths grow by a quarter at most


def beginnings(token_ids: Sequence[int], salt: bytes) -> list[bytes]:
    """Digests of the beginnings of a prompt, shortest first. A short prompt is its own."""
    digest = hashlib.sha256(salt)
    digests: list[bytes] = []
    done = 0
    for length in _lengths(len(token_ids)):
        piece = token_ids[done:length]
        digest.update(struct.pack(f"<{len(piece)}I", *piece))
        digests.append(digest.digest())
        done = length
    return digests


class PrefixMemory:
    """The replica that was last given each beginning; the least recently used is forgotten."""

    def __init__(self, max_entries: int = 1 << 16) -> None:
        self._max_entries = max_entries
        self._addresses: OrderedDict[bytes, str] = OrderedDict()

    def find(self, digests: Sequence[bytes]) -> str | None:
        """Who knows the longest of these beginnings."""
        for digest in reversed(digests):
            if (address := self._addresses.get(digest)) is not None:
                return address
        return None

    def remember(self, digests: Sequence[bytes], address: str) -> None:
        for digest in digests:
            self._addresses[digest] = address
            self._addresses.move_to_end(digest)
        while len(self._addresses) > self._max_entries:
            self._addresses.popitem(last=False)


def _lengths(total: int) -> Iterator[int]:
    """64, 80, 96, 112, 128, 160, … up to ``total``, which stands alone when it is shorter."""
    if total < SHORTEST:
        yield total
        return
    octave = SHORTEST
    while octave <= LONGEST:
        for step in range(STEPS_PER_OCTAVE):
            length = octave + step * octave // STEPS_PER_OCTAVE
            if length > total:
                return
            yield length
        octave *= 2
