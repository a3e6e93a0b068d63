"""The name of a block's content: a chain of hashes over everything that decided it.

A block's keys and values depend on all tokens up to its end, and at media positions on encoder rows
instead. So its hash covers the hash of the block before it, its token ids, and for every media row
which item it is from and which row of it. The chain starts at what separates whole caches: the
tenant's salt, the engine's identity (decoder, dtype, attention) and whether MTP rows were kept.
"""

import hashlib
from array import array

from services.llm.engine.request import Request


class PrefixHasher:
    """``identity`` names whatever else decides keys and values: weights, dtype, attention."""

    def __init__(self, block_size: int, identity: bytes = b"") -> None:
        self.block_size = block_size
        self._identity = identity

    def extend(self, request: Request) -> list[bytes]:
        """Bring ``request.block_hashes`` up to its tokens: one for every full block."""
        hashes = request.block_hashes
        parent = hashes[-1] if hashes else self._root(request)
        for index in range(len(hashes), request.num_tokens // self.block_size):
            parent = self._block(request, index, parent)
            hashes.append(parent)
        return hashes

    def _root(self, request: Request) -> bytes:
        kind = b"mtp" if request.max_draft_tokens else b"plain"
        return _digest(kind, request.cache_salt, self._identity)

    def _block(self, request: Request, index: int, parent: bytes) -> bytes:
        start = index * self.block_size
        stop = start + self.block_size
        fields = [parent, array("Q", request.token_ids[start:stop]).tobytes()]
        for span, first, last in request.spans_within(start, stop):
            row = span.row_offset + first - span.offset
            fields.append(array("Q", (first - start, last - first, row)).tobytes())
            fields.append(request.item_keys[span.item_index].encode())
        return _digest(*fields)


def _digest(*fields: bytes) -> bytes:
    """Of fields that cannot run into one another."""
    digest = hashlib.sha256()
    for data in fields:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
