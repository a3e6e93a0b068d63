"""What a control group leaves of the host's memory."""

from pathlib import Path

import pytest

from services.llm.memory import MIB, available_bytes

STAT = "anon {anon}\n{prefix}active_file {active}\n{prefix}inactive_file {inactive}\n"


def write(cgroup: Path, version: int, limit: str) -> Path:
    """A group that uses 10 MiB, 3 of them for files that are read again from disk when needed."""
    directory = cgroup if version == 2 else cgroup / "memory"
    directory.mkdir(exist_ok=True)
    names = {
        2: ("memory.max", "memory.current", ""),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }
    limit_name, used_name, prefix = names[version]
    (directory / limit_name).write_text(f"{limit}\n")
    (directory / used_name).write_text(f"{10 * MIB}\n")
    stat = STAT.format(anon=7 * MIB, prefix=prefix, active=MIB, inactive=2 * MIB)
    (directory / "memory.stat").write_text(stat)
    return cgroup


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_container_uses_is_not_available(tmp_path: Path, version: int) -> None:
    cgroup = write(tmp_path, version, f"{12 * MIB}")
    assert available_bytes("cpu", cgroup) == 5 * MIB


@pytest.mark.parametrize("version, limit", [(1, "9223372036854771712"), (2, "max")])
def test_a_group_without_a_limit_has_what_the_host_has(
    tmp_path: Path, version: int, limit: str
) -> None:
    cgroup = write(tmp_path, version, limit)
    assert 12 * MIB < available_bytes("cpu", cgroup) < 1 << 50


def test_a_host_without_control_groups_has_its_own_memory(tmp_path: Path) -> None:
    assert 0 < available_bytes("cpu", tmp_path) < 1 << 50
