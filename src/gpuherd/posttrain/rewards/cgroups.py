"""A control group for a run, where this process may make one: it counts memory that no limit of addresses does.

Groups are created below this process's own group, or next to it where it can have no children (in version 2 a group
with processes delegates no memory): where systemd delegated the group to the user, or for root in a container.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of version 2 and of version 1
_BESIDES = ("memory.swap.max", "memory.oom.group")
_GUARDS = 96 << 20  # bytes for the processes that guard a run
_left: list[Path] = []  # groups whose processes had not ended yet when they were to be removed


@contextmanager
def memory_group(name: str, memory: int) -> Iterator[str | None]:
    """The ``cgroup.procs`` file of a group with this memory limit, in bytes; a process whose id is written to it joins
    the group. None where no group can be created."""
    _remove_left()
    group = _create(name, memory)
    try:
        yield None if group is None else str(group / "cgroup.procs")
    finally:
        if group is not None:
            _left.append(group)
            _remove_left()


def _create(name: str, memory: int) -> Path | None:
    base = _base()
    if base is None:
        return None
    group = base / f"gpuherd-{name}"
    try:
        group.mkdir()
        limit = next(group / each for each in _LIMITS if (group / each).exists())
        limit.write_text(str(memory + _GUARDS))
    except (OSError, StopIteration):
        with suppress(OSError):
            group.rmdir()
        return None
    for each, value in zip(_BESIDES, ("0", "1"), strict=True):
        with suppress(OSError):  # a kernel without swap accounting
            (group / each).write_text(value)
    return group


def _remove_left() -> None:
    for group in list(_left):
        with suppress(OSError):  # busy: the next run tries again
            group.rmdir()
        if not group.exists():
            _left.remove(group)


@functools.cache
def _base() -> Path | None:
    """Where a group with a limit of memory can be made, tried once a process."""
    for place in places(Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")):
        group = place / f"gpuherd-try-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                if any((group / each).exists() for each in _LIMITS):
                    return place
            finally:
                group.rmdir()
    return None


def places(own: Path, mounts: Path) -> list[Path]:
    """The folders in which a group of this process may lie: of version 2 its own and the one above, of version 1 its
    own. Empty elsewhere than on Linux."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
        mounted = [line.split(" - ") for line in mounts.read_text().splitlines()]
    except OSError:
        return []
    found: list[Path] = []
    for _, controllers, path in groups:
        for before, after in mounted:
            root, mount = before.split()[3:5]
            kind, options = after.split()[0], after.split()[-1].split(",")
            ours = kind == "cgroup2" if not controllers else kind == "cgroup" and controllers in options
            if not ours or "memory" not in (controllers or "memory").split(",") or not path.startswith(root):
                continue
            place = Path(mount) / path.removeprefix(root).lstrip("/")
            found += [place] if controllers or place == Path(mount) else [place, place.parent]
    return found
