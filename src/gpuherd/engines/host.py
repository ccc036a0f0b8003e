"""Cores and memory that this process may use, and where other processes find Python's modules."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gpuherd

# What this process may use of the machine: cores and memory, by its affinity and its control groups.
#
# A container or a batch system often grants less than the machine has, and numeric libraries look past that: they
# start a thread for each core of the machine, and the kernel ends a process that takes more memory than its group
# has.
#
# It knows /proc and the files of control groups, of version 2 and 1. It doesn't know jobs.

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")

# Version 1 says "no limit" by a huge number, rounded down to pages.
NO_LIMIT = 1 << 60


def cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """How many cores this process can keep busy, 1 or more: those it may run on, and no more than its quota of time."""
    allowed = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _folders("cpu", proc, groups) if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([allowed, *(math.ceil(quota) for quota in quotas)]))


def free_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Bytes that this process can still take without swapping or being killed, None where unknown.

    What the kernel can give back at once counts as free: its cache of files, on the machine and in the group.
    """
    free = _least(_group_free, "MemAvailable:", proc, groups)
    return None if free is None else max(0, free)


def memory_mb(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """MB (2^20 bytes) of main memory that this process could ever have, used or not; None where unknown."""
    limit = _least(_group_limit, "MemTotal:", proc, groups)
    return None if limit is None else limit >> 20


def _least(of_group: Callable[[Path], int | None], field: str, proc: Path, groups: Path) -> int | None:
    """The smallest number of bytes among those of the machine and of the groups around this process."""
    machine = _field(proc / "meminfo", field)
    amounts = [of_group(folder) for folder in _folders("memory", proc, groups)]
    amounts.append(None if machine is None else machine * 1024)
    return min((amount for amount in amounts if amount is not None), default=None)


def _folders(controller: str, proc: Path, groups: Path) -> Iterator[Path]:
    """The folder of the group that this process is in, and of each group around it, for one controller.

    In a container the path can be one of the host that is not there; then the topmost folder is the container's own.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, names, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        if not path or (names and controller not in names.split(",")):
            continue
        top = groups / names if names else groups
        if names and not top.is_dir():
            top = groups / controller
        inside = Path(path.lstrip("/"))
        if ".." in inside.parts:  # a group outside of this namespace
            inside = Path()
        yield from (top / part for part in (inside, *inside.parents))


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time that the group may take, None for any amount."""
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [*_text(folder / "cpu.cfs_quota_us").split(), *_text(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None  # "max", or -1 in version 1
    return int(words[0]) / int(words[1])


def _group_free(folder: Path) -> int | None:
    """Bytes left in the group, None where it has no limit."""
    for limit_file, used_file in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, used = _text(folder / limit_file).strip(), _text(folder / used_file).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:
            stat = folder / "memory.stat"
            cache = _field(stat, "total_inactive_file") or _field(stat, "inactive_file") or 0
            return int(limit) - int(used) + cache
    return None


def _group_limit(folder: Path) -> int | None:
    """Bytes that the group may have, None for any amount."""
    words = [_text(folder / name).strip() for name in ("memory.max", "memory.limit_in_bytes")]
    return min((int(word) for word in words if word.isdigit() and int(word) < NO_LIMIT), default=None)


def _field(path: Path, name: str) -> int | None:
    """The number after ``name`` in a file of lines "name number"."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


# ``PYTHONPATH`` for processes that start elsewhere than this one.

NAME = "PYTHONPATH"


def absolute(places: str) -> str:
    """The same places, whatever folder they are looked up from.

    >>> absolute("/opt/a:/opt/b/../c:")
    '/opt/a:/opt/c'
    """
    return os.pathsep.join(os.path.abspath(place) for place in places.split(os.pathsep) if place)  # noqa: PTH100


def finding_us(own: Mapping[str, str]) -> dict[str, str]:
    """This environment, in which Python finds this very gpuherd first."""
    places = [str(Path(gpuherd.__file__).parents[1]), *filter(None, [own.get(NAME)])]
    return {**own, NAME: os.pathsep.join(places)}
