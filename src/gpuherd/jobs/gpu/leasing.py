"""The dispatcher's leases: who holds which GPU, taking GPUs for a job, and the user's limit of GPUs.

The limit counts the GPUs that all gpuherds of the user hold. Counting and taking are one step under a lock of the
user's own, so that two of them never both take the last place. A lease that keeps a GPU from everyone and never uses it
may be passed over (``IdleLeaseBreaker``).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from gpuherd.gpus import lease_files as files
from gpuherd.gpus.lease_files import FileId, base_name, user_name
from gpuherd.gpus.leases import NO_NOTE, Holder, Lease, LeaseFolder, LeaseNote
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import clock
from gpuherd.jobs.gpu.turns import GpuTurns, WeekUse
from gpuherd.jobs.scheduler.limits import Allowance, allowance
from gpuherd.jobs.settings import Settings

_JUST_TAKEN = "another gpuherd has just taken it"
_KEPT_LOCKED = "someone keeps its lock from being taken"
# A lease on an unused GPU is reported from so many seconds on: jobs need a while to load their data.
_UNUSED_REPORTED_S = 120.0
NONE_AHEAD: Mapping[str, Lease] = MappingProxyType({})


class GpuLeases:
    """The leases on the GPUs that a run may use.

    ``notices`` are sentences for people since they were last fetched: leases that were passed over.

    Attributes:
        turns: whose turn it is to take one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._user = user_name(os.geteuid())
        self._breaker: IdleLeaseBreaker | None = None  # once a GPU is held
        self._held: dict[str, str] = {}
        self._notices: list[str] = []
        self._week = WeekUse()
        self.turns = GpuTurns(settings, lambda: self._leases)

    def change(self, settings: Settings) -> None:
        """Sets the settings from now on."""
        self.turns.change(settings)
        if settings.policy.idle_lease_s != self._settings.policy.idle_lease_s:
            self._leave_seats()
            self._breaker = None
        self._settings = settings

    def allowance(self, ours: Collection[str]) -> Allowance:
        """The GPUs that this run may hold now; ``ours``: those that it holds."""
        now = self._allowance(0)
        if now.max_gpus is None:
            return now
        elsewhere = self._leases.held_by(os.geteuid()) - {base_name(uuid) for uuid in ours}
        return self._allowance(len(elsewhere))

    def _allowance(self, held_elsewhere: int) -> Allowance:
        used_s = 0.0 if self._settings.policy.week_hours(self._user) is None else self._week.of(os.geteuid())
        return allowance(self._settings, self._user, datetime.fromtimestamp(clock.wall()), held_elsewhere, used_s)

    # --- looking ----------------------------------------------------------------------------------------------

    def look(self, unused: dict[str, bool], now: float) -> None:
        """Reads who holds these GPUs, for which a job waits. ``unused``: by UUID, whether the GPU is idle as well."""
        holders = self._leases.holders(unused)
        for uuid, is_unused in unused.items():
            self._note(uuid, holders.get(uuid))
            if uuid in self._held:
                self._breaker = self._breaker or IdleLeaseBreaker(self._leases, self._settings.policy.idle_lease_s)
                self._breaker.look(uuid, not is_unused, now)
                unused_s = self._breaker.unused_s(uuid, now)
                if unused_s >= _UNUSED_REPORTED_S:
                    self._held[uuid] += f", and nobody has used it for {unused_s // 60:.0f} min"
            elif self._breaker is not None:
                self._breaker.forget(uuid)

    def ours(self, uuids: Collection[str], now: float) -> None:
        """Our own jobs run on these GPUs."""
        for uuid in uuids:
            self._held.pop(uuid, None)
            if self._breaker is not None:
                self._breaker.ours(uuid, now)

    def any_given_back(self, uuids: Collection[str]) -> bool:
        """Whether one of these GPUs, held by others at the last look, is so no more: cheaper than ``look``."""
        return any(uuid in self._held and not self._leases.is_held(uuid) for uuid in uuids)

    def held(self, uuid: str, now: float) -> str | None:
        """Why the GPU can't be leased, as a sentence; None when it can."""
        if uuid in self._held and self._breaker is not None and self._breaker.may_pass(uuid, now):
            return None
        return self._held.get(uuid)

    def others_took_one(self, within_s: float) -> bool:
        """Whether another user has taken a GPU of this machine lately, whoever has it now."""
        return self._leases.taken_by_others(os.geteuid(), clock.wall() - within_s)

    def rest(self) -> None:
        """No job waits for a GPU any more: gives up ticket and seats, which would hinder other gpuherds."""
        self.turns.rest()
        self._leave_seats()

    def _leave_seats(self) -> None:
        if self._breaker is not None:
            self._breaker.close()

    def fetch_notices(self) -> tuple[str, ...]:
        """Sentences for people, once each."""
        notices, self._notices = tuple(self._notices), []
        return (*notices, *self.turns.fetch_notices())

    # --- taking -----------------------------------------------------------------------------------------------

    def open_ahead(self, uuids: Collection[str]) -> dict[str, Lease]:
        """The lock files of those of these GPUs that have one, open and not locked (``LeaseFolder.open_ahead``)."""
        opened = {uuid: self._leases.open_ahead(uuid) for uuid in uuids}
        return {uuid: lease for uuid, lease in opened.items() if lease is not None}

    def take(
        self, gpus: Sequence[Gpu], job: str, now: float, ahead: Mapping[str, Lease] = NONE_AHEAD
    ) -> tuple[Lease, ...] | None:
        """Leases on all of these GPUs for a job, or None (then none is kept) when one of them is held already, or the
        user would hold too many. ``ahead``: what ``open_ahead`` opened for this job, by UUID."""
        if self._allowance(0).max_gpus is None:
            return self._take(gpus, job, now, ahead)
        with self._leases.counting() as mine:
            held = len(self._leases.held_by(os.geteuid()))
            most = self._allowance(0)
            if mine and most.max_gpus is not None and held + len(gpus) <= most.max_gpus:
                return self._take(gpus, job, now, ahead)
            reason = f"{most.sentence}; {held} are held" if mine else "another of your gpuherds is taking GPUs"
            self._held |= dict.fromkeys((gpu.uuid for gpu in gpus), reason)
            return None

    def _take(self, gpus: Sequence[Gpu], job: str, now: float, ahead: Mapping[str, Lease]) -> tuple[Lease, ...] | None:
        with ExitStack() as taken:
            leases: list[Lease] = []
            for gpu in gpus:
                lease = self._lease(gpu, LeaseNote(job), now, ahead.get(gpu.uuid))
                if lease is None:
                    self._note(gpu.uuid, self._leases.holder(gpu.uuid), default=_JUST_TAKEN)
                    return None
                leases.append(taken.enter_context(lease))
            self.turns.took(now)
            return tuple(lease.moved() for lease in leases)

    def _lease(self, gpu: Gpu, note: LeaseNote, now: float, ahead: Lease | None) -> Lease | None:
        lease = self._leases.acquire(gpu.uuid, note, ahead)
        if lease is not None or self._breaker is None or not self._breaker.may_pass(gpu.uuid, now):
            return lease
        hours = self._settings.policy.idle_lease_s / 3600
        holder = self._held.get(gpu.uuid, "its lease")
        lease = self._breaker.pass_over(gpu.uuid, now, note)
        if lease is not None:
            self._notices.append(f"GPU {gpu.label}: {holder}; its lease is passed over after {hours:.3g} h without use")
        return lease

    def _note(self, uuid: str, holder: Holder | None, default: str | None = None) -> None:
        """Remembers who holds a lease on this GPU, or forgets it when it is no longer held."""
        if holder is not None:
            self._held[uuid] = holder.sentence()
        elif default is not None:
            self._held[uuid] = default
        elif uuid in self._held and self._leases.is_contested(uuid):
            self._held[uuid] = _KEPT_LOCKED
        else:
            self._held.pop(uuid, None)

    @cached_property
    def _leases(self) -> LeaseFolder:
        return LeaseFolder.default()  # made when a job needs a GPU, not for a plan


# --- leases that are held and never used ----------------------------------------------------------------------------

# Any user may open and lock a lock file, so a lease proves nothing by itself: a forgotten or forged one would block
# others for ever. A gpuherd that waits for the GPU therefore watches whether it is held and not used. After
# ``idle_lease_s`` of that it may take the GPU. Two gpuherds must still never both get it, though none can know who
# really holds a lock (holders may come and go between two looks, and pids may be hidden):
#
# 1. The first that watches takes a *seat*: a shared lock (LOCK_SH) on a further lock file that only it can remove. An
#    ordinary taker must be able to lock every file for itself, so that from here on there can't be a new one. Every
#    process that took the GPU in the ordinary way did so before, and has had ``idle_lease_s`` to use it.
# 2. To pass a lease over, it makes a *new* further file, locks it (LOCK_EX) before any other process can see it, and
#    then tests all others. Those that were there when the seat was taken are ignored. One that has come since may
#    belong to another gpuherd that passed the lease over: it is respected, unless files like it, of the same owner,
#    have been held for ``idle_lease_s`` in all and the GPU is unused all the same. No user can make a file of
#    another's, so whoever wants to block longer needs more users.
#
# The seat is kept while our own jobs use the GPU, so that the next of them need not wait again. The time begins anew
# when the GPU is used, and after a gap without looks. Knows locks and times; the caller says whether a GPU is in use.

# Every job holds its GPU for a while before it uses it; a seat would hinder other gpuherds when the job ends soon.
_PATIENCE_S = 60.0
# After a longer time than this between two looks, the time in between is unknown.
_LONGEST_HOLE_S = 30.0


@dataclass(slots=True)
class _Watched:
    """A GPU that is held and not used: since when, and since taking a seat, which owner had which file when."""

    since: float
    last: float
    seat: Lease | None = None
    seated_at: float = 0.0
    there: frozenset[FileId] = frozenset()
    newcomers: dict[int, float] = field(default_factory=dict)  # owner of held files: seconds for which they were held
    noted: float = 0.0
    stood_up: bool = False


class IdleLeaseBreaker:
    """Takes GPUs in spite of leases that keep them from everyone and never use them. ``close`` gives up its seats.

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
        """One look at a GPU that a job waits for. ``used``: a process computes on it, or it can't be used otherwise."""
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
        """Whether the GPU's lease may be passed over now, as far as is known without trying."""
        watched = self._watched.get(uuid)
        return watched is not None and watched.seat is not None and now - watched.seated_at >= self._idle_lease_s

    def pass_over(self, uuid: str, now: float, note: LeaseNote = NO_NOTE) -> Lease | None:
        """Takes the GPU in spite of its lease; None when that is not allowed, or another gpuherd has just done so."""
        watched = self._watched.get(uuid)
        if watched is None or not self.may_pass(uuid, now) or not self._is_seated(uuid, watched):
            return None
        return self._folder.pass_over(uuid, self._ignorable(watched), note)

    def forget(self, uuid: str) -> None:
        """Gives the seat up: no job waits for this GPU any more, or it is in use, or free."""
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
            # Only seats are left, so that the GPU may be free: all must be given up for one gpuherd to take it. If that
            # fails even then, another user keeps a seat without need, and we don't give ours up for it again.
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
        """A shared lock on a file that only we and root can remove, made if there is none that can be locked."""
        new = files.next_path(self._folder.path, uuid)
        for path in (*self._folder.paths(uuid), new):
            fd = files.create_lock(path) if path == new else files.open_readable(path)
            if fd is not None:
                with Lease(uuid, fd) as seat:
                    if files.is_safe_from_others(fd) and files.lock(fd, fcntl.LOCK_SH) and files.is_file_at(path, fd):
                        return seat.moved()
        return None

    def _is_seated(self, uuid: str, watched: _Watched) -> bool:
        """Whether our seat is still a file that other processes see."""
        if watched.seat is None:
            return False
        inode = os.fstat(watched.seat.fd).st_ino
        return any(file.inode == inode for file in self._present(uuid).values())
