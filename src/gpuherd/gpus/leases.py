"""Who may use a GPU, among all gpuherds of the machine: a kernel lock per GPU in a folder that all users share.

The lock (``flock`` on ``<uuid>.lock``) belongs to the open file, not to a process. The dispatcher takes it and hands
its file descriptor to the job, so that it lives as long as any process of the job, outlives a dispatcher that is
killed, and ends with the last of them, by the kernel and without any cleaning up. The file's content means nothing.

A GPU may have further lock files, and is free when none of them is held. There are two reasons for one:
- Who made the first file can remove it, and a lock on a removed file is one that nobody sees. So a taker to whom it
  does not belong (nor to root) keeps a file of its own instead.
- A lease that keeps a GPU unused for hours is passed over (``gpuherd.gpus.lease_breaker``), with a file above its own.

Knows locks and nothing of GPUs. Containers share leases only if they share the folder.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gpuherd.errors import CannotWrite
from gpuherd.gpus import lease_files as files
from gpuherd.gpus.lease_files import (
    NOTE_ENDING,
    FileId,
    LockTable,
    Note,
    existing_place,
    make_place,
    noted_names,
    owner_of_process,
    read_notes,
    refuse_unsafe,
    user_name,
    write_note,
)
from gpuherd.units import duration

# How long a count of one's own leases may be waited for; another of one's gpuherds counts in less than a millisecond.
_COUNTING_S = 2.0
_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """What others are told of a lease: the job's name, if they may know it. Pid, user and time are added."""

    job: str | None = None


NO_NOTE = LeaseNote()


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a GPU. What can't be known for sure is None; ``since`` is in seconds since 1970."""

    uuid: str
    pid: int | None = None
    user: str | None = None
    since: float | None = None
    job: str | None = None

    def sentence(self, now: float | None = None) -> str:
        """Who holds it, for people; with ``now`` (seconds since 1970) also for how long.

        >>> Holder("GPU-1", 4711, "alice", 100.0, "gpt2").sentence(now=340.0)
        'held by gpuherd: alice (pid 4711) for 4 min, job gpt2'
        """
        pid = "" if self.pid is None else f" (pid {self.pid})"
        since = "" if now is None or self.since is None else f" for {duration(max(0.0, now - self.since), parts=1)}"
        return f"held by gpuherd: {self.user or 'someone'}{pid}{since}" + (f", job {self.job}" if self.job else "")


class Lease:
    """A taken GPU. Pass ``fd`` to the job (``pass_fds``); it holds the GPU until every copy of it is closed.

    Attributes:
        was_ahead: it is the very file that ``LeaseFolder.open_ahead`` had opened, so that all who were given that one
            before it was taken hold the lease now.
    """

    def __init__(self, uuid: str, fd: int, *, was_ahead: bool = False) -> None:
        self.uuid = uuid
        self.was_ahead = was_ahead
        self._fd: int | None = fd

    @property
    def fd(self) -> int:
        """The open lock file. No child inherits it by itself: ``pass_fds`` gives it to the one that is meant."""
        if self._fd is None:
            raise ValueError(f"the lease of {self.uuid} is closed")
        return self._fd

    def close(self) -> None:
        """Drops this process's copy. The GPU stays taken while a job has the other."""
        # Not LOCK_UN: that would free the lock for every copy at once.
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def moved(self) -> Lease:
        """The same lease in another object; closing this one does nothing any more."""
        lease, self._fd = Lease(self.uuid, self.fd, was_ahead=self.was_ahead), None
        return lease

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LeaseFolder:
    """The folder of locks. All users of the machine must use the same one.

    Raises:
        CannotWrite: the folder is a symbolic link, no folder, closed to this user, or lets everyone replace the files
            of others. The message says what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_unsafe(path)

    @staticmethod
    def default() -> LeaseFolder:
        """The folder that GPUHERD_LEASE_DIR or the machine's policy names, else the usual one; made if not there."""
        return LeaseFolder(existing_place() or make_place())

    @staticmethod
    def existing() -> LeaseFolder | None:
        """The default folder if it is there: for those who only look."""
        place = existing_place()
        return None if place is None else LeaseFolder(place)

    # --- taking -----------------------------------------------------------------------------------------------

    def open_ahead(self, uuid: str) -> Lease | None:
        """The GPU's first lock file, open and not locked: for a process that is started before the GPU can be taken.

        The lock belongs to the open file: when ``acquire`` locks this one, whoever has inherited it holds the lease.
        None when there is no such file.
        """
        try:
            fd = files.open_existing(files.first_path(self.path, uuid))
        except CannotWrite:
            return None
        return None if fd is None else Lease(uuid, fd, was_ahead=True)

    def acquire(self, uuid: str, note: LeaseNote = NO_NOTE, ahead: Lease | None = None) -> Lease | None:
        """Takes the GPU for whoever holds the lease's file descriptor; None if someone has it already.

        ``ahead``: from ``open_ahead``; the caller's no more. It is what gets locked, if it can be (``was_ahead`` of the
        lease says so), or closed.

        Raises:
            CannotWrite: a lock file can't be made or opened.
        """
        path = files.first_path(self.path, uuid)
        for _ in range(files.TRIES):
            with ExitStack() as opened:
                if ahead is not None:
                    first: Lease | None = opened.enter_context(ahead.moved())
                    ahead = None
                else:
                    first = self._open_first(uuid, path, opened)
                if first is not None and not files.lock(first.fd):
                    return None
                if first is not None and not files.is_file_at(path, first.fd):
                    continue  # removed or replaced between opening and locking: a lock that no other sees
                kept = first if first is not None and files.is_safe_from_others(first.fd) else self._own_file(uuid)
                if kept is None:
                    return None
                opened.enter_context(kept)
                further = files.further_paths(self.path, uuid)
                if not self._others_are_free(further, kept):
                    return None
                self._remove_own_files(uuid, further, kept)
                self._leave_note(uuid, note)
                return kept.moved()
        raise CannotWrite(f"{path} is replaced again and again; is something clearing {self.path}?")

    def pass_over(self, uuid: str, may_ignore: Callable[[FileId], bool], note: LeaseNote = NO_NOTE) -> Lease | None:
        """Takes the GPU although others hold lock files of it, if they hold none but those that may be ignored.

        Only for ``gpuherd.gpus.lease_breaker``, which knows when that is right. The new file is locked before anybody
        can see it, and the others are tested after that: of two who do this at once, at most one succeeds.
        """
        path = files.next_path(self.path, uuid)
        fd = files.create_lock(path, locked=True)
        if fd is None:
            return None
        with ExitStack() as opened:
            lease = opened.enter_context(Lease(uuid, fd))
            for other in self.paths(uuid):
                if other != path and files.is_locked(other):
                    found = files.file_id(other)
                    if found is None or not may_ignore(found):
                        path.unlink(missing_ok=True)
                        return None
            self._remove_own_files(uuid, files.further_paths(self.path, uuid), lease)
            self._leave_note(uuid, note)
            return lease.moved()

    def _open_first(self, uuid: str, path: Path, opened: ExitStack) -> Lease | None:
        """The first lock file, open; None when somebody else has put there what can't be used, which counts as no file:
        a lock file that gpuherd makes can be read by all."""
        try:
            return opened.enter_context(Lease(uuid, files.open_lock(path)))
        except CannotWrite:
            found = files.file_id(path)
            if found is None or found.owner == os.geteuid():
                raise
            return None

    def _own_file(self, uuid: str) -> Lease | None:
        """A further lock file that only we or root can remove, locked; None when someone holds ours."""
        for path in files.further_paths(self.path, uuid):
            with ExitStack() as opened:
                fd = files.open_readable(path)
                if fd is None:
                    continue
                lease = opened.enter_context(Lease(uuid, fd))
                if files.is_safe_from_others(fd):
                    return lease.moved() if files.lock(fd) and files.is_file_at(path, fd) else None
        fd = files.create_lock(files.next_path(self.path, uuid), locked=True)
        return None if fd is None else Lease(uuid, fd)

    def _others_are_free(self, further: Sequence[Path], kept: Lease) -> bool:
        """Whether nobody holds one of these further lock files but ``kept``."""
        for path in further:
            if not files.is_file_at(path, kept.fd) and files.is_locked(path, fcntl.LOCK_EX):
                time.sleep(_PAUSE_S)
                if files.is_locked(path, fcntl.LOCK_EX):  # not somebody who only looked
                    return False
        return True

    def _remove_own_files(self, uuid: str, further: Sequence[Path], kept: Lease) -> None:
        """Removes those of these files of ours that nobody holds, left by leases that had passed others over."""
        for path in further:
            found = files.file_id(path)
            if found is None or found.owner != os.geteuid() or files.is_file_at(path, kept.fd):
                continue
            fd = files.open_readable(path)
            if fd is not None:
                with Lease(uuid, fd), suppress(OSError):
                    if files.lock(fd) and files.is_file_at(path, fd):
                        path.unlink()

    def _leave_note(self, uuid: str, note: LeaseNote) -> None:
        told = Note(pid=os.getpid(), uid=os.geteuid(), since=time.time(), job=note.job)
        write_note(self.path, files.base_name(uuid), told)

    # --- counting one's own -----------------------------------------------------------------------------------

    @contextmanager
    def counting(self) -> Iterator[bool]:
        """While it lasts, no other gpuherd of this user counts and takes; False when one has done so for too long.

        The lock is a file that only this user can open, so that nobody else can hold it.
        """
        fd = self._open_private()
        try:
            until = time.monotonic() + _COUNTING_S
            while not (mine := files.lock(fd)) and time.monotonic() < until:
                time.sleep(_PAUSE_S)
            yield mine
        finally:
            os.close(fd)

    def _open_private(self) -> int:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        for number in range(files.TRIES):
            path = self.path / f".counting-{os.geteuid()}.{number}"
            for further in (0, os.O_CREAT | os.O_EXCL):
                with suppress(OSError):
                    fd = os.open(path, flags | further, 0o600)
                    state = os.fstat(fd)
                    if state.st_uid == os.geteuid() and stat.S_ISREG(state.st_mode) and not state.st_mode & 0o077:
                        return fd
                    os.close(fd)  # somebody else's, in our name: the next number
        raise CannotWrite(f"{self.path}/.counting-{os.geteuid()}.0 and its like belong to others; remove them")

    def held_by(self, uid: int) -> frozenset[str]:
        """The GPUs that gpuherds of this user hold, by the names of their files: their UUIDs, "/" written as "_"."""
        table = LockTable()
        return frozenset(
            name for name in noted_names(self.path, uid) if any(uid in found.uids for found in self._found(name, table))
        )

    # --- looking ----------------------------------------------------------------------------------------------

    def taken_by_others(self, uid: int, since: float) -> bool:
        """Whether a user other than this one has taken any GPU since this wall-clock second, by the ages of notes."""
        for name in files.names_in(self.path):
            with suppress(OSError):
                if name.endswith(NOTE_ENDING):
                    note = (self.path / name).lstat()
                    if note.st_uid != uid and note.st_mtime >= since:
                        return True
        return False

    def is_contested(self, uuid: str) -> bool:
        """Whether ``acquire`` would fail now: somebody holds, or just looks at, a lock file of this GPU."""
        return any(files.is_locked(path, fcntl.LOCK_EX) for path in self.paths(uuid))

    def is_held(self, uuid: str) -> bool:
        """Whether somebody holds this GPU as their own, which costs less to ask than who."""
        return any(files.is_locked(path) for path in self.paths(uuid))

    def holder(self, uuid: str) -> Holder | None:
        """Who holds the GPU, or None if nobody of gpuherd does. Of several the one who came last."""
        found = self._found(files.base_name(uuid), LockTable())
        return _told(uuid, found[-1]) if found else None

    def holders(self, uuids: Iterable[str]) -> dict[str, Holder]:
        """Who holds which of these GPUs; without those that nobody holds."""
        table, there = LockTable(), files.names_in(self.path)
        found = {uuid: self._found(files.base_name(uuid), table, there) for uuid in uuids}
        return {uuid: _told(uuid, all_of_it[-1]) for uuid, all_of_it in found.items() if all_of_it}

    def paths(self, uuid: str, there: Sequence[str] | None = None) -> list[Path]:
        """The names of all lock files that there may be for this GPU, the first one first. ``there``: the names of all
        files in the folder, where they are known."""
        return [files.first_path(self.path, uuid), *files.further_paths(self.path, uuid, there)]

    def _found(self, name: str, table: LockTable, there: Sequence[str] | None = None) -> list[_Found]:
        """All that is known of each lock file that is held, in the order of their numbers. ``there``: the names of all
        files, where they are known."""
        found = []
        for path in self.paths(name, there):
            # The kernel's table is long on a busy machine, and in a container it hides locks whose taker has ended.
            if files.is_locked(path):
                with suppress(OSError):
                    found.append(self._describe(name, table.taker(path.lstat())))
        return found

    def _describe(self, name: str, pid: int | None) -> _Found:
        owner = None if pid is None else owner_of_process(pid)
        notes = [note for note in read_notes(self.path, name, owner) if pid is None or note.pid == pid]
        if owner is not None:
            return _Found(pid, owner, notes[0] if notes else None)
        # Two users who both claim to be a process that has ended can't be told apart.
        if not notes or (pid is not None and len({note.uid for note in notes}) > 1):
            return _Found(pid, None, None)
        newest = max(notes, key=lambda note: note.since)
        return _Found(pid, newest.uid, newest)


@dataclass(frozen=True, slots=True)
class _Found:
    """A lock that is held: who took it, as far as the system bears it out."""

    pid: int | None
    uid: int | None
    note: Note | None

    @property
    def uids(self) -> tuple[int, ...]:
        return () if self.uid is None else (self.uid,)


def _told(uuid: str, found: _Found) -> Holder:
    user = None if found.uid is None else user_name(found.uid)
    if found.note is None:
        return Holder(uuid, found.pid, user)
    return Holder(uuid, found.note.pid, user, found.note.since, found.note.job)
