"""The pipe between the gateway and a media worker.

The gateway writes one job: a JSON header and the file. The worker answers with messages until DONE
or FAILED. Nothing is pickled: a worker that was taken over must not reach its parent that way.
Sizes are checked before they are believed.
"""

import json
import select
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from mimo.tensor import Buffer

HEADER = struct.Struct("<BQ")  # kind, payload bytes
STOP = b"\0"  # the gateway wants no more of this job

MAX_JSON_BYTES = 1 << 20
MAX_DATA_BYTES = 1 << 30


class Kind(IntEnum):
    JOB = 1  # JSON: what to do; SOURCE follows
    SOURCE = 2  # the file
    FACTS = 3  # JSON: a report
    DATA = 4  # pixels or samples
    DONE = 5  # empty: the job succeeded
    FAILED = 6  # JSON: the error

    @property
    def max_bytes(self) -> int:
        return MAX_DATA_BYTES if self in (Kind.SOURCE, Kind.DATA) else MAX_JSON_BYTES


def encode_json(kind: Kind, fields: dict[str, Any]) -> bytes:
    payload = json.dumps(fields).encode()
    return HEADER.pack(kind, len(payload)) + payload


def decode_header(header: Buffer) -> tuple[Kind, int]:
    """Raises ValueError for a kind or size that no honest peer sends."""
    number, size = HEADER.unpack(header)
    kind = Kind(number)
    if size > kind.max_bytes:
        raise ValueError(f"{kind.name} of {size} bytes")
    return kind, size


class WorkerEnd:
    """The worker's side: blocking, one job at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def jobs(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Jobs with their files, until the gateway hangs up."""
        while (job := self._receive(Kind.JOB)) is not None:
            received = self._receive(Kind.SOURCE)
            if received is None:
                return
            source, received = bytes(received), None  # one copy, not two, while the job runs
            yield json.loads(job), source

    def send_json(self, kind: Kind, fields: dict[str, Any]) -> None:
        self._connection.sendall(encode_json(kind, fields))

    def send_data(self, data: Buffer) -> None:
        """Blocks while the gateway is slow: that is the back-pressure."""
        view = memoryview(data).cast("B")
        self._connection.sendall(HEADER.pack(Kind.DATA, view.nbytes))
        self._connection.sendall(view)

    def send_done(self) -> None:
        self._connection.sendall(HEADER.pack(Kind.DONE, 0))

    def is_stopped(self) -> bool:
        """Whether the gateway has said STOP, which this consumes."""
        readable, _, _ = select.select([self._connection], [], [], 0)
        return bool(readable) and self._connection.recv(1) == STOP

    def _receive(self, expected: Kind) -> bytearray | None:
        header = self._read(HEADER.size)
        # A STOP that crossed the end of the previous job stands before the next header.
        while header is not None and header[:1] == STOP:
            more = self._read(1)
            header = None if more is None else header[1:] + more
        if header is None:
            return None
        kind, size = decode_header(header)
        if kind is not expected:
            raise ValueError(f"expected {expected.name}, got {kind.name}")
        return self._read(size)

    def _read(self, size: int) -> bytearray | None:
        """Exactly ``size`` bytes; None when the gateway has hung up."""
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            count = self._connection.recv_into(view)
            if count == 0:
                return None
            view = view[count:]
        return buffer
