"""Ports of a local stack."""

import os
import socket
from collections.abc import Collection, Iterator

HOST = "127.0.0.1"

# Below what systems hand out to outgoing connections: a process may take many seconds to bind its
# port, and until then nobody must get it by chance.
_FIRST, _COUNT = 20_000, 12_000
_PER_PROCESS = 120


def free_ports(taken: Collection[int] = ()) -> Iterator[int]:
    """Ports that are free on loopback and none of ``taken``; all different, and more than anybody
    needs. Processes that ask at the same time begin in different places."""
    start = os.getpid() * _PER_PROCESS % _COUNT
    for offset in range(_COUNT):
        port = _FIRST + (start + offset) % _COUNT
        if port not in taken and _is_free(port):
            yield port


def can_listen(port: int) -> bool:
    """Whether a server may have this port, as it may soon after another one has left it."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
