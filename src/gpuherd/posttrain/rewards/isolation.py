"""How code is confined, and what of it is set up from outside: bubblewrap's namespaces, a control group for memory.

The control group counts memory that no limit of addresses does. Groups are created below this process's own group, or
next to it where it can have no children (in version 2 a group with processes delegates no memory): where systemd
delegated the group to the user, or for root in a container.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpuherd.errors import GpuherdError
from gpuherd.posttrain.rewards.syscall_filter import filter_program

# What code sees of /dev.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of version 2 and of version 1
_BESIDES = ("memory.swap.max", "memory.oom.group")
_GUARDS = 96 << 20  # bytes for the processes that guard a run
_left: list[Path] = []  # groups whose processes had not ended yet when they were to be removed


class Mode(StrEnum):
    """How code is confined, strongest first."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    NOTHING = "nothing"

    @property
    def isolates(self) -> bool:
        """True where code has namespaces of its own: root folder, processes, network."""
        return self in (Mode.BUBBLEWRAP, Mode.NAMESPACES)


@dataclass(frozen=True, slots=True)
class Protection:
    """The confinement that works on this machine.

    Attributes:
        mode: by what.
        filtered: system calls that only do harm are refused.
        why: what each stronger mode failed of.
    """

    mode: Mode
    filtered: bool
    why: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """In one line, for logs."""
        filtered = "a filter of system calls" if self.filtered else "no filter of system calls"
        what = {
            Mode.BUBBLEWRAP: "bubblewrap: namespaces of users, mounts, processes and network",
            Mode.NAMESPACES: "namespaces of users, mounts, processes and network",
            Mode.LANDLOCK: "Landlock (no file can be written)",
            Mode.NOTHING: "no protection but limits of time and memory",
        }[self.mode]
        reasons = f" ({'; '.join(self.why)})" if self.why else ""
        return f"code runs with {what} and {filtered}{reasons}"


@functools.cache
def filter_for(mode: Mode, children: bool = False) -> bytes | None:
    """The filter of system calls; None where they are not known on this machine."""
    return filter_program(os.uname().machine, children=children, namespaces=mode.isolates)


@functools.cache
def bubblewrap() -> tuple[str, ...]:
    """``bwrap`` with namespaces and a root folder: what the interpreter needs, a few devices, and an empty folder on
    which the one to work in is mounted. Raises GpuherdError where it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise GpuherdError("bwrap is not installed")
    root = os.geteuid() == 0
    words = [program, "--die-with-parent", "--new-session", "--as-pid-1", "--unshare-pid", "--unshare-net"]
    words += ["--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-add", "CAP_SYS_ADMIN"]
    words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    bound = [*readable(), *_DEVICES]
    above = {str(each) for path in bound for each in Path(path).parents if each != Path("/")}
    for path in sorted(above):  # otherwise made for root alone
        words += ["--dir", path]
    for path in readable():
        linked = Path(path).is_symlink()  # /lib, which leads to /usr/lib
        words += ["--symlink", str(Path(path).readlink()), path] if linked else ["--ro-bind", path, path]
    for path in _DEVICES:
        words += ["--dev-bind", path, path]
    return (*words, "--dir", "/sandbox", "--symlink", "/sandbox", "/tmp", "--remount-ro", "/")  # noqa: S108


@functools.cache
def interpreter() -> str:
    """The interpreter itself, not the link to it that a virtual environment has."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def readable() -> tuple[str, ...]:
    """The paths that the interpreter needs, none within another: its own files and the system's libraries."""
    own = [interpreter(), *(str(Path(sys.base_prefix) / name) for name in ("lib", "lib64"))]
    standard = [str(Path(os.__file__).parent)]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/nix/store"]
    there = [path for path in dict.fromkeys((*own, *standard, *system)) if Path(path).exists()]
    return tuple(path for path in there if not any(path != other and path.startswith(f"{other}/") for other in there))


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
