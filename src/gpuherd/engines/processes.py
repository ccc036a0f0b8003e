"""Processes as the kernel shows them in /proc: who is who, in which session, and what they hold.

A pid alone names nobody for long, since pids are used again. ``ProcessId`` therefore carries the start time and the
boot id as well. Linux only. Knows nothing of jobs; which processes belong to an attempt is ``tree``'s business.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ATTEMPT_VARIABLE = "GPUHERD_ATTEMPT"

_PROC = Path("/proc")
_STATE, _GROUP, _SESSION, _START_TIME = 0, 2, 3, 19  # positions in /proc/<pid>/stat after the command's name
_ENDED = frozenset({"Z", "X"})
_HELD = frozenset({"T", "t"})
_MOST_AT_ONCE = 65_536
_MARK = f"{ATTEMPT_VARIABLE}=".encode()


@cache
def boot_id() -> str:
    """The kernel's name for this boot: a record with another one is from before a restart of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that can't be mistaken for another: pid, start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot: str

    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        if self.boot != boot_id():
            return False
        fields = _stat(self.pid)
        return fields is not None and int(fields[_START_TIME]) == self.start_ticks and fields[_STATE] not in _ENDED


def identify(pid: int) -> ProcessId | None:
    """The full identity of the process that has this pid now, or None when there is none."""
    fields = _stat(pid)
    return None if fields is None else ProcessId(pid, int(fields[_START_TIME]), boot_id())


@dataclass(frozen=True, slots=True)
class Seen:
    """A live process as one look at /proc showed it.

    Attributes:
        group, session: process group and session, by number.
        held: stopped by a signal (or a debugger), until it is told to go on.
        attempt: the tag in its environment; None when it has none, or when we may not read it.
    """

    process: ProcessId
    group: int
    session: int
    held: bool
    attempt: str | None


def everyone(since_ticks: int = 0) -> tuple[Seen, ...]:
    """Every live process of the machine that began at or after ``since_ticks``, the oldest first; and the leaders of
    their sessions, where these are older. About 15 us for an older one and 30 us for each of the others.
    """
    # Looked at from the youngest on: what forks and ends in a loop is gone a moment after the folder was read.
    pids = sorted((int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()), reverse=True)
    seen = [found for pid in pids if (found := _look(pid, since_ticks)) is not None]
    leaders = {each.session for each in seen} - {each.process.pid for each in seen}
    seen += [found for pid in leaders if (found := _look(pid, 0)) is not None]
    return tuple(sorted(seen, key=lambda each: (each.process.start_ticks, each.process.pid)))


def _look(pid: int, since_ticks: int) -> Seen | None:
    fields = _stat(pid)
    if fields is None or fields[_STATE] in _ENDED or int(fields[_START_TIME]) < since_ticks:
        return None
    identity = ProcessId(pid, int(fields[_START_TIME]), boot_id())
    return Seen(identity, int(fields[_GROUP]), int(fields[_SESSION]), fields[_STATE] in _HELD, _attempt(pid))


def _attempt(pid: int) -> str | None:
    environment = b"\0" + (_read(f"/proc/{pid}/environ") or b"")
    _, found, rest = environment.partition(b"\0" + _MARK)
    return rest.partition(b"\0")[0].decode("utf-8", "replace") if found else None


@dataclass(frozen=True, slots=True)
class Tagged:
    """A live process that carries an attempt's tag in its environment."""

    process: ProcessId
    attempt: str


def tagged(prefix: str) -> Iterator[Tagged]:
    """Every live process of ours whose GPUHERD_ATTEMPT begins with ``prefix``.

    The environment is inherited by everything that a job starts, also by what forks twice or opens a session of its
    own. Other users' processes can't be read and are passed over.
    """
    for seen in everyone():
        if seen.attempt is not None and seen.attempt.startswith(prefix):
            yield Tagged(seen.process, seen.attempt)


@dataclass(frozen=True, slots=True)
class Lock:
    """A held lock (``flock``) as the kernel tells of it: the file, and the pid of the process that took it.

    The lock belongs to the open file, which children inherit: they then hold it too, and ``taker`` stays who it was.
    """

    path: str
    taker: int


def locks_held(pid: int, among: Collection[str] | None = None) -> frozenset[Lock]:
    """The locks in the hands of a process, on the files ``among`` or on any; none when we may not look."""
    found = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = str(Path(entry.path).readlink())
                if path.startswith("/") and (among is None or path in among):
                    found |= {Lock(path, taker) for taker in _takers(f"/proc/{pid}/fdinfo/{entry.name}")}
    return frozenset(found)


def any_held(locks: Iterable[Lock]) -> bool:
    """Whether anybody still holds one of these locks, by the kernel's list; also where we may not look at who it is."""
    from gpuherd.gpus.lease_files import is_locked  # here: every command knows processes, few know locks

    sought = set()
    for lock in locks:
        with suppress(OSError):
            inode = Path(lock.path).stat().st_ino
            # The kernel waits some milliseconds until it can list its locks: only where somebody holds this one.
            if is_locked(Path(lock.path)) or not os.access(lock.path, os.R_OK):
                sought.add((b"%d" % lock.taker, b"%d" % inode))
    # 4: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF
    for line in (_read(str(_PROC / "locks")) or b"").splitlines() if sought else ():
        words = line.split()
        if words[1:2] == [b"FLOCK"] and (words[4], words[5].rpartition(b":")[2]) in sought:
            return True
    return False


def path_of(descriptor: int) -> str:
    """The file behind a descriptor of ours, as others see it in /proc. Raises OSError when it is not open."""
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - for every start


def _takers(info: str) -> Iterator[int]:
    # lock:	1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF
    for line in (_read(info) or b"").splitlines():
        words = line.split()
        if words[:1] == [b"lock:"] and words[2:3] == [b"FLOCK"] and len(words) > 5 and words[5].isdigit():
            yield int(words[5])


def send(process: ProcessId, number: int) -> None:
    """Sends a signal to exactly this process: through a pidfd, so that a pid used again meanwhile is not hit."""
    with suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if process.is_alive():
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the command's name, which may itself hold spaces and brackets."""
    text = _read(f"/proc/{pid}/stat")
    return None if not text else text[text.rindex(b")") + 2 :].decode("ascii").split()


def _read(path: str) -> bytes | None:
    """A file of /proc; None when the process is gone or not ours to look at. Plain calls: this is done very often."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, _MOST_AT_ONCE):
            parts.append(part)
            if len(part) < _MOST_AT_ONCE:
                break
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(descriptor)
