"""Tickets of gpuherds that wait for GPUs: small files next to the leases, by which all of a machine know of each other.

A ticket, ``<uid>.<pid>.<number>.ticket``, is locked (``flock``) for as long as its gpuherd waits. The kernel frees the
lock when that process ends, however it ends: an unlocked ticket means nothing, and its user's next gpuherd removes it.

Nothing that a ticket says is believed of its author. Its user is the owner of the file by the kernel. It waits since no
earlier than the file was last changed, unless the reader has known the file for longer. So someone who makes tickets of
any content gains no more than the grace for which a GPU is kept, and someone who makes very many hides only their own.

Knows files and locks; what tickets mean is in ``gpuherd.gpus.turns``.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import stat
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuherd.gpus.lease_files import names_in
from gpuherd.gpus.turns import Ticket

ENDING = ".ticket"
# More of a user's tickets are not read; ten gpuherds of a user have no more turns than one.
MOST_OF_A_USER = 16
# Dead ones, and such as say nothing, may hide so many.
_MOST_OPENED = 64
_NAME = re.compile(r"(\.?)(\d{1,10})\.\d{1,10}\.\d{1,3}\.ticket", re.ASCII)
_MOST_BYTES = 8192
_MOST_GPUS = 1024
_MOST_USABLE = 128
_MOST_JOBS = 10**9
_LONGEST_JOB_S = 1e9
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Need:
    """What a gpuherd waits for; the fields as in ``Ticket``."""

    gpus: int = 1
    smallest: int = 1
    usable: frozenset[str] | None = None
    job_s: float | None = None
    jobs: int = 0

    def ticket(self, key: str, uid: int, since: float) -> Ticket:
        """The ticket of a gpuherd that needs this."""
        return Ticket(key, uid, since, self.gpus, self.smallest, self.usable, self.job_s, self.jobs)


class OwnTicket:
    """The ticket of this process: none until ``keep``. Failures are kept in ``problem``, and nothing else happens.

    Attributes:
        name: of the file; also the key of the ticket.
        problem: why it can't be written, as a sentence; None while it can.
    """

    def __init__(self) -> None:
        self.name = f"{os.geteuid()}.{os.getpid()}.0{ENDING}"
        self.problem: str | None = None
        self._fd: int | None = None
        self._path = Path()
        self._written = b""

    def keep(self, folder: Path, need: Need, since: float) -> None:
        """Makes the ticket, or brings it up to date; nothing is written where nothing has changed.

        Args:
            since: when it began to wait or last took a GPU, in seconds since boot (``clock.mono``).
        """
        text = _text(need, since)
        if self._fd is not None and text == self._written and self._path.parent == folder:
            return
        try:
            if self._fd is None or self._path.parent != folder or not _is_there(self._path, self._fd):
                self.withdraw()
                self._fd, self._path = _make(folder, text)
                self.name = self._path.name
            else:
                _overwrite(self._fd, text)
            self._written, self.problem = text, None
        except OSError as problem:
            self.problem = f"no ticket can be left in {folder}: {problem.strerror}"

    def withdraw(self) -> None:
        """It waits no more: removes the ticket."""
        if self._fd is not None:
            with suppress(OSError):
                if _is_there(self._path, self._fd):
                    self._path.unlink()
            os.close(self._fd)
            self._fd = None


def _text(need: Need, since: float) -> bytes:
    usable = None if need.usable is None or len(need.usable) > _MOST_USABLE else sorted(need.usable)
    said = {"gpus": need.gpus, "smallest": need.smallest, "since": round(since, 3), "usable": usable}
    return json.dumps(said | {"job_s": need.job_s, "jobs": need.jobs}).encode()


def _make(folder: Path, text: bytes) -> tuple[int, Path]:
    """A new ticket, locked and complete before any other process sees it. Raises OSError."""
    beginning = f"{os.geteuid()}.{os.getpid()}"
    for number in range(20):
        fresh, path = folder / f".{beginning}.{number}{ENDING}", folder / f"{beginning}.{number}{ENDING}"
        try:
            fd = os.open(fresh, _NEW, 0o600)
        except FileExistsError:  # of a killed process that had our pid, or of somebody else
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _overwrite(fd, text)
            os.fchmod(fd, 0o644)
            # By rename, not by link: a ticket with a second name is not believed. What is there was ours or stays.
            fresh.rename(path)
        except OSError:
            os.close(fd)
            with suppress(OSError):
                fresh.unlink()
            if path.exists():
                continue
            raise
        return fd, path
    raise FileExistsError(17, "others have taken all its names")


def _overwrite(fd: int, text: bytes) -> None:
    """One write covers what was there before: a reader sees the one or the other. Raises OSError."""
    size = max(len(text), os.fstat(fd).st_size)
    if os.pwrite(fd, text.ljust(size), 0) < size:
        raise OSError(28, "No space left on device")


def _is_there(path: Path, fd: int) -> bool:
    """Whether other processes see this open file under its name."""
    try:
        there, ours = path.lstat(), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


@dataclass(frozen=True, slots=True)
class _Known:
    """A ticket's file as it was read: which file it was, by its last change, and since when the reader knows it."""

    inode: int
    changed_ns: int
    size: int
    seen_since: float
    ticket: Ticket | None


class TicketReader:
    """Reads the tickets of all users. It keeps what it has read, so that a look at files that have not changed costs
    little more than the look whether they are still locked."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def read(self, folder: Path, now: float, own: str | None = None) -> tuple[Ticket, ...]:
        """The tickets of gpuherds that wait now, without the one of the name ``own``.

        Args:
            now: seconds since boot (``clock.mono``).

        Raises OSError when the folder can't be read.
        """
        names = [name for name in names_in(folder) if name.endswith(ENDING)]
        if not names:
            self._known.clear()
            return ()
        wall, me = time.time(), os.geteuid()
        found: list[Ticket] = []
        opened: Counter[int] = Counter()
        of_user: Counter[int] = Counter()
        known = {}
        # Those that are known first: no user can push a ticket out by many further ones.
        for name in sorted(names, key=lambda name: (name not in self._known, name)):
            form = _NAME.fullmatch(name)
            if form is None or name == own:
                continue
            uid, path = int(form[2]), f"{folder}/{name}"
            if uid != me and (of_user[uid] >= MOST_OF_A_USER or opened[uid] >= _MOST_OPENED):
                continue
            if form[1]:  # one that was never finished
                if uid == me:
                    _remove_dead(path)
                continue
            try:
                # Not opened before it is clear that it is a plain file of the user in its name.
                if not _is_plausible(os.lstat(path), uid):
                    continue
            except OSError:
                continue
            opened[uid] += 1
            read = self._read(path, name, uid, now, wall)
            if read is None:
                if uid == me:
                    _remove_dead(path)
                continue
            known[name] = read
            if read.ticket is not None:
                of_user[uid] += 1
                found.append(read.ticket)
        self._known = known
        return tuple(found)

    def _read(self, path: str, name: str, uid: int, now: float, wall: float) -> _Known | None:
        """The ticket of this file; None where no process holds it."""
        try:
            fd = os.open(path, _READ)
        except OSError:
            return None
        try:
            state = os.fstat(fd)
            if not _is_plausible(state, uid) or not _is_locked(fd):
                return None
            known = self._known.get(name)
            if known is None or known.inode != state.st_ino:
                known = _Known(state.st_ino, 0, 0, now, None)
            if (known.changed_ns, known.size) == (state.st_ctime_ns, state.st_size):
                return known
            ticket = _parse(os.pread(fd, _MOST_BYTES, 0), name, uid)
            if ticket is None:
                # In the middle of a change, or nonsense: what it said before, if it has said anything.
                return replace(known, changed_ns=0)
            earliest = min(known.seen_since, now - max(0.0, wall - state.st_ctime_ns / 1e9))
            since = min(now, max(ticket.since, earliest))
            ticket = replace(ticket, since=since)
            return _Known(state.st_ino, state.st_ctime_ns, state.st_size, known.seen_since, ticket)
        except OSError:
            return None
        finally:
            os.close(fd)


def _is_plausible(state: os.stat_result, uid: int) -> bool:
    """Whether a file may be a ticket of this user. A second name could be one that a stranger gave to it."""
    return stat.S_ISREG(state.st_mode) and state.st_uid == uid and state.st_nlink == 1 and state.st_size <= _MOST_BYTES


def _is_locked(fd: int) -> bool:
    """Whether a process holds the ticket; the lock that this takes otherwise goes with the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _remove_dead(path: str) -> None:
    """Removes a ticket of ours that no process holds."""
    with suppress(OSError):
        fd = os.open(path, _READ)
        try:
            if os.fstat(fd).st_uid == os.geteuid() and not _is_locked(fd) and _is_there(Path(path), fd):
                os.unlink(path)  # noqa: PTH108
        finally:
            os.close(fd)


def _parse(content: bytes, name: str, uid: int) -> Ticket | None:
    """The ticket with this content, None for nonsense. Numbers are bounded to what a machine can have."""
    try:
        said: dict[str, Any] = json.loads(content)
        gpus, smallest, jobs = (_whole(said.get(key, least), least, most) for key, least, most in _NUMBERS)
        since, job_s = float(said["since"]), said.get("job_s")
        usable = said.get("usable")
        if not math.isfinite(since):
            return None
        if job_s is not None:
            job_s = min(float(job_s), _LONGEST_JOB_S)
            job_s = job_s if job_s >= 0 else None
        if usable is not None:
            usable = frozenset(usable)
            if len(usable) > _MOST_USABLE or not all(isinstance(uuid, str) for uuid in usable):
                return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Ticket(name, uid, since, gpus, smallest, usable, job_s, jobs)


# Each number of a ticket, its least and its greatest value.
_NUMBERS = (("gpus", 0, _MOST_GPUS), ("smallest", 1, _MOST_GPUS), ("jobs", 0, _MOST_JOBS))


def _whole(value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return max(least, min(value, most))
