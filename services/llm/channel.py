"""Messages between the ranks of a decoder: a length of four bytes, then that many."""

import contextlib
import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def send(channel: socket.socket, message: bytes) -> None:
    """Raises OSError when the other end is gone."""
    channel.sendall(_LENGTH.pack(len(message)) + message)


def messages(channel: socket.socket) -> Iterator[bytes]:
    """What the other end sends, until it closes or is killed."""
    with contextlib.suppress(ConnectionError), channel.makefile("rb") as stream:
        while header := stream.read(_LENGTH.size):
            (length,) = _LENGTH.unpack(header)
            yield stream.read(length)
