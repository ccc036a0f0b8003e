"""Who holds a lock, for people to read: the kernel's own table, and a note that the taker leaves beside the lock.

A note, ``<uuid>.<uid>.note``, says who took the GPU, when, for which job; never a command line. It is believed only as
far as the system bears it out: the file must belong to the user whom it names, and its pid must be the kernel's.
Nothing is decided by a note: whether a GPU is taken, only the lock says.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuherd.gpus.lease_files import names_in

# Notes are padded with blanks to this size, so that a new one covers the whole of an old one; more is not read.
_NOTE_BYTES = 4096
_MOST_JOB_CHARACTERS = 300
NOTE_ENDING = ".note"


@dataclass(frozen=True, slots=True)
class Note:
    """What the taker of a lock says of itself; ``since`` is in seconds since 1970."""

    pid: int
    uid: int
    since: float
    job: str | None


def write_note(folder: Path, name: str, note: Note) -> None:
    """Leaves the note for the lock of this name. A lock is a lock without it too: failing fails nothing.

    Only who holds the lock may call it: two at a time would be in each other's way.
    """
    told = {"pid": note.pid, "uid": note.uid, "since": note.since, "job": note.job}
    text = json.dumps(told).encode()
    file_name = _file_name(name, note.uid)
    with suppress(OSError):
        if _overwrite(f"{folder}/{file_name}", text):
            return
        path, fresh = folder / file_name, folder / f".{file_name}"
        fresh.unlink(missing_ok=True)  # from a taker that was killed here
        # No fsync: like the lock that it describes, the note means nothing after a power cut.
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text.ljust(_NOTE_BYTES))
                os.fchmod(fd, 0o644)
            fresh.replace(path)
        except OSError:
            fresh.unlink()


def _overwrite(path: str, text: bytes) -> bool:
    """Writes a new note over our own older one, in one write; False when there is none that can be written over.

    A rename for every short job would cost several times as much. A reader who sees a part of both finds no note.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        state = os.fstat(fd)
        # Only a file that nobody else can have put there: a second name for one of our own would be written to as well.
        ours = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and state.st_nlink == 1
        if not ours or state.st_size != _NOTE_BYTES or len(text) > _NOTE_BYTES:
            return False
        return os.pwrite(fd, text.ljust(_NOTE_BYTES), 0) == _NOTE_BYTES
    finally:
        os.close(fd)


def read_notes(folder: Path, name: str, uid: int | None = None) -> Iterator[Note]:
    """All believable notes for the lock of this name, old ones too; or that of one user, which costs less."""
    for path in folder.glob(f"{name}.*.note") if uid is None else (folder / _file_name(name, uid),):
        note = _read_note(path)
        if note is not None and path.name == _file_name(name, note.uid):
            yield note


def noted_names(folder: Path, uid: int) -> list[str]:
    """The names of the locks for which there is a note of this user, old ones too."""
    ending = _file_name("", uid)
    return [name.removesuffix(ending) for name in names_in(folder) if name.endswith(ending) and name[0] != "."]


def _file_name(name: str, uid: int) -> str:
    return f"{name}.{uid}{NOTE_ENDING}"


def _read_note(path: Path) -> Note | None:
    """The note in this file, or None unless it is one and belongs to the user whom it names."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            return None
        told = json.loads(os.read(fd, _NOTE_BYTES))
        note = Note(int(told["pid"]), int(told["uid"]), float(told["since"]), told["job"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    finally:
        os.close(fd)
    return note if note.uid == state.st_uid and _fit_to_show(note.job) else None


def _fit_to_show(job: object) -> bool:
    """The job's name goes to terminals: only printable text of sane length."""
    return job is None or (isinstance(job, str) and job.isprintable() and len(job) <= _MOST_JOB_CHARACTERS)


class LockTable:
    """The kernel's own table of who took which lock, as of the first question to it; empty where it is hidden."""

    def __init__(self) -> None:
        self._takers: dict[str, int] | None = None

    def taker(self, file: os.stat_result) -> int | None:
        """The pid that took a lock of its own (LOCK_EX) on this file; None if there is none or it is hidden."""
        if self._takers is None:
            self._takers = _read_lock_table()
        pid = self._takers.get(f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}")
        return pid if pid is not None and pid > 0 else None


def _read_lock_table() -> dict[str, int]:
    takers: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # "1: FLOCK ADVISORY WRITE 4711 fe:00:2146451 0 EOF"; one that waits has "->" in the second place.
            words = line.split()
            if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE":
                takers[words[5]] = int(words[4])
    return takers


def owner_of_process(pid: int) -> int | None:
    """The uid that the process with this pid runs as, None if it is gone or hidden."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
