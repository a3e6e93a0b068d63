"""Ports of a local stack."""

import random
import socket

HOST = "127.0.0.1"

# Below what systems hand out to outgoing connections: a process may take many seconds to bind its
# port, and until then nobody must get it by chance.
_RANGE = (20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Ports that were free on loopback a moment ago; all different, and different every time."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(*_RANGE)
        if port not in ports and _is_free(port):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
