"""Leases of GPUs among all gpuherds of the machine: a kernel lock per GPU in a folder that all users share.

The lock (``flock`` on ``<uuid>.lock``) belongs to the open file, not to a process. The dispatcher takes it and hands
its file descriptor to the job, so that it lives as long as any process of the job, outlives a dispatcher that is
killed, and ends with the last of them, by the kernel and without any cleaning up. The file's content means nothing.

A GPU may have further lock files, and is free when none of them is held. There are two reasons for one:
- The owner of the first file can remove it, and no other process sees a lock on a removed file. So a taker keeps a file
  of its own instead, unless the first one belongs to it or to root.
- A lease that keeps a GPU unused for hours is passed over (``gpuherd.jobs.gpu.leasing``), with a file above its own.

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
from functools import cache
from pathlib import Path
from types import TracebackType

from gpuherd.errors import CannotWrite
from gpuherd.gpus import lease_files as files
from gpuherd.gpus.lease_files import NOTE_ENDING, FileId, user_name
from gpuherd.units import duration

# How long a count of one's own leases may be waited for; another of one's gpuherds counts in less than a millisecond.
_COUNTING_S = 2.0
_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """What other users see of a lease: the job's name, if they may know it. Pid, user and time are added."""

    job: str | None = None


NO_NOTE = LeaseNote()


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a GPU. A field that can't be known for sure is None; ``since`` is in seconds since 1970."""

    uuid: str
    pid: int | None = None
    user: str | None = None
    since: float | None = None
    job: str | None = None

    def sentence(self, now: float | None = None) -> str:
        """The holder for people; with ``now`` (seconds since 1970) also for how long.

        >>> Holder("GPU-1", 4711, "alice", 100.0, "gpt2").sentence(now=340.0)
        'held by gpuherd: alice (pid 4711) for 4 min, job gpt2'
        """
        pid = "" if self.pid is None else f" (pid {self.pid})"
        since = "" if now is None or self.since is None else f" for {duration(max(0.0, now - self.since), parts=1)}"
        return f"held by gpuherd: {self.user or 'someone'}{pid}{since}" + (f", job {self.job}" if self.job else "")


class Lease:
    """A taken GPU. Pass ``fd`` to the job (``pass_fds``); it holds the GPU until every copy of it is closed.

    Attributes:
        was_ahead: it is the very file that ``LeaseFolder.open_ahead`` had opened, so that every process that inherited
            that one before it was locked holds the lease now.
    """

    def __init__(self, uuid: str, fd: int, *, was_ahead: bool = False) -> None:
        self.uuid = uuid
        self.was_ahead = was_ahead
        self._fd: int | None = fd

    @property
    def fd(self) -> int:
        """The open lock file. A child inherits it only through ``pass_fds``."""
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
        """The same lease in another object; closing this one then does nothing."""
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
            of others. The message has the remedy.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files.refuse_unsafe(path)

    @staticmethod
    def default() -> LeaseFolder:
        """The folder that GPUHERD_LEASE_DIR or the machine's policy names, else the usual one; made if not there."""
        return LeaseFolder(files.existing_place() or files.make_place())

    @staticmethod
    def existing() -> LeaseFolder | None:
        """The default folder if it is there: for callers that only look."""
        place = files.existing_place()
        return None if place is None else LeaseFolder(place)

    # --- taking -----------------------------------------------------------------------------------------------

    def open_ahead(self, uuid: str) -> Lease | None:
        """The GPU's first lock file, open and not locked: for a process that is started before the GPU can be taken.

        The lock belongs to the open file: when ``acquire`` locks this one, every process that inherited it holds the
        lease.
        None when there is no such file.
        """
        fd = files.open_readable(files.first_path(self.path, uuid))
        return None if fd is None else Lease(uuid, fd, was_ahead=True)

    def acquire(self, uuid: str, note: LeaseNote = NO_NOTE, ahead: Lease | None = None) -> Lease | None:
        """Takes the GPU for every process that holds the lease's file descriptor; None if it is taken already.

        ``ahead``: from ``open_ahead``; this call takes it over, and locks it, if it can be (then the lease has
        ``was_ahead``), or closes it.

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
                    continue  # removed or replaced between opening and locking: no other process sees the lock
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

        Only for ``IdleLeaseBreaker``, which knows when that is right. The new file is locked before any other process
        can see it, and the others are tested after that: of two that do this at once, at most one succeeds.
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
        """The first lock file, open; None when another user has put something there that can't be used, which counts as
        no file: a lock file that gpuherd makes can be read by all."""
        try:
            return opened.enter_context(Lease(uuid, files.open_lock(path)))
        except CannotWrite:
            found = files.file_id(path)
            if found is None or found.owner == os.geteuid():
                raise
            return None

    def _own_file(self, uuid: str) -> Lease | None:
        """A further lock file that only we or root can remove, locked; None when another process holds ours."""
        for path in files.further_paths(self.path, uuid):
            fd = files.open_readable(path)
            if fd is not None:
                with Lease(uuid, fd) as lease:
                    if files.is_safe_from_others(fd):
                        return lease.moved() if files.lock(fd) and files.is_file_at(path, fd) else None
        fd = files.create_lock(files.next_path(self.path, uuid), locked=True)
        return None if fd is None else Lease(uuid, fd)

    def _others_are_free(self, further: Sequence[Path], kept: Lease) -> bool:
        """Whether none of these further lock files is held but ``kept``."""
        for path in further:
            if not files.is_file_at(path, kept.fd) and files.is_locked(path, fcntl.LOCK_EX):
                time.sleep(_PAUSE_S)
                if files.is_locked(path, fcntl.LOCK_EX):  # not by a process that only looked
                    return False
        return True

    def _remove_own_files(self, uuid: str, further: Sequence[Path], kept: Lease) -> None:
        """Removes those of these files of ours that are not held, left by leases that had passed others over."""
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
        ours = files.Note(os.getpid(), os.geteuid(), time.time(), note.job)
        files.write_note(self.path, files.base_name(uuid), ours)

    # --- counting one's own -----------------------------------------------------------------------------------

    @contextmanager
    def counting(self) -> Iterator[bool]:
        """Meanwhile no other gpuherd of this user counts and takes; False when one has done so for too long.

        The lock is a file that only this user can open, so that no other user can hold it.
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
                    os.close(fd)  # another user's, in our name: the next number
        raise CannotWrite(f"{self.path}/.counting-{os.geteuid()}.0 and its like belong to others; remove them")

    def held_by(self, uid: int) -> frozenset[str]:
        """The GPUs that gpuherds of this user hold, by the names of their files: their UUIDs, "/" written as "_"."""
        takers, names = cache(files.lock_takers), files.noted_names(self.path, uid)
        return frozenset(name for name in names if any(owner == uid for owner, _ in self._held(name, takers)))

    # --- looking ----------------------------------------------------------------------------------------------

    def held_uids(self) -> dict[str, int | None]:
        """Which users' gpuherds hold which GPUs of the machine, by the names of their files; None for a user who can't
        be known."""
        takers, there = cache(files.lock_takers), files.names_in(self.path)
        names = {name.partition(".")[0] for name in there if name.endswith(".lock") and name[0] != "."}
        held = {name: [uid for uid, _ in self._held(name, takers, there)] for name in sorted(names)}
        return {name: uids[-1] for name, uids in held.items() if uids}

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
        """Whether ``acquire`` would fail now: a process holds, or just looks at, a lock file of this GPU."""
        return any(files.is_locked(path, fcntl.LOCK_EX) for path in self.paths(uuid))

    def is_held(self, uuid: str) -> bool:
        """Whether this GPU is held (LOCK_EX), which costs less to find out than by whom."""
        return any(files.is_locked(path) for path in self.paths(uuid))

    def holder(self, uuid: str) -> Holder | None:
        """Who holds the GPU, or None if no gpuherd does. Of several the one who came last."""
        return self.holders([uuid]).get(uuid)

    def holders(self, uuids: Iterable[str]) -> dict[str, Holder]:
        """Who holds which of these GPUs, of several the one who came last; GPUs that are not held are missing."""
        takers, there = cache(files.lock_takers), files.names_in(self.path)
        held = {uuid: [holder for _, holder in self._held(uuid, takers, there)] for uuid in uuids}
        return {uuid: holders[-1] for uuid, holders in held.items() if holders}

    def paths(self, uuid: str, there: Sequence[str] | None = None) -> list[Path]:
        """The names of all lock files that there may be for this GPU, the first one first. ``there``: the names of all
        files in the folder, where they are known."""
        return [files.first_path(self.path, uuid), *files.further_paths(self.path, uuid, there)]

    def _held(
        self, uuid: str, takers: Callable[[], dict[str, int]], there: Sequence[str] | None = None
    ) -> Iterator[tuple[int | None, Holder]]:
        """The uid and description of who holds each lock file of this GPU that is held, in the order of their numbers,
        as far as the system confirms it. ``takers``: the kernel's table of locks; ``there``: as for ``paths``."""
        for path in self.paths(uuid, there):
            # The kernel's table is long on a busy machine, and in a container it hides locks whose taker has ended.
            if files.is_locked(path):
                with suppress(OSError):
                    yield self._describe(uuid, takers().get(files.lock_key(path)))

    def _describe(self, uuid: str, pid: int | None) -> tuple[int | None, Holder]:
        owner = None if pid is None else files.owner_of_process(pid)
        notes = files.read_notes(self.path, files.base_name(uuid), owner)
        fitting = [note for note in notes if pid is None or note.pid == pid]
        if owner is None and pid is not None and len({note.uid for note in fitting}) > 1:
            fitting = []  # two users who both claim to be a process that has ended can't be distinguished
        note = max(fitting, key=lambda note: note.since, default=None)
        if note is None:
            return owner, Holder(uuid, pid, None if owner is None else user_name(owner))
        uid = note.uid if owner is None else owner
        return uid, Holder(uuid, note.pid, user_name(uid), note.since, note.job)
