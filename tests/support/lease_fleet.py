"""Encoder replicas in processes of their own: the real service and store, a tower that sleeps.

Many trials run side by side in one set of processes, so that a thousand of them take seconds.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo.encoder import EncodeService
from mimo.metrics import Metrics
from mimo.store import EmbeddingKey
from mimo.store.lease import LeaseTimes
from mimo.store.redis_store import RedisLimits, RedisStore
from mimo.tensor import RawTensor
from tests.support.encoding import FINGERPRINT, Upload, embedding_of, request_of

TOWER_S = 0.02
LEASE = LeaseTimes(ttl_s=3.0, renew_s=0.5, poll_s=0.25)
HANG_S = 100.0  # beyond every lease and every crowded machine


@dataclass(frozen=True, slots=True)
class Trial:
    """Clients of one replica that want the same key. Times are seconds, counted from the order."""

    key: EmbeddingKey
    num_clients: int
    start_s: float = 0.0
    num_doomed: int = 0  # further clients, who are cancelled
    cancel_s: float = 0.0


def payload_for(key: EmbeddingKey) -> RawTensor:
    return RawTensor("uint8", (32,), bytes.fromhex(key))


def embedding_for(key: EmbeddingKey) -> RawTensor:
    return embedding_of(payload_for(key))


class SleepingTower:
    """Notes every key in a file before it encodes it: what a killed replica began is known too."""

    def __init__(self, log: int) -> None:
        self._log = log

    def encode(self, items: Sequence[tuple[int, RawTensor]]) -> list[RawTensor]:
        os.write(self._log, b"".join(b"%s\n" % p.data.hex().encode() for _, p in items))
        time.sleep(TOWER_S)
        return [embedding_of(payload) for _, payload in items]


class Replica:
    """One process. ``order`` has it run trials; ``digests`` are the answers of their clients."""

    def __init__(self, redis_url: str, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_replica, args=(theirs, redis_url, log))
        self._process.start()
        theirs.close()
        assert self._pipe.poll(HANG_S)
        assert self._pipe.recv() == "ready without torch"

    def order(self, trials: Sequence[Trial], *, die_s: float | None = None) -> None:
        """``die_s``: after how long the process kills itself, at whatever point it is then."""
        self._pipe.send((trials, die_s))

    def digests(self) -> list[set[bytes]]:
        """The manifests each trial's clients were told of. Fails when somebody hangs."""
        assert self._pipe.poll(HANG_S), "a client hangs"
        answers: list[set[bytes]] = self._pipe.recv()
        return answers

    def await_death(self) -> None:
        self._process.join(HANG_S)
        assert self._process.exitcode == -signal.SIGKILL
        self._pipe.close()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()
        self._pipe.close()


def num_encodes(log: Path) -> Counter[str]:
    """How often each key was encoded, or begun to be."""
    return Counter(log.read_text().split())


def _run_replica(pipe: Any, redis_url: str, log: Path) -> None:
    asyncio.run(_serve(pipe, redis_url, log))


async def _serve(pipe: Any, redis_url: str, log: Path) -> None:
    metrics = Metrics("vision")
    store = RedisStore.from_url(redis_url, metrics, limits=RedisLimits(timeout_s=30.0))
    service: EncodeService[int] = EncodeService(
        store,
        SleepingTower(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)),
        metrics,
        encoder_fingerprint=FINGERPRINT,
        max_batch_cost=8.0,
        max_queued_cost=1000.0,
        min_ms_per_mib=0.0,
        lease_times=LEASE,
    )
    pipe.send("ready with torch" if "torch" in sys.modules else "ready without torch")
    loop = asyncio.get_running_loop()
    while (order := await loop.run_in_executor(None, pipe.recv)) is not None:
        trials, die_s = order
        if die_s is not None:
            threading.Timer(die_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        pipe.send(await asyncio.gather(*(_run_trial(service, trial) for trial in trials)))
    await service.aclose()
    await store.aclose()


async def _run_trial(service: EncodeService[int], trial: Trial) -> set[bytes]:
    await asyncio.sleep(trial.start_s)
    payload = payload_for(trial.key)

    def call() -> asyncio.Task[Any]:
        return asyncio.create_task(service.encode(request_of(trial.key, payload), Upload(payload)))

    doomed = [call() for _ in range(trial.num_doomed)]
    kept = [call() for _ in range(trial.num_clients)]
    if doomed:
        await asyncio.sleep(trial.cancel_s)
        for task in doomed:
            task.cancel()
        await asyncio.wait(doomed)
    return {answer.manifest_digest for answer in await asyncio.gather(*kept)}
