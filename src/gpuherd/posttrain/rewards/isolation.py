"""How code is confined, and what of it is set up from outside: bubblewrap's namespaces, a control group for memory, the
seccomp filter of system calls as a BPF program.

The control group counts memory that no limit of addresses does. Groups are created below this process's own group, or
next to it where it can have no children (in version 2 a group with processes delegates no memory): where systemd
delegated the group to the user, or for root in a container.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpuherd.errors import GpuherdError

# What code sees of /dev.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of version 2 and of version 1
_BESIDES = ("memory.swap.max", "memory.oom.group")
_GUARDS = 96 << 20  # bytes for the processes that guard a run
_left: set[Path] = set()  # groups whose processes had not ended yet when they were to be removed; of all threads


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
            _left.add(group)
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
            _left.discard(group)  # another thread may have removed it too


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


# ---- which system calls are refused ----------------------------------------------------------------------------------
#
# A call that is refused fails with EPERM, so that Python raises PermissionError; ``clone3`` fails with ENOSYS, so that
# the C library takes ``clone``, whose flags a filter can read. Calls of another architecture end the process.

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # of struct seccomp_data
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # CLONE_NEWNS, CLONE_NEWUSER and so on

_ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMNS = {"x86_64": 0, "aarch64": 1}


def _calls(table: str) -> Mapping[str, tuple[int | None, int | None]]:
    """The calls of a table by name, with their numbers on x86_64 and on aarch64, None where one is not there."""
    lines = [line for line in table.splitlines() if not line.lstrip().startswith("#")]
    entries = (entry.split() for entry in ",".join(lines).split(",") if entry.strip())
    return {name: (_number(first), _number(second)) for name, first, second in entries}


def _number(word: str) -> int | None:
    return None if word == "-" else int(word)


# Calls from 424 on have one number everywhere.
_NO_NETWORK = _calls("socket 41 198")
_NEVER = _calls(
    """
    # other processes, and their memory
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, process_madvise 440 440
    pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424
    # mounts and namespaces
    mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429
    fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, statmount 457 457
    listmount 458 458, open_tree_attr 467 467, unshare 272 97, setns 308 268
    # memory that no limit counts: pages of a pipe stay when their addresses are given back
    memfd_create 319 279, memfd_secret 447 447, vmsplice 278 75, splice 275 76, tee 276 77
    # System V objects and message queues: found by number, and without a namespace those of all the user's programs
    shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192
    msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181
    # keys, tracing, and requests of which the whole machine has so many
    add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282
    io_setup 206 0, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, fanotify_init 300 262
    name_to_handle_at 303 264, open_by_handle_at 304 265
    # the machine itself
    init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294
    reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60, syslog 103 116
    personality 135 92, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266
    sethostname 170 161, setdomainname 171 162, iopl 172 -, ioperm 173 -, modify_ldt 154 -, vhangup 153 58
    # priorities and places of processes
    setpriority 141 140, sched_setparam 142 118, sched_setscheduler 144 119, sched_setaffinity 203 122
    sched_setattr 314 274, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239
    """
)
# What namespaces of processes and mounts make harmless, and nothing else does.
_WITHOUT_NAMESPACES = _calls(
    """
    # signals and groups of processes, so that all stay in the group that is killed in the end
    kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, setsid 112 157
    setpgid 109 154
    # owners, permissions, times and attributes of files, and names of those that come and go: not Landlock's business
    truncate 76 45, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55
    lchown 94 -, fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463
    removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466, file_setattr 469 469
    inotify_init 253 -, inotify_init1 294 26, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88
    """
)
# The same by an argument: its place, and the values that are refused. Whose input is announced by a signal of one's
# choice (F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP) can be anybody; and who does not end with the one that started
# him (PR_SET_PDEATHSIG) is left behind.
_ARGUMENTS: Mapping[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    "fcntl": ((72, 25), 1, (8, 15)),
    "ioctl": ((16, 29), 1, (0x8901, 0x8902)),
    "prctl": ((157, 167), 0, (1, 41)),
}
_ALWAYS = {"prctl": ((157, 167), 0, (41,))}  # PR_SET_THP_DISABLE
_FORKS = _calls("fork 57 -, vfork 58 -")
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRLIMIT = {"x86_64": 302, "aarch64": 261}


def filter_program(machine: str, *, children: bool, namespaces: bool) -> bytes | None:
    """The filter as an array of ``struct sock_filter``; None for a machine whose system calls are not listed here.

    Args:
        machine: as ``os.uname().machine`` has it.
        children: processes may be made; threads always may.
        namespaces: the code has its own namespaces of processes and mounts.
    """
    if machine not in _ARCHITECTURES:
        return None
    return b"".join(struct.pack("=HBBI", *each) for each in _instructions(machine, children, namespaces))


def _instructions(machine: str, children: bool, namespaces: bool) -> Iterator[tuple[int, int, int, int]]:
    """Instructions as (code, jump if true, jump if false, constant)."""
    column = _COLUMNS[machine]
    yield (_LOAD, 0, 0, _ARCH_AT)
    yield (_EQUAL, 1, 0, _ARCHITECTURES[machine])
    yield (_RETURN, 0, 0, _KILL)
    yield (_LOAD, 0, 0, _NUMBER_AT)
    if machine == "x86_64":
        yield (_AT_LEAST, 0, 1, _X32)
        yield (_RETURN, 0, 0, _KILL)
    denied = {**_NEVER, **_NO_NETWORK, **({} if children else _FORKS), **({} if namespaces else _WITHOUT_NAMESPACES)}
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            yield from _refused(number, _EPERM)
    yield from _refused(_CLONE3, _ENOSYS)
    for both, argument, values in (_ALWAYS if namespaces else _ARGUMENTS).values():
        yield from _refused_with(both[column], argument, values)
    # clone: threads, and processes only where they are allowed, never with namespaces of their own.
    yield (_EQUAL, 0, 4, _CLONE[machine])
    yield (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)
    yield (_ANY_BIT, 1, 0, _CLONE_NEW) if children else (_ANY_BIT, 0, 1, _CLONE_THREAD)
    yield (_RETURN, 0, 0, _ALLOW)
    yield (_RETURN, 0, 0, _ERRNO | _EPERM)
    # prlimit64: of the process itself, and of no other one.
    yield (_EQUAL, 0, 3, _PRLIMIT[machine])
    yield (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)
    yield (_EQUAL, 1, 0, 0)
    yield (_RETURN, 0, 0, _ERRNO | _EPERM)
    yield (_RETURN, 0, 0, _ALLOW)


def _refused(number: int, error: int) -> Iterator[tuple[int, int, int, int]]:
    yield (_EQUAL, 0, 1, number)
    yield (_RETURN, 0, 0, _ERRNO | error)


def _refused_with(number: int, argument: int, values: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Refused where an argument, of whose halves the kernel reads the lower one alone, has one of these values."""
    yield (_EQUAL, 0, len(values) + 3, number)
    yield (_LOAD, 0, 0, _FIRST_ARGUMENT_AT + 8 * argument)
    for left in range(len(values), 0, -1):
        yield (_EQUAL, left, 0, values[-left])
    yield (_RETURN, 0, 0, _ALLOW)
    yield (_RETURN, 0, 0, _ERRNO | _EPERM)
