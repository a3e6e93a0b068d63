"""How the processes of a running system are: memory, open calls, blocks, leases, files."""

import contextlib
import os
from collections import Counter
from pathlib import Path

import redis

from mimo.store.layout import LEASES
from tests.support.live import Stack

MIB = 1 << 20
TEMPORARY = Path("/tmp")


def resident_mib(stack: Stack) -> dict[str, float]:
    """Resident memory of every process, by role and index."""
    found = {}
    for entry in stack.state["processes"]:
        for line in Path(f"/proc/{entry['pid']}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found[f"{entry['role']}-{entry['index']}"] = int(line.split()[1]) / 1024
    return found


def num_threads_and_files(stack: Stack) -> "Counter[str]":
    """Threads and open files of every process together."""
    count: Counter[str] = Counter()
    for entry in stack.state["processes"]:
        process = Path(f"/proc/{entry['pid']}")
        count["threads"] += len(list((process / "task").iterdir()))
        count["files"] += len(list((process / "fd").iterdir()))
    return count


def num_leases(stack: Stack) -> int:
    (server,) = stack.processes("redis")
    with contextlib.closing(redis.Redis.from_url(server["address"])) as client:
        return sum(1 for _ in client.scan_iter(LEASES, 1000))


def temporary_files(stack: Stack) -> list[str]:
    """What the system's processes keep below the directory for temporary files, logs aside."""
    home = Path(os.path.dirname(stack.state["store"].removeprefix("unix://")))
    kept = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".log"]
    media = [path for path in TEMPORARY.glob("mimo-media-*/**/*") if path.is_file()]
    return sorted(str(path) for path in (*kept, *media))


def open_work(stack: Stack) -> dict[str, float]:
    """Everything that must be 0 while nobody asks."""
    both = ("vision", "audio")
    return {
        "requests in the gateway": stack.total("gateway", "mimo_gateway_requests_in_flight"),
        "work held by the gateway": stack.total("gateway", "mimo_gateway_held_work"),
        "queued in encoders": sum(stack.total(r, "mimo_encoder_queued_work") for r in both),
        "running in encoders": sum(stack.total(r, "mimo_encoder_running_work") for r in both),
        "sequences in decoders": stack.total("llm", "mimo_llm_requests"),
        "blocks in use": stack.total("llm", "mimo_llm_kv_blocks", state="used"),
        "leases": float(num_leases(stack)),
    }
