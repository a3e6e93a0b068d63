"""The embeddings of running requests: where they come from, what they must be, how long they stay.

An item is read from the store under its content address, or arrives in chunks with the call. Its
rows stay in host memory until the request ends, because a preempted or resumed prefill and the MTP
blocks read them again.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from mimo.errors import EmbeddingMismatch, EmbeddingMissing, InvalidRequest, Overloaded, Reason
from mimo.nn.interop import to_torch
from mimo.store import EmbeddingKey, EmbeddingStore, Lookup, LookupStatus, Modality
from mimo.tensor import RawTensor, num_bytes
from services.llm.engine.request import Span


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One encoded piece of media. Its embedding is [num_rows, D]."""

    index: int
    modality: Modality
    key: EmbeddingKey
    dtype: str
    shape: tuple[int, ...]
    encoder_fingerprint: str

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


def check_placement(
    prompt_ids: Sequence[int],
    items: Sequence[MediaItem],
    spans: Sequence[Span],
    pad_ids: Mapping[Modality, int],
    hidden_size: int,
) -> None:
    """Raises InvalidRequest unless items and spans fit the prompt exactly.

    Spans are in order and do not overlap, every position of one holds its modality's pad id, and no
    pad stands outside. Every row of an image or video is used once; sound may be used in part,
    because the track of a video is cut to its frames.
    """
    for item in items:
        if len(item.shape) != 2 or item.shape[0] < 1 or item.shape[1] != hidden_size:
            raise InvalidRequest(
                f"an embedding is [rows, {hidden_size}], got {list(item.shape)}",
                field=f"items[{item.index}].embedding",
            )
    used: dict[int, list[tuple[int, int]]] = {item.index: [] for item in items}
    end = 0
    for number, span in enumerate(spans):
        where = f"spans[{number}]"
        if span.item_index not in used:
            raise InvalidRequest(f"there is no item {span.item_index}", field=where)
        item = items[span.item_index]
        if span.length < 1 or span.offset < end or span.end > len(prompt_ids):
            raise InvalidRequest("spans must be in order, apart and in the prompt", field=where)
        end = span.end
        if span.row_offset + span.length > item.shape[0]:
            raise InvalidRequest(f"item {item.index} has {item.shape[0]} rows", field=where)
        pad_id = pad_ids.get(item.modality)
        if any(token_id != pad_id for token_id in prompt_ids[span.offset : span.end]):
            raise InvalidRequest(f"a span of {item.modality} covers other tokens", field=where)
        used[item.index].append((span.row_offset, span.row_offset + span.length))
    for item in items:
        _check_rows(item, sorted(used[item.index]))
    pads = set(pad_ids.values())
    num_pads = sum(token_id in pads for token_id in prompt_ids)
    if num_pads != sum(span.length for span in spans):
        raise InvalidRequest("a media token stands outside every span", field="prompt_ids")


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows in memory: everybody's who reads the key, or an item's that one request was sent."""

    key: EmbeddingKey
    num_bytes: int
    owner: tuple["Hold", int] | None = None


class EmbeddingPool:
    """Embeddings of running requests, in host memory, at most ``max_bytes`` of them.

    Requests that read the same key at the same time share one read and one copy; what is sent to a
    request is its own.
    """

    def __init__(self, store: EmbeddingStore, *, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._holders: Counter[Copy] = Counter()
        self._reads: dict[EmbeddingKey, dict[bytes, asyncio.Task[Lookup]]] = {}  # by digest

    @contextlib.contextmanager
    def hold(self, items: Sequence[MediaItem]) -> Iterator["Hold"]:
        """Room for a request's items while the block runs. Raises Overloaded when there is none."""
        hold = Hold(self, items)
        self.exchange(set(), hold.copies)
        try:
            yield hold
        finally:
            self.exchange(hold.copies, set())

    def exchange(self, old: Set[Copy], new: Set[Copy]) -> None:
        """Make room for what a request holds now, instead of what it held. Raises Overloaded, and
        changes nothing, when there is none."""
        added = sum(copy.num_bytes for copy in new - old if not self._holders[copy])
        freed = [copy for copy in old - new if self._holders[copy] == 1]
        held_bytes = self._held_bytes + added - sum(copy.num_bytes for copy in freed)
        if added and held_bytes > self._max_bytes:
            is_hopeless = sum(copy.num_bytes for copy in new) > self._max_bytes
            raise Overloaded(
                f"the pool has no room for {added} bytes of embeddings",
                reason=Reason.CAPACITY if is_hopeless else Reason.OVERLOADED,
                retry_after_s=None if is_hopeless else 1.0,
            )
        self._held_bytes = held_bytes
        self._holders.update(new)
        self._holders.subtract(old)
        for copy in freed:
            del self._holders[copy]
            self._reads.pop(copy.key, None)

    async def fetch(self, item: MediaItem, manifest_digest: bytes) -> Tensor:
        """The rows of a stored item that is held. -> [num_rows, D].

        ``manifest_digest`` names the entry the caller saw; empty is any. Raises EmbeddingMissing
        when the store has none, EmbeddingMismatch when it has another than was announced.
        """
        reads = self._reads.setdefault(item.key, {})
        if manifest_digest not in reads:
            reads[manifest_digest] = asyncio.create_task(self._store.get(item.key))
        lookup = await asyncio.shield(reads[manifest_digest])
        if lookup.status is not LookupStatus.HIT or lookup.tensor is None:
            reads.pop(manifest_digest, None)
            raise EmbeddingMissing(
                f"the store has no complete entry for item {item.index}: {lookup.status}",
                item_index=item.index,
            )
        assert lookup.manifest is not None
        if manifest_digest not in (b"", lookup.manifest.digest):
            raise mismatch(item, "manifest", manifest_digest.hex(), lookup.manifest.digest.hex())
        found = lookup.manifest.encoder_fingerprint
        if item.encoder_fingerprint not in ("", found):
            raise mismatch(item, "encoder_fingerprint", item.encoder_fingerprint, found)
        return rows_of(item, lookup.tensor)


class Hold:
    """One request's items in the pool."""

    def __init__(self, pool: EmbeddingPool, items: Sequence[MediaItem]) -> None:
        self._pool = pool
        self._copies = {item.index: Copy(item.key, item.num_bytes) for item in items}

    @property
    def copies(self) -> Set[Copy]:
        return set(self._copies.values())

    def receive(self, item: MediaItem) -> None:
        """The item's rows are not read but sent to this request: it holds them alone.

        Raises Overloaded when there is no room for that.
        """
        copies = self._copies | {item.index: Copy(item.key, item.num_bytes, (self, item.index))}
        self._pool.exchange(self.copies, set(copies.values()))
        self._copies = copies


def rows_of(item: MediaItem, tensor: RawTensor) -> Tensor:
    """A tensor as the item's rows. Raises EmbeddingMismatch when it is not what was announced."""
    if tensor.shape != item.shape:
        raise mismatch(item, "shape", list(item.shape), list(tensor.shape))
    if tensor.dtype != item.dtype:
        raise mismatch(item, "dtype", item.dtype, tensor.dtype)
    return to_torch(tensor)


def mismatch(item: MediaItem, which: str, expected: object, found: object) -> EmbeddingMismatch:
    return EmbeddingMismatch(
        f"the {which} of item {item.index} is {found}, expected {expected}",
        item_index=item.index,
        which=which,
    )


def _check_rows(item: MediaItem, used: list[tuple[int, int]]) -> None:
    """``used``: row ranges in order."""
    where = f"items[{item.index}]"
    if not used:
        raise InvalidRequest("no span uses the item", field=where)
    if any(second[0] < first[1] for first, second in pairwise(used)):
        raise InvalidRequest("a row is used twice", field=where)
    num_used = sum(stop - start for start, stop in used)
    if item.modality is not Modality.AUDIO and num_used != item.shape[0]:
        raise InvalidRequest(f"{num_used} of {item.shape[0]} rows are used", field=where)
