"""What fits: weights first, then the KV cache, decided before anything is allocated."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from mimo.checkpoint.index import TensorInfo
from mimo.errors import CheckpointError, ConfigError

MIB = 1 << 20
GIB = 1 << 30

# Of what is left beside the weights: a GPU is ours alone, a host is shared with everything else.
_CACHE_SHARE = {"cuda": 0.85, "cpu": 0.25}
_CACHE_LIMIT = {"cuda": None, "cpu": GIB}

_CGROUP = Path("/sys/fs/cgroup")
# Limit, use and statistics of a control group of version 2 and 1, and the prefix of what counts in
# the statistics.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", ""),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_",
    ),
)


def available_bytes(device: str, cgroup: Path = _CGROUP) -> int:
    """Memory that can be allocated on a device now, within the container's limit."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):  # counts caches that the kernel would give back
            free = int(line.split()[1]) * 1024
    return min([free, *_container_rooms(cgroup)])


def weight_bytes(tensors: Iterable[TensorInfo], dtype: torch.dtype) -> int:
    """Size of a checkpoint's tensors once they are cast to ``dtype``."""
    return sum(torch.Size(tensor.shape).numel() * dtype.itemsize for tensor in tensors)


def kv_bytes(device: str, weights: int, available: int, wanted_mib: int) -> int:
    """Bytes for the KV cache; ``wanted_mib`` 0 takes a share of what the weights leave.

    Raises CheckpointError when not even the weights fit, ConfigError when the cache asked for does
    not fit beside them.
    """
    left = available - weights
    if left <= 0:
        raise CheckpointError(
            f"the model needs {weights / GIB:.1f} GiB for its weights, but {device} has "
            f"{available / GIB:.1f} GiB free; use a larger device or a smaller --dtype"
        )
    if wanted_mib:
        if wanted_mib * MIB > left:
            raise ConfigError(
                f"--kv-memory-mib {wanted_mib}: beside the weights ({weights // MIB} MiB) "
                f"{device} has {left // MIB} MiB free"
            )
        return wanted_mib * MIB
    kind = device.partition(":")[0]
    share = int(left * _CACHE_SHARE[kind])
    limit = _CACHE_LIMIT[kind]
    return share if limit is None else min(share, limit)


def _container_rooms(cgroup: Path) -> Iterator[int]:
    """What the limit of a control group leaves, beside all that lives in the group now."""
    for limit, use, stat, prefix in _CGROUP_FILES:
        if not (cgroup / limit).is_file():
            continue
        most = (cgroup / limit).read_text().strip()
        if most.isdigit():
            counts = dict(line.split() for line in (cgroup / stat).read_text().splitlines())
            caches = sum(int(counts[f"{prefix}{name}_file"]) for name in ("active", "inactive"))
            yield int(most) - int((cgroup / use).read_text()) + caches
