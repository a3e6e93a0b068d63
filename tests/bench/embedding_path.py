"""Ways to get an embedding from one process to another, side by side.

    python -m tests.bench.embedding_path [--rounds 20] [--sizes 0.25,1,8,64] [--json FILE]

The sender and the receiver are processes of their own, a pair for each path and size, all with the
allocator settings of production. Every path moves the same float32 rows with their checksum, and
the receiver ends with one contiguous buffer whose checksum it has compared. Paths take turns, so
that a slow moment of the machine hits all of them; what counts are the ratios within a round.

    store     our Redis store: put by one side, its key told by a gRPC call, read by the other
    stream    our gRPC chunks of 1 MiB with a CRC-32C each, as embeddings travel without a store
    unary     one gRPC message that holds everything
    http      HTTP with the bytes as base64 in JSON
    zmq       one raw ZeroMQ frame (left out when pyzmq is not installed; ``pip install .[bench]``)

CPU is that of the sender, the receiver and the store's server together. Peaks of memory are what a
process grew by over its state before the first transfer. Then: calls of a few bytes beside
transfers of the largest size, what a hit costs, and from which cost of encoding on the store pays.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from redis import Redis

from mimo.cli.child import CHILD_ENVIRONMENT
from tests.bench import embedding_hits
from tests.bench.embedding_receiver import cpu_s, forget_peak, peak_mib, run_receiver
from tests.bench.embedding_sender import run_sender
from tests.support.redis import ValkeyProcess

SIZES_MIB = "0.25,1,8,64"
PATHS = ("store", "stream", "unary", "http", "zmq")
LARGE_MIB = 32.0  # from here on a quarter of the rounds will do
HIT_MIB = "8"
BESIDE_ROUNDS = 5
Results = dict[str, Any]


@dataclass
class Pair:
    """A sender and a receiver of one path at one size, and what was measured of them."""

    path: str
    sender: Any
    receiver: Any
    to_sender: Any
    pipe: Any
    checksum: int
    server_pid: int
    walls_s: list[float] = field(default_factory=list)
    cpus_s: list[float] = field(default_factory=list)
    held_mib: tuple[float, float] = (0.0, 0.0)

    @property
    def pids(self) -> tuple[int, int]:
        return self.sender.pid, self.receiver.pid

    def fetch(self) -> None:
        """One measured transfer."""
        pids = (*self.pids, self.server_pid)
        before = sum(map(cpu_s, pids))
        wall, checksum = self.ask("fetch")
        assert checksum == self.checksum
        self.walls_s.append(wall)
        self.cpus_s.append(sum(map(cpu_s, pids)) - before)

    def ask(self, order: str) -> Any:
        self.pipe.send(order)
        return self.pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", default=SIZES_MIB, help="MiB, by commas, ascending")
    parser.add_argument("--model", default="", help="whose towers the store is compared with")
    parser.add_argument("--json", type=Path, help="write every number here as well")
    options = parser.parse_args()
    os.environ.update(CHILD_ENVIRONMENT)  # the same allocator on every side, as in production
    has_zmq = importlib.util.find_spec("zmq") is not None
    paths = [path for path in PATHS if path != "zmq" or has_zmq]
    server = ValkeyProcess(options=("--maxmemory", "1gb"))
    server.start()
    try:
        bench = Bench(server, paths, options.rounds, has_zmq)
        _print_head(options.rounds)
        results = bench.run(options.sizes.split(","), options.model)
    finally:
        server.close()
    _print_rest(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


class Bench:
    def __init__(
        self, server: ValkeyProcess, paths: Sequence[str], rounds: int, has_zmq: bool
    ) -> None:
        # Children are forked from a process that has imported all, or each would take seconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([run_receiver.__module__, "uvicorn"])
        self._server = server
        self._paths = paths
        self._rounds = rounds
        self._has_zmq = has_zmq

    def run(self, sizes: Sequence[str], model: str) -> Results:
        load = os.getloadavg()[0]
        results: Results = {"load_average": load, "rounds": self._rounds, "sizes": {}}
        for size in sizes:
            with self._pairs(size) as pairs:
                rounds = self._rounds if float(size) < LARGE_MIB else self._rounds // 4
                results["sizes"][size] = self._measure(pairs, max(1, rounds))
                _print_rows(size, results["sizes"][size])
                if size == sizes[-1]:
                    results["small_p99_ms"] = self._small_calls(pairs)
        results["hit"] = self._alone(embedding_hits.run_hits, self._server.url, HIT_MIB, 50)
        results["encode_ms_per_mib"] = self._alone(embedding_hits.run_towers, model)
        return results

    def _measure(self, pairs: Sequence[Pair], rounds: int) -> Results:
        for pair in pairs:
            held = [forget_peak(pid) for pid in pair.pids]
            pair.held_mib = (held[0], held[1])
        for _ in range(rounds):
            for pair in pairs:
                pair.fetch()
                self._forget_entries()
        (unary,) = (pair for pair in pairs if pair.path == "unary")
        return {pair.path: _row(pair, unary) for pair in pairs}

    def _small_calls(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """p99 in milliseconds of a small call beside each path, and beside nothing."""
        seconds: dict[str, list[float]] = {pair.path: [] for pair in pairs}
        seconds["idle"] = []
        for _ in range(BESIDE_ROUNDS):
            for pair in pairs:
                seconds[pair.path] += pair.ask("beside")
                self._forget_entries()
            seconds["idle"] += pairs[0].ask("idle")
        return {path: 1e3 * float(np.percentile(each, 99)) for path, each in seconds.items()}

    def _forget_entries(self) -> None:
        """Every transfer is of a new entry; a full server would evict the one just written."""
        with contextlib.closing(Redis.from_url(self._server.url)) as client:
            client.flushall()

    @contextlib.contextmanager
    def _pairs(self, size: str) -> Iterator[list[Pair]]:
        pairs: list[Pair] = []
        try:
            for path in self._paths:
                pairs.append(self._pair(path, size))
            yield pairs
        finally:
            for pair in pairs:
                for pipe, process in (
                    (pair.pipe, pair.receiver),
                    (pair.to_sender, pair.sender),
                ):
                    with contextlib.suppress(OSError):  # it may have failed
                        pipe.send("stop")
                    process.join()

    def _pair(self, path: str, size: str) -> Pair:
        url = self._server.url
        sender, to_sender = self._start(run_sender, url, size, self._has_zmq)
        ports, checksum = to_sender.recv()
        receiver, pipe = self._start(run_receiver, ports, url, path, size)
        assert pipe.recv() == "ready"
        return Pair(path, sender, receiver, to_sender, pipe, checksum, self._server.pid)

    def _alone(self, target: Any, *arguments: Any) -> Any:
        """The answer of a process that does one thing."""
        process, pipe = self._start(target, *arguments)
        answer = pipe.recv()
        process.join()
        return answer

    def _start(self, target: Any, *arguments: Any) -> tuple[Any, Any]:
        """A process, and our end of the pipe that is its first argument."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments))
        process.start()
        theirs.close()  # so that we hear of its end
        return process, ours


def _row(pair: Pair, unary: Pair) -> Results:
    grown = [peak_mib(pid) - held for pid, held in zip(pair.pids, pair.held_mib, strict=True)]
    return {
        "wall_best_ms": 1e3 * min(pair.walls_s),
        "wall_p50_ms": 1e3 * statistics.median(pair.walls_s),
        "wall_p99_ms": 1e3 * float(np.percentile(pair.walls_s, 99)),
        "cpu_ms": 1e3 * statistics.median(pair.cpus_s),
        "sender_peak_mib": grown[0],
        "receiver_peak_mib": grown[1],
        "best_of_unary": min(pair.walls_s) / min(unary.walls_s),
        "wall_of_unary": _median_ratio(pair.walls_s, unary.walls_s),
        "cpu_of_unary": _median_ratio(pair.cpus_s, unary.cpus_s),
    }


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the two measurements of each round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _print_head(rounds: int) -> None:
    print(f"{rounds} rounds, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':>17} {'wall ms':^26} {'CPU':>8} {'of unary':^24} {'peak MiB':^17}")
    head = ("size", "path", "best", "p50", "p99", "ms", "best", "p50", "CPU", "sender", "receiver")
    print("{:>9} {:>7} {:>8} {:>8} {:>8} {:>8} {:>7} {:>8} {:>7} {:>8} {:>8}".format(*head))


def _print_rows(size: str, rows: Results) -> None:
    for path, row in rows.items():
        print(
            f"{size:>5} MiB {path:>7} {row['wall_best_ms']:>8.2f} {row['wall_p50_ms']:>8.2f} "
            f"{row['wall_p99_ms']:>8.1f} {row['cpu_ms']:>8.2f} {row['best_of_unary']:>7.2f} "
            f"{row['wall_of_unary']:>8.2f} {row['cpu_of_unary']:>7.2f} "
            f"{row['sender_peak_mib']:>8.1f} {row['receiver_peak_mib']:>8.1f}",
            flush=True,
        )


def _print_rest(results: Results) -> None:
    small = ", ".join(f"{path} {ms:.1f}" for path, ms in results["small_p99_ms"].items())
    print(f"small calls beside the largest transfer, p99 ms: {small}")
    for step, row in results["hit"].items():
        print(
            f"{step} of {HIT_MIB} MiB: p50 {row['wall_p50_ms']:.2f} ms, "
            f"p99 {row['wall_p99_ms']:.2f} ms, CPU {row['cpu_ms']:.2f} ms"
        )
    hit = results["hit"]
    read = (hit["find"]["wall_p50_ms"] + hit["get"]["wall_p50_ms"]) / float(HIT_MIB)
    print(f"a hit pays from {read:.2f} ms of encoding a MiB on")
    for tower, cost in results["encode_ms_per_mib"].items():
        print(f"{tower} tower: {cost:.0f} ms a MiB, {cost / read:.0f} times a hit")


if __name__ == "__main__":
    sys.exit(main())
