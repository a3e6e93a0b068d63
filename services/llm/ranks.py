"""The other ranks of a decoder that is spread over several processes, as rank 0 sees them.

Each is a child process at the end of a socket. Commands go down; a heartbeat comes up, from a
thread of its own, as soon as the rank is loaded. A rank that closes its end is dead, one that is
silent for :data:`SILENCE_S` is frozen. Either way all are killed: that also ends the meeting that
rank 0 may be waiting in.
"""

import contextlib
import logging
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from mimo.errors import StartupError
from services.llm import channel
from services.llm.model.parallel import GroupShard, RankLost

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
SILENCE_S = 3.0

_END_S = 1.0  # in which a process that closed its channel ends
_NOTICE_S = 2.0  # in which a dead rank is noticed after a pass failed because of it
_STOP_S = 5.0


@dataclass(slots=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    heard: float = 0.0  # when; 0 is not yet


class Ranks:
    """Ranks 1 to ``size`` - 1, started with these settings, each with a cache of ``cache_bytes``.

    ``shard`` is rank 0's own.
    """

    def __init__(
        self, size: int, settings: Mapping[str, Any], device: str, cache_bytes: int
    ) -> None:
        self.shard = GroupShard(0, size)
        self._on_lost: Callable[[str], object] | None = None
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._stopping = False
        self._directory = tempfile.TemporaryDirectory(prefix="mimo-ranks-")
        self._rendezvous = Path(self._directory.name) / "rendezvous"
        self._ranks = [_start(number) for number in range(1, size)]
        for rank in self._ranks:
            logger.info("rank started", extra={"rank": rank.number, "pid": rank.process.pid})
            setup = {
                "rank": rank.number,
                "size": size,
                "rendezvous": str(self._rendezvous),
                "settings": {**settings, "device": device_of(device, rank.number)},
                "cache_bytes": cache_bytes,
            }
            channel.send(rank.channel, msgpack.packb(setup))
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def wait_until_ready(self, device_type: str) -> None:
        """Wait until all have loaded their share, and meet them. Raises StartupError."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or all(rank.heard for rank in self._ranks))
            if self._lost:
                raise StartupError(self._lost)
        try:
            self.shard.join(self._rendezvous, device_type)
        except RankLost as error:
            raise StartupError(self.explain(error)) from error

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """Call ``on_lost`` with the reason, from a thread, when a rank dies or freezes, or at once
        if one has."""
        with self._changed:
            self._on_lost = on_lost
            if self._lost:
                on_lost(self._lost)

    def tell(self, command: bytes) -> None:
        """Give every rank its next command. Raises OSError for one that is gone."""
        for rank in self._ranks:
            channel.send(rank.channel, command)

    def explain(self, error: Exception) -> str:
        """Why a pass failed: what became of a rank, if anything did, else the error."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, _NOTICE_S)
            return self._lost or f"a pass over {self.shard.size} ranks failed: {error}"

    def stop(self) -> None:
        """Let them end, or end them; no process or file is left."""
        with self._changed:
            self._stopping = True
        for rank in self._ranks:
            _hang_up(rank.channel)
        self._watcher.join()
        for rank in self._ranks:
            try:
                rank.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.channel.close()
        self._directory.cleanup()

    # ── in the watcher's thread ──

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            while not self._stopping:
                # Taken before listening: should this process be held up, they are heard first.
                silent_since = time.monotonic() - SILENCE_S
                for key, _ in selector.select(HEARTBEAT_S):
                    if not self._hear(key.data):
                        return self._lose(key.data, _end_of(key.data.process))
                for rank in self._ranks:
                    if 0 < rank.heard < silent_since:
                        return self._lose(rank, f"was silent for {SILENCE_S:g} s")

    def _hear(self, rank: _Rank) -> bool:
        """Take in heartbeats. False when there will be no more."""
        try:
            beats = rank.channel.recv(4096)
        except ConnectionError:
            beats = b""
        with self._changed:
            if beats:
                rank.heard = time.monotonic()
                self._changed.notify_all()
        return bool(beats)

    def _lose(self, rank: _Rank, what: str) -> None:
        with self._changed:
            if self._stopping:
                return
            self._lost = f"rank {rank.number} of {self.shard.size} {what}"
            self._changed.notify_all()
            if self._on_lost is not None:
                self._on_lost(self._lost)
        logger.error(self._lost, extra={"pid": rank.process.pid})
        for other in self._ranks:
            other.process.kill()
        self.shard.abort()


def device_of(device: str, rank: int) -> str:
    """A rank's own GPU, counted from rank 0's; the CPU is everybody's."""
    kind, _, first = device.partition(":")
    return device if kind == "cpu" else f"{kind}:{int(first or 0) + rank}"


def _start(number: int) -> _Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.llm.follower", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for rank 0, which lets calls finish first
        )
    return _Rank(number, process, ours)


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # gone already
        end.shutdown(socket.SHUT_RDWR)


def _end_of(process: "subprocess.Popen[bytes]") -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may take its time to end by itself
        if (status := process.wait(_END_S)) < 0:
            return f"was killed by {signal.Signals(-status).name}"
    return "ended; the log says why"
