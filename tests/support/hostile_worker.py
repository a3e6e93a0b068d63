"""A media worker that misbehaves on demand. The operation of a job names the behaviour."""

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from gateway.media import sandbox
from gateway.media.channel import HEADER, Kind, WorkerEnd


def look_around(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    """What a worker can see and do after entering the sandbox."""
    address = fields["parameters"]["listener"]
    try:
        socket.create_connection(tuple(address), timeout=5).close()
        connected = True
    except OSError:
        connected = False
    try:
        with open("written", "wb") as file:
            file.write(b"x")
        wrote = True
    except OSError:
        wrote = False
    report = {
        "environment": sorted(os.environ),
        "files": [name for name in os.listdir(".") if name != "written"],
        "connected": connected,
        "wrote": wrote,
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "source": source.decode(),
    }
    gateway.send_json(Kind.FACTS, report)


def sleep(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    signal.pause()


def spin(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    while True:
        pass


def die(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hoard(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    """More memory than the job may have."""
    try:
        bytearray(fields["memory_bytes"])
    except MemoryError:
        gateway.send_json(Kind.FACTS, {"refused": True})


def babble(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    """A message that claims to be enormous."""
    gateway._connection.sendall(HEADER.pack(Kind.DATA, 1 << 62))
    signal.pause()


def lie(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    """An error that is not the worker's to give."""
    failure = {"reason": "PERMISSION", "message": "x", "metadata": {}}
    gateway.send_json(Kind.FAILED, failure)
    signal.pause()


def stream(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    """Pieces without an end, until stopped; each says how many came before it."""
    count = 0
    while not gateway.is_stopped():
        gateway.send_data(count.to_bytes(8, "big") + bytes(100_000))
        count += 1


def echo(gateway: WorkerEnd, fields: dict[str, Any], source: bytes) -> None:
    gateway.send_json(Kind.FACTS, {"pid": os.getpid(), **fields["parameters"]})
    gateway.send_data(source)


BEHAVIOURS: dict[str, Callable[[WorkerEnd, dict[str, Any], bytes], None]] = {
    behaviour.__name__: behaviour
    for behaviour in (look_around, sleep, spin, die, hoard, babble, lie, stream, echo)
}


def main() -> None:
    gateway = WorkerEnd(socket.socket(fileno=int(sys.argv[1])))
    sandbox.enter()
    gateway.send_done()
    for fields, source in gateway.jobs():
        sandbox.limit_job(cpu_s=fields["cpu_s"], memory_bytes=fields["memory_bytes"])
        BEHAVIOURS[fields["operation"]](gateway, fields, source)
        gateway.send_done()


if __name__ == "__main__":
    main()
