"""The idle-lease breaker: takes a GPU in spite of a lease that keeps it from everyone and never uses it.

Any user may open and lock a lock file, so a lease proves nothing by itself: a forgotten or forged one would block
others for ever. A gpuherd that waits for the GPU therefore watches whether it is held and not used. After
``idle_lease_s`` of that it may take the GPU. Two gpuherds must still never both get it, though none can know who really
holds a lock (holders may come and go between two looks, and pids may be hidden):

1. Who watches first takes a *seat*: a shared lock (LOCK_SH) on a further lock file that only they can remove. An
   ordinary taker must be able to lock every file for itself, so from here on there can't be a new one. Everyone who
   took the GPU in the ordinary way did so before, and has had ``idle_lease_s`` to use it.
2. Who passes over makes a *new* further file and locks it (LOCK_EX) before anyone can see it, then tests all others.
   Those that were there when the seat was taken are ignored. One that has come since may be somebody else who passed
   over: it is respected, unless files like it, of the same owner, have been held for ``idle_lease_s`` in all and the
   GPU is unused all the same. Nobody can make a file of another's, so whoever wants to block longer needs more users.

The seat is kept while our own jobs use the GPU, so that the next of them need not wait again. The time begins anew when
the GPU is used, and after a gap without looks. Knows locks and times; the caller says whether a GPU is in use.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.gpus import lease_files as files
from gpuherd.gpus.lease_files import FileId
from gpuherd.gpus.leases import NO_NOTE, Lease, LeaseFolder, LeaseNote

# Every job holds its GPU for a while before it uses it; a seat would hinder others when the job ends soon.
_PATIENCE_S = 60.0
# After a longer time than this between two looks, the time in between is unknown.
_LONGEST_HOLE_S = 30.0


@dataclass(slots=True)
class _Watched:
    """A GPU that somebody holds and nobody uses: since when, and since taking a seat, who had which file when."""

    since: float
    last: float
    seat: Lease | None = None
    seated_at: float = 0.0
    there: frozenset[FileId] = frozenset()
    newcomers: dict[int, float] = field(default_factory=dict)  # owner of held files: seconds for which they were held
    noted: float = 0.0
    stood_up: bool = False


class IdleLeaseBreaker:
    """The idle leases that one waiting gpuherd has seen. Close it to give up its seats.

    Args:
        folder: the leases.
        idle_lease_s: how long a lease may keep a GPU unused, in seconds.
    """

    def __init__(self, folder: LeaseFolder, idle_lease_s: float) -> None:
        self._folder = folder
        self._idle_lease_s = idle_lease_s
        self._patience_s = min(_PATIENCE_S, idle_lease_s / 10)
        self._hole_s = min(_LONGEST_HOLE_S, idle_lease_s / 2)
        self._watched: dict[str, _Watched] = {}

    def look(self, uuid: str, used: bool, now: float) -> None:
        """One look at a GPU that we wait for. ``used``: somebody computes on it, or it is not to be had otherwise."""
        if used or not self._folder.is_contested(uuid):
            self.forget(uuid)
            return
        watched = self._watched.get(uuid)
        if watched is None or now - watched.last > self._hole_s:
            self.forget(uuid)
            watched = self._watched[uuid] = _Watched(now, now)
        watched.last = now
        if watched.seat is not None:
            self._keep_seat(uuid, watched, now)
        elif now - watched.since >= self._patience_s:
            self._sit_down(uuid, watched, now)

    def ours(self, uuid: str, now: float) -> None:
        """Our own job uses the GPU: a seat that we have is kept."""
        if uuid in self._watched:
            self._watched[uuid].last = now

    def unused_s(self, uuid: str, now: float) -> float:
        """For how long we have seen this GPU held and unused, in seconds."""
        return now - self._watched[uuid].since if uuid in self._watched else 0.0

    def may_pass(self, uuid: str, now: float) -> bool:
        """Whether the GPU's lease may be passed over now, as far as can be told without trying."""
        watched = self._watched.get(uuid)
        return watched is not None and watched.seat is not None and now - watched.seated_at >= self._idle_lease_s

    def pass_over(self, uuid: str, now: float, note: LeaseNote = NO_NOTE) -> Lease | None:
        """Takes the GPU in spite of its lease; None when that may not be, or somebody else has just done so."""
        watched = self._watched.get(uuid)
        if watched is None or not self.may_pass(uuid, now) or not self._is_seated(uuid, watched):
            return None
        return self._folder.pass_over(uuid, self._ignorable(watched), note)

    def forget(self, uuid: str) -> None:
        """Gives the seat up: we no longer wait for this GPU, or it is in use, or free."""
        watched = self._watched.pop(uuid, None)
        if watched is not None and watched.seat is not None:
            watched.seat.close()

    def close(self) -> None:
        """Gives all seats up."""
        for uuid in list(self._watched):
            self.forget(uuid)

    def _ignorable(self, watched: _Watched) -> Callable[[FileId], bool]:
        return lambda file: file in watched.there or watched.newcomers.get(file.owner, 0.0) >= self._idle_lease_s

    def _sit_down(self, uuid: str, watched: _Watched, now: float) -> None:
        watched.seat = self._seat(uuid)
        if watched.seat is not None:
            watched.seated_at = watched.noted = now
            watched.there = frozenset(self._present(uuid).values())
            watched.newcomers = {}

    def _keep_seat(self, uuid: str, watched: _Watched, now: float) -> None:
        if not self._is_seated(uuid, watched):
            self.forget(uuid)
        elif not self._folder.is_held(uuid) and not watched.stood_up:
            # Only seats are left, so that the GPU may be free: all who sit must get up for one to see. If it can't be
            # had even then, somebody keeps a seat for no good, and we don't get up for them again.
            self.forget(uuid)
            self._watched[uuid] = _Watched(now, now, stood_up=True)
        else:
            self._note_newcomers(uuid, watched, now)

    def _note_newcomers(self, uuid: str, watched: _Watched, now: float) -> None:
        fresh = {path: file for path, file in self._present(uuid).items() if file not in watched.there}
        for owner in {file.owner for path, file in fresh.items() if files.is_locked(path)}:
            known = watched.newcomers.get(owner)
            watched.newcomers[owner] = 0.0 if known is None else known + now - watched.noted
        watched.noted = now

    def _present(self, uuid: str) -> dict[Path, FileId]:
        found = {path: files.file_id(path) for path in self._folder.paths(uuid)}
        return {path: file for path, file in found.items() if file is not None}

    def _seat(self, uuid: str) -> Lease | None:
        """A shared lock on a file that nobody but us and root can remove, made if there is none to be had."""
        for path in self._folder.paths(uuid):
            fd = files.open_readable(path)
            if fd is not None:
                seat = Lease(uuid, fd)
                if files.is_safe_from_others(fd) and files.lock(fd, fcntl.LOCK_SH) and files.is_file_at(path, fd):
                    return seat
                seat.close()
        path = files.next_path(self._folder.path, uuid)
        fd = files.create_lock(path)
        if fd is None:
            return None
        seat = Lease(uuid, fd)
        if files.lock(fd, fcntl.LOCK_SH) and files.is_file_at(path, fd):
            return seat
        seat.close()
        return None

    def _is_seated(self, uuid: str, watched: _Watched) -> bool:
        """Whether our seat is still a file that others meet."""
        if watched.seat is None:
            return False
        ours = os.fstat(watched.seat.fd).st_ino
        return any(file.inode == ours for file in self._present(uuid).values())
