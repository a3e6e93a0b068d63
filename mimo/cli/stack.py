"""The whole system as child processes of one supervisor: start, watch, restart, stop.

Addresses are fixed before anything starts, so that a restarted process comes back where its peers
look for it. The gateway learns its upstreams from files, as it would from a changing fleet.
"""

import asyncio
import contextlib
import http.client
import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mimo.cli.child import Child, ChildSpec, python_module
from mimo.cli.local_store import server_binary, server_command, wait_until_answering
from mimo.cli.ports import HOST, can_listen, free_ports
from mimo.errors import ConfigError, StartupError

LEAVES = ("vision", "audio", "llm")
ROLES = ("gateway", *LEAVES)
START_TIMEOUT_S = 300.0
STOP_GRACE_S = 35.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class StackConfig:
    """What to run. Port 0 means a free one; an empty ``store`` starts one."""

    model: Path
    replicas: Mapping[str, int]
    store: str = ""
    rest_port: int = 0
    grpc_port: int = 0
    ready_file: Path | None = None
    attention: str = ""
    dtype: str = ""
    threads: int = 0  # of each model service; 0 is its own choice


class Stack:
    """A running local system. Use ``async with Stack.running(config, report) as stack``."""

    def __init__(self, config: StackConfig, directory: Path, report: Report) -> None:
        self._config = config
        self._directory = directory
        self._report = report
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.store_url = config.store

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, config: StackConfig, report: Report) -> AsyncIterator["Stack"]:
        """Start everything, yield when it answers, stop everything; nothing is left behind.

        Raises StartupError with the failing process's own words.
        """
        _check(config)
        directory = Path(tempfile.mkdtemp(prefix="mimo-"))
        stack = cls(config, directory, report)
        try:
            await stack._start()
            yield stack
        finally:
            await stack._stop()
            shutil.rmtree(directory, ignore_errors=True)
            if config.ready_file is not None:
                config.ready_file.unlink(missing_ok=True)

    @property
    def children(self) -> Sequence[Child]:
        return self._children

    @property
    def rest_url(self) -> str:
        return self._first("gateway").rest

    @property
    def grpc_address(self) -> str:
        return self._first("gateway").address

    def ready_state(self) -> dict[str, object]:
        """What the ready file holds."""
        return {
            "rest": self.rest_url,
            "grpc": self.grpc_address,
            "store": self.store_url,
            "processes": [_process_entry(child) for child in self._children],
        }

    async def _start(self) -> None:
        if not self.store_url:
            await self._start_store()
        specs = self._plan()
        for role in LEAVES:
            targets = [spec.address for spec in specs if spec.role == role]
            self._targets_file(role).write_text(json.dumps(targets))
        try:
            async with asyncio.TaskGroup() as starting:
                for spec in specs:
                    starting.create_task(self._launch(spec))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for child in self._children:
            self._watchers.append(asyncio.create_task(self._watch(child)))
        self._write_ready_file()

    async def _start_store(self) -> None:
        began = time.monotonic()
        command, self.store_url = server_command(server_binary(), self._directory)
        child = Child(
            ChildSpec("redis", 0, command, self.store_url), self._directory / "redis-0.log"
        )
        await child.start()
        self._children.append(child)
        try:
            await wait_until_answering(self.store_url)
        except TimeoutError:
            raise StartupError(f"redis-0 does not answer: {_last_words(child)}") from None
        self._report(_progress(child.spec, time.monotonic() - began))

    def _plan(self) -> list[ChildSpec]:
        """Commands and addresses of every process."""
        config = self._config
        specs: list[ChildSpec] = []
        free = free_ports({config.rest_port, config.grpc_port})
        common = ["--model", str(config.model), "--store", self.store_url, "--log-format", "text"]
        tuning = [*(["--dtype", config.dtype] if config.dtype else [])]
        tuning += ["--attention", config.attention] if config.attention else []
        tuning += ["--threads", str(config.threads)] if config.threads else []
        for role in LEAVES:
            for index in range(config.replicas.get(role, 1)):
                address, ops, metrics = (f"{HOST}:{port}" for port in islice(free, 3))
                ports = ["--address", address, "--ops-address", ops, "--metrics-address", metrics]
                argv = python_module(f"services.{role}", *common, *ports, *tuning)
                specs.append(ChildSpec(role, index, argv, address, ops, metrics))
        upstreams = [
            word for role in LEAVES for word in (f"--{role}", f"file:{self._targets_file(role)}")
        ]
        for index in range(config.replicas.get("gateway", 1)):
            specs.append(self._gateway_spec(index, free, [*common, *upstreams]))
        return specs

    def _gateway_spec(self, index: int, free: Iterator[int], flags: Sequence[str]) -> ChildSpec:
        rest_port, grpc_port, ops_port, metrics_port = islice(free, 4)
        if index == 0:
            rest_port = self._config.rest_port or rest_port
            grpc_port = self._config.grpc_port or grpc_port
        address, rest = f"{HOST}:{grpc_port}", f"{HOST}:{rest_port}"
        ops, metrics = f"{HOST}:{ops_port}", f"{HOST}:{metrics_port}"
        argv = python_module(
            "gateway",
            *flags,
            *("--address", address),
            *("--rest-address", rest),
            *("--ops-address", ops),
            *("--metrics-address", metrics),
        )
        return ChildSpec("gateway", index, argv, address, ops, metrics, f"http://{rest}")

    async def _launch(self, spec: ChildSpec) -> None:
        began = time.monotonic()
        child = Child(spec, self._directory / f"{spec.name}.log")
        self._children.append(child)
        await child.start()
        await self._wait_ready(child)
        self._report(_progress(spec, time.monotonic() - began))

    async def _wait_ready(self, child: Child) -> None:
        """Returns once the process is ready and, for a gateway, sees a replica of each kind."""
        ready = asyncio.create_task(_until_ready(child.spec))
        died = asyncio.create_task(child.wait())
        try:
            done, _ = await asyncio.wait(
                {ready, died}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ready.cancel()
            died.cancel()
            await asyncio.gather(ready, died, return_exceptions=True)
        if ready in done and died not in done:
            return ready.result()
        words = _last_words(child)
        if died in done:
            raise StartupError(f"{child.spec.name} could not start: {words}")
        raise StartupError(f"{child.spec.name} was not ready in {START_TIMEOUT_S:.0f} s: {words}")

    async def _watch(self, child: Child) -> None:
        """Bring a process back whenever it ends, until the stack stops."""
        while True:
            status = await child.wait()
            if self._stopping:
                return
            self._report(f"{child.spec.name} ended with status {status}; starting it again")
            for line in child.tail:
                self._report(f"  {line}")
            await asyncio.sleep(child.restart_delay())
            try:
                await child.start()
                self._write_ready_file()
            except OSError as error:  # what did not start is still ended: again
                self._report(f"restart of {child.spec.name}: {error}")

    def _write_ready_file(self) -> None:
        if self._config.ready_file is None:
            return
        temporary = self._config.ready_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.ready_state()) + "\n")
        temporary.replace(self._config.ready_file)

    async def _stop(self) -> None:
        """Gateways first, so that they drain against living leaves; the store last."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for roles in (("gateway",), LEAVES, ("redis",)):
            group = [child for child in self._children if child.spec.role in roles]
            await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in group))

    def _targets_file(self, role: str) -> Path:
        return self._directory / f"{role}.json"

    def _first(self, role: str) -> ChildSpec:
        return next(child.spec for child in self._children if child.spec.role == role)


def _check(config: StackConfig) -> None:
    """What else would come out only once models are loaded. Raises ConfigError."""
    for flag, port in (("--rest-port", config.rest_port), ("--grpc-port", config.grpc_port)):
        if port and not can_listen(port):
            raise ConfigError(f"{flag}: port {port} is in use; give another one, or 0 for any")
    file = config.ready_file
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"--ready-file: {file} is in no directory")


def parse_replicas(text: str) -> dict[str, int]:
    """``gateway=1,vision=2`` as a dict. Raises ConfigError."""
    replicas = dict.fromkeys(ROLES, 1)
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        role, _, count = part.partition("=")
        if role not in replicas or not count.isdigit() or int(count) < 1:
            raise ConfigError(f"--replicas: {part!r} is not one of {', '.join(ROLES)}=N")
        replicas[role] = int(count)
    return replicas


async def _until_ready(spec: ChildSpec) -> None:
    async with grpc.aio.insecure_channel(spec.ops) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="readiness")
        while True:
            try:
                answer = await health.Check(request, wait_for_ready=True, timeout=5)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            except grpc.RpcError:
                pass
            await asyncio.sleep(0.05)
    while spec.role == "gateway" and not await asyncio.to_thread(_sees_every_upstream, spec):
        await asyncio.sleep(0.1)


def _sees_every_upstream(spec: ChildSpec) -> bool:
    try:
        with urllib.request.urlopen(f"http://{spec.metrics}/metrics", timeout=5) as response:
            text = response.read().decode()
    except (OSError, http.client.HTTPException):  # it may be dying
        return False
    lines = [line for line in text.splitlines() if line.startswith("mimo_gateway_upstream_end")]
    ready = {line for line in lines if 'state="ready"' in line and float(line.split()[-1]) > 0}
    return all(any(f'component="{role}"' in line for line in ready) for role in LEAVES)


def _progress(spec: ChildSpec, seconds: float) -> str:
    where = spec.rest or spec.address
    return f"{spec.name:<10} ready in {seconds:4.1f} s   {where}"


def _last_words(child: Child) -> str:
    """The line that most likely says what was wrong."""
    lines = [line for line in child.tail if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _process_entry(child: Child) -> dict[str, object]:
    spec = child.spec
    entry: dict[str, object] = {
        "role": spec.role,
        "index": spec.index,
        "pid": child.pid,
        "address": spec.address,
        "ops": spec.ops,
        "metrics": f"http://{spec.metrics}/metrics" if spec.metrics else "",
    }
    return {**entry, "rest": spec.rest} if spec.rest else entry
