"""Ports of a local stack."""

import socket

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that were free on loopback a moment ago; all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
