"""Cores and memory as control groups grant them, read from folders like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuherd.engines.host import cores, free_memory, memory_mb

ALL = len(os.sched_getaffinity(0))
GB = 1 << 30


class Machine:
    """Stands in for /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        self.put("proc/self/cgroup", "0::/\n")
        self.root = root

    def put(self, path: str, text: str) -> None:
        target = self.proc.parent / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def cores(self) -> int:
        return cores(self.proc, self.groups)

    def free(self) -> int | None:
        return free_memory(self.proc, self.groups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_real_machine() -> None:
    assert 1 <= cores() <= ALL
    free = free_memory()
    assert free is not None
    assert free > 0


def test_no_limit(machine: Machine) -> None:
    machine.put("cgroup/cpu.max", "max 100000\n")
    machine.put("cgroup/memory.max", "max\n")
    machine.put("cgroup/memory.current", "5\n")
    assert machine.cores() == ALL
    assert machine.free() is None


@pytest.mark.parametrize(("quota", "expected"), [("50000 100000", 1), ("100000 100000", 1), ("99000000 100000", ALL)])
def test_quota_of_version_2(machine: Machine, quota: str, expected: int) -> None:
    machine.put("cgroup/cpu.max", quota)
    assert machine.cores() == expected


def test_the_narrowest_of_the_groups_around_counts(machine: Machine) -> None:
    machine.put("proc/self/cgroup", "0::/batch/job7\n")
    machine.put("cgroup/batch/cpu.max", "100000 100000")
    machine.put("cgroup/batch/job7/cpu.max", "max 100000")
    machine.put("cgroup/batch/memory.max", str(8 * GB))
    machine.put("cgroup/batch/memory.current", str(3 * GB))
    machine.put("cgroup/batch/memory.stat", f"anon 1\ninactive_file {GB}\nactive_file 7\n")
    machine.put("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {20 * GB // 1024} kB\n")
    assert machine.cores() == 1
    assert machine.free() == 6 * GB
    machine.put("proc/meminfo", f"MemAvailable: {2 * GB // 1024} kB\n")
    assert machine.free() == 2 * GB


def test_version_1(machine: Machine) -> None:
    machine.put("proc/self/cgroup", "4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n")
    machine.put("cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "100000\n")
    machine.put("cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n")
    machine.put("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.put("cgroup/memory/memory.usage_in_bytes", "1\n")
    machine.put("cgroup/memory/box/memory.limit_in_bytes", str(4 * GB))
    machine.put("cgroup/memory/box/memory.usage_in_bytes", str(5 * GB))
    assert machine.cores() == 1
    assert machine.free() == 0


def test_a_path_of_the_host_inside_a_container(machine: Machine) -> None:
    machine.put("proc/self/cgroup", "0::/../../other\nbroken line\n")
    machine.put("cgroup/cpu.max", "100000 100000")
    assert machine.cores() == 1


def test_nothing_to_read(tmp_path: Path) -> None:
    assert cores(tmp_path, tmp_path) == ALL
    assert free_memory(tmp_path, tmp_path) is None


def test_all_the_memory_that_could_ever_be_had(machine: Machine) -> None:
    """The machine's, or the least that a group around us is limited to; nothing where nothing says it."""
    assert memory_mb(machine.proc, machine.groups) is None
    machine.put("proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 1024 kB\n")
    assert memory_mb(machine.proc, machine.groups) == 32 << 10
    machine.put("proc/self/cgroup", "0::/job/step\n")
    machine.put("cgroup/job/memory.max", f"{8 * GB}\n")
    machine.put("cgroup/job/step/memory.max", "max\n")
    assert memory_mb(machine.proc, machine.groups) == 8 << 10
    machine.put("proc/self/cgroup", "5:memory:/old\n")
    machine.put("cgroup/memory/old/memory.limit_in_bytes", f"{4 * GB}\n")
    assert memory_mb(machine.proc, machine.groups) == 4 << 10
