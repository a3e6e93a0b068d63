"""Tensors between processes: raw little-endian bytes with a dtype and a shape, cut into chunks.

NumPy has no bfloat16 and the gateway has no torch, so a tensor on the move is bytes plus two facts.
Chunks carry a CRC-32C each, so that damage is found where it happened and memory stays bounded by
one tensor plus one chunk.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np

from mimo.errors import InvalidRequest, Reason

ITEM_SIZES = {
    "uint8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
}

MAX_CHUNK_BYTES = 1 << 20

Buffer = bytes | bytearray | memoryview


def crc32c(data: Buffer) -> int:
    """CRC-32C (Castagnoli) of the bytes, as an unsigned 32-bit number."""
    # The library takes bytes alone. Copying costs little: what was just copied is in the cache, and
    # the checksum of what is not takes three times as long.
    return int(google_crc32c.value(data if isinstance(data, bytes) else bytes(data)))


def new_buffer(size: int) -> memoryview:
    """Writable bytes with any content: zeroing what is overwritten anyway costs as much again."""
    return np.empty(size, np.uint8).data


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a dense tensor. Raises InvalidRequest for an unknown dtype or a bad shape."""
    if dtype not in ITEM_SIZES:
        raise InvalidRequest(f"unknown tensor dtype {dtype!r}", reason=Reason.INVALID_VALUE)
    if any(size < 0 for size in shape):
        raise InvalidRequest(f"negative dimension in tensor shape {list(shape)}")
    return math.prod(shape) * ITEM_SIZES[dtype]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A dense row-major tensor as bytes. The view is shared, never copied: read-only by custom."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Buffer) -> None:
        view = memoryview(data).cast("B")
        expected = num_bytes(dtype, shape)
        if view.nbytes != expected:
            raise InvalidRequest(
                f"tensor {dtype}{list(shape)} needs {expected} bytes, got {view.nbytes}"
            )
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "data", view)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the leading dimension."""
        return num_bytes(self.dtype, self.shape[1:])

    def rows(self, start: int, stop: int) -> "RawTensor":
        """Rows ``start:stop`` of the leading dimension, without a copy."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"rows {start}:{stop} of {self.shape[0]}")
        width = self.row_bytes
        return RawTensor(
            self.dtype, (stop - start, *self.shape[1:]), self.data[start * width : stop * width]
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous piece of a tensor's bytes. ``offset`` counts bytes from the tensor's start."""

    index: int
    offset: int
    data: memoryview | bytes
    crc32c: int
    last: bool


def split(tensor: RawTensor, chunk_bytes: int = MAX_CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut a tensor into chunks of at most ``chunk_bytes``; an empty one gives an empty chunk."""
    total = tensor.num_bytes
    for index, offset in enumerate(range(0, max(total, 1), chunk_bytes)):
        data = tensor.data[offset : offset + chunk_bytes]
        yield Chunk(index, offset, data, crc32c(data), last=offset + chunk_bytes >= total)


class Assembler:
    """Puts a chunked tensor together again, refusing gaps, overlaps and damaged chunks.

    ``max_bytes`` bounds what a header may announce before anything is allocated.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], *, max_bytes: int = 1 << 34) -> None:
        self._dtype, self._shape = dtype, shape
        size = num_bytes(dtype, shape)
        if size > max_bytes:
            raise InvalidRequest(
                f"tensor {dtype}{list(shape)} is {size} bytes; the limit is {max_bytes}",
                reason=Reason.REQUEST_TOO_LARGE,
                limit=max_bytes,
            )
        self._buffer = new_buffer(size)
        self._received = 0
        self._next_index = 0
        self._complete = False

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises InvalidRequest when it is out of order or damaged."""
        end = chunk.offset + len(chunk.data)
        if self._complete or chunk.index != self._next_index or chunk.offset != self._received:
            raise InvalidRequest(f"chunk {chunk.index} at byte {chunk.offset} is out of order")
        if end > len(self._buffer):
            raise InvalidRequest(
                f"chunk {chunk.index} runs past the tensor's {len(self._buffer)} bytes"
            )
        if crc32c(chunk.data) != chunk.crc32c:
            raise InvalidRequest(f"chunk {chunk.index} is damaged: its CRC-32C differs")
        self._buffer[chunk.offset : end] = chunk.data
        self._received = end
        self._next_index += 1
        self._complete = chunk.last

    @property
    def is_complete(self) -> bool:
        return self._complete

    def finish(self) -> RawTensor:
        """The whole tensor. Raises InvalidRequest when chunks are missing."""
        if not self._complete or self._received != len(self._buffer):
            raise InvalidRequest(
                f"tensor ended after {self._received} of {len(self._buffer)} bytes"
            )
        return RawTensor(self._dtype, self._shape, self._buffer)
