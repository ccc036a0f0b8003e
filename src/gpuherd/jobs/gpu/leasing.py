"""The dispatcher's leases: who holds which GPU, taking GPUs for a job, and the user's limit of GPUs.

The limit counts the GPUs that all gpuherds of the user hold. Counting and taking are one step under a lock of the
user's own, so that two of them never both take the last place. ``gpuherd.gpus.lease_breaker`` decides when an idle
lease may be passed over.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from types import MappingProxyType

from gpuherd.gpus.lease_breaker import IdleLeaseBreaker
from gpuherd.gpus.lease_files import base_name, user_name
from gpuherd.gpus.leases import Holder, Lease, LeaseFolder, LeaseNote
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import clock
from gpuherd.jobs.scheduler.limits import Allowance, allowance
from gpuherd.jobs.settings import Settings

_JUST_TAKEN = "another gpuherd has just taken it"
_KEPT_LOCKED = "someone keeps its lock from being taken"
# A lease on a GPU that nobody uses is told of from so many seconds on: jobs need a while to load their data.
_UNUSED_TOLD_S = 120.0
NONE_AHEAD: Mapping[str, Lease] = MappingProxyType({})


class GpuLeases:
    """The leases on the GPUs that a run may use.

    ``notices`` are sentences for people since they were last fetched: leases that were passed over.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._user = user_name(os.geteuid())
        self._folder: LeaseFolder | None = None
        self._watching: IdleLeaseBreaker | None = None
        self._held: dict[str, str] = {}
        self._notices: list[str] = []

    def change(self, settings: Settings) -> None:
        """Other settings hold from now on."""
        if settings.policy.idle_lease_s != self._settings.policy.idle_lease_s:
            self.rest()
            self._watching = None
        self._settings = settings

    def allowance(self, ours: Collection[str]) -> Allowance:
        """What this run may hold now; ``ours`` are the GPUs that it holds."""
        now = self._allowance(0)
        if now.max_gpus is None:
            return now
        elsewhere = self._leases.held_by(os.geteuid()) - {base_name(uuid) for uuid in ours}
        return self._allowance(len(elsewhere))

    def _allowance(self, held_elsewhere: int) -> Allowance:
        return allowance(self._settings, self._user, datetime.fromtimestamp(clock.wall()), held_elsewhere)

    # --- looking ----------------------------------------------------------------------------------------------

    def look(self, unused: dict[str, bool], now: float) -> None:
        """Sees who holds these GPUs, for which we wait. ``unused``: by UUID, whether nobody uses the GPU either."""
        holders = self._leases.holders(unused)
        for uuid, is_unused in unused.items():
            self._note(uuid, holders.get(uuid))
            if uuid in self._held:
                self._vigil.look(uuid, not is_unused, now)
                if self._vigil.unused_s(uuid, now) >= _UNUSED_TOLD_S:
                    unused_min = self._vigil.unused_s(uuid, now) // 60
                    self._held[uuid] += f", and nobody has used it for {unused_min:.0f} min"
            elif self._watching is not None:
                self._watching.forget(uuid)

    def ours(self, uuids: Collection[str], now: float) -> None:
        """Our own jobs run on these GPUs."""
        for uuid in uuids:
            self._held.pop(uuid, None)
            if self._watching is not None:
                self._watching.ours(uuid, now)

    def any_given_back(self, uuids: Collection[str]) -> bool:
        """Whether one of these GPUs, held by others at the last look, is so no more: cheaper than ``look``."""
        return any(uuid in self._held and not self._leases.is_held(uuid) for uuid in uuids)

    def held(self, uuid: str, now: float) -> str | None:
        """Why the GPU can't be had by its lease, as a sentence; None when it can."""
        if uuid in self._held and self._watching is not None and self._watching.may_pass(uuid, now):
            return None
        return self._held.get(uuid)

    def others_took_one(self, within_s: float) -> bool:
        """Whether another user has taken a GPU of this machine lately, whoever has it now."""
        return self._leases.taken_by_others(os.geteuid(), clock.wall() - within_s)

    def rest(self) -> None:
        """Nobody waits for GPUs any more: nothing of ours shall be in the way of others."""
        if self._watching is not None:
            self._watching.close()

    def fetch_notices(self) -> tuple[str, ...]:
        """What people should be told, once."""
        notices, self._notices = tuple(self._notices), []
        return notices

    # --- taking -----------------------------------------------------------------------------------------------

    def open_ahead(self, uuids: Collection[str]) -> dict[str, Lease]:
        """The lock files of those of these GPUs that have one, open and not locked (``LeaseFolder.open_ahead``)."""
        opened = {uuid: self._leases.open_ahead(uuid) for uuid in uuids}
        return {uuid: lease for uuid, lease in opened.items() if lease is not None}

    def take(
        self, gpus: Sequence[Gpu], job: str, now: float, ahead: Mapping[str, Lease] = NONE_AHEAD
    ) -> tuple[Lease, ...] | None:
        """Leases on all of these GPUs for a job, or None (then none is kept) when somebody else holds one, or the user
        would hold more than they may. ``ahead``: what ``open_ahead`` opened for this job, by UUID."""
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
            return tuple(lease.moved() for lease in leases)

    def _lease(self, gpu: Gpu, note: LeaseNote, now: float, ahead: Lease | None) -> Lease | None:
        lease = self._leases.acquire(gpu.uuid, note, ahead)
        if lease is not None or self._watching is None or not self._watching.may_pass(gpu.uuid, now):
            return lease
        hours = self._settings.policy.idle_lease_s / 3600
        said = self._held.get(gpu.uuid, "its lease")
        lease = self._watching.pass_over(gpu.uuid, now, note)
        if lease is not None:
            self._notices.append(f"GPU {gpu.label}: {said}; its lease is passed over after {hours:.3g} h without use")
        return lease

    def _note(self, uuid: str, holder: Holder | None, default: str | None = None) -> None:
        """Remembers who holds a lease on this GPU, or forgets it when nobody does any more."""
        if holder is not None:
            self._held[uuid] = holder.sentence()
        elif default is not None:
            self._held[uuid] = default
        elif uuid in self._held and self._leases.is_contested(uuid):
            self._held[uuid] = _KEPT_LOCKED
        else:
            self._held.pop(uuid, None)

    @property
    def _leases(self) -> LeaseFolder:
        if self._folder is None:
            self._folder = LeaseFolder.default()
        return self._folder

    @property
    def _vigil(self) -> IdleLeaseBreaker:
        if self._watching is None:
            self._watching = IdleLeaseBreaker(self._leases, self._settings.policy.idle_lease_s)
        return self._watching
