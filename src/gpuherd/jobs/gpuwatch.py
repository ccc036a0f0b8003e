"""The dispatcher's eye on the GPUs: looks at them, remembers how long each has been free, and takes leases.

It joins what ``gpuherd.gpus`` offers (driver, free test, leases) and keeps what has to be remembered between two looks.
Which job gets which GPU is decided in ``policy``; when to look is decided in ``dispatcher``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpuherd.engines.processes import ATTEMPT_VARIABLE
from gpuherd.gpus import idle
from gpuherd.gpus.choose import choose
from gpuherd.gpus.lease import Holder, Lease, LeaseFolder, LeaseNote
from gpuherd.gpus.nvml import Nvml
from gpuherd.gpus.state import Gpu, GpuProcess, Machine
from gpuherd.gpus.visible import find, visible
from gpuherd.jobs.gpuusers import NOTHING, GpuUsers
from gpuherd.jobs.options import GpuOptions
from gpuherd.jobs.policy import GpuView
from gpuherd.jobs.yielding import Stranger

# How often the GPUs of running jobs are looked at for strangers, in seconds, while nobody waits.
WATCH_EVERY_S = 2.0
# A GPU that our job has left is looked at again after this many seconds, twice as many the next time, and so on.
_FIRST_LOOK_S = 0.005
# A row of checks with a longer hole than this in it is no row: nobody knows what went on meanwhile.
_LONGEST_HOLE_S = 5.0


class GpuWatch:
    """The GPUs that a run may use. ``problem`` is a sentence when there are none, else None.

    Raises NoSuchGpu when the options name a GPU that is not there.
    """

    def __init__(self, options: GpuOptions, queue_tag: str):
        self._nvml = Nvml()
        self._folder: LeaseFolder | None = None
        self._tag = f"{ATTEMPT_VARIABLE}={queue_tag}/".encode()
        self._rule = idle.IdleRule(options.gpu_memory_threshold, options.max_checks, options.check_interval)
        machine = self._nvml.snapshot(processes=True, topology=True)
        seen = visible(machine.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        chosen = find(seen, options.gpu_ids) if options.gpu_ids else seen
        self._preference = tuple(gpu.uuid for gpu in chosen) if options.gpu_ids else ()
        # What the driver last said; links between GPUs don't change, so they are asked for once.
        self._gpus = {gpu.uuid: gpu for gpu in chosen}
        self._peers = {gpu.uuid: gpu.peers for gpu in machine.gpus}
        self._streaks = idle.Streaks()
        self._busy = dict.fromkeys(self._gpus, "not looked at yet")
        self._held: dict[str, str] = {}
        self._looked_at = 0.0
        self._left_at: dict[str, float] = {}
        self._haste: dict[str, float] = {}
        self._users = GpuUsers(options.gpu_memory_threshold)
        self.problem = None if chosen else machine.problem or "no GPU is visible (CUDA_VISIBLE_DEVICES hides them)"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs as the driver last described them."""
        return tuple(self._gpus.values())

    # --- looking ----------------------------------------------------------------------------------------------

    def look(self, now: float, ours: Collection[str]) -> None:
        """A regular check: all GPUs are observed together, but those that our own jobs use (``ours``)."""
        self._forget_old_checks(now)
        self._looked_at = now
        self._refresh()
        for uuid in list(self._held):
            self._note_holder(uuid)
        self._observe(uuid for uuid in self._gpus if uuid not in ours)

    def _forget_old_checks(self, now: float) -> None:
        """Ends every row of checks when there was none for long; a GPU that our job has left since keeps its right."""
        hole = max(_LONGEST_HOLE_S, 5 * self._rule.check_interval_s)
        if now - self._looked_at <= hole or not (self._streaks.clean or self._streaks.left):
            return
        recent = {uuid: n for uuid, n in self._streaks.left.items() if now - self._left_at[uuid] <= hole}
        forgotten = (self._streaks.clean.keys() | self._streaks.left.keys()) - recent.keys()
        self._streaks = idle.Streaks(left=recent)
        self._busy |= dict.fromkeys(forgotten, "not looked at lately")

    def released(self, uuids: Collection[str], now: float) -> None:
        """Our job has just left these GPUs: they are looked at soon, and one clean check will do."""
        for uuid in uuids:
            if uuid in self._gpus:
                self._streaks = idle.released(self._streaks, uuid, self._rule)
                self._left_at[uuid] = now
                self._haste[uuid] = 0.0
                self._busy[uuid] = "our own job has just left it"

    def hasty_look(self, ours: Collection[str]) -> None:
        """A look at the GPUs that our jobs have just left, between two regular ones."""
        due = [uuid for uuid in self._haste if uuid not in ours]
        self._refresh()
        self._observe(due)
        self._haste = {
            uuid: max(_FIRST_LOOK_S, 2 * wait)
            for uuid, wait in self._haste.items()
            if uuid in due and not self._is_free(uuid) and 2 * wait < self._rule.check_interval_s
        }

    @property
    def haste_s(self) -> float | None:
        """Seconds until ``hasty_look`` is wanted, None for not at all."""
        return min(self._haste.values(), default=None)

    def views(self, now: float, ours: Collection[str]) -> tuple[GpuView, ...]:
        """Each GPU with the verdict of the last look. One so long ago that it says nothing any more is forgotten."""
        self._forget_old_checks(now)
        left = self._streaks.left
        return tuple(
            GpuView(gpu, self._verdict(uuid), uuid in ours, returning=uuid in left) for uuid, gpu in self._gpus.items()
        )

    def choose(self, candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
        """The best ``count`` of the candidates, in the user's order of preference; None when there are too few."""
        return choose(candidates, count, preference=self._preference, memory_mb=memory_mb, keep_together=True)

    # --- while our jobs run -----------------------------------------------------------------------------------

    def strangers(
        self, own: Mapping[str, Collection[str]], declared_mb: Mapping[str, int] = NOTHING
    ) -> tuple[Stranger, ...]:
        """A look at the GPUs on which our jobs run, every ``WATCH_EVERY_S``: who else is there. It feeds ``peaks`` too.

        Args:
            own: by GPU's UUID, the tags (GPUHERD_ATTEMPT) of our attempts on it.
            declared_mb: by GPU's UUID, how much memory they may use together, where that is known.
        """
        self._refresh()
        return self._users.look(self._gpus, own, declared_mb)

    @property
    def peaks(self) -> Mapping[str, int]:
        """By attempt's tag, the most memory in MB that it was seen to use on any one GPU, at the looks so far."""
        return self._users.peaks

    # --- taking -----------------------------------------------------------------------------------------------

    def take(self, gpus: Sequence[Gpu], job: str) -> tuple[Lease, ...] | None:
        """Leases on all of these GPUs for a job, or None (then none is kept) when somebody else holds one."""
        leases: list[Lease] = []
        for gpu in gpus:
            lease = self._leases.acquire(gpu.uuid, LeaseNote(job))
            if lease is None:
                self._note_holder(gpu.uuid, default="another gpuherd has just taken it")
                for taken in leases:
                    taken.close()
                return None
            leases.append(lease)
        return tuple(leases)

    def still_free(self, uuids: Collection[str]) -> set[str]:
        """One more look, under the leases: which of these GPUs nobody has begun to use since the last one."""
        self._refresh()
        checks = {uuid: idle.check(self._gpus[uuid], self._rule) for uuid in uuids}
        # A clean look here is no further step in the row of checks; an unclean one ends the row.
        unclean = {uuid: found for uuid, found in checks.items() if not found.free}
        self._streaks = idle.observe(self._streaks, unclean, self._rule)
        self._busy |= {uuid: found.reason for uuid, found in unclean.items()}
        free = set(uuids) - unclean.keys()
        self._users.taken(self._gpus[uuid] for uuid in free)
        return free

    @property
    def _leases(self) -> LeaseFolder:
        if self._folder is None:
            self._folder = LeaseFolder.default()
        return self._folder

    def _refresh(self) -> None:
        machine = self._nvml.snapshot(processes=True, topology=False)
        self._gpus = {uuid: self._refreshed(gpu, machine) for uuid, gpu in self._gpus.items()}

    def _refreshed(self, old: Gpu, machine: Machine) -> Gpu:
        for gpu in machine.gpus:
            if gpu.uuid == old.uuid:
                return replace(gpu, peers=self._peers.get(gpu.uuid, ()))
        return replace(old, problem=machine.problem or "the driver no longer lists it", processes=())

    def _observe(self, uuids: Iterable[str]) -> None:
        checks = {}
        for uuid in uuids:
            gpu = self._gpus[uuid]
            if uuid in self._streaks.left and any(self._is_ours(process) for process in gpu.processes):
                self._busy[uuid] = "our own job is still leaving it"
                continue
            checks[uuid] = idle.check(gpu, self._rule)
        self._streaks = idle.observe(self._streaks, checks, self._rule)
        for uuid, found in checks.items():
            clean = self._streaks.clean.get(uuid, 0)
            self._busy[uuid] = found.reason or f"free for {clean} of {self._rule.max_checks} checks"

    def _is_ours(self, process: GpuProcess) -> bool:
        """Whether a process belongs to an attempt of this queue: what it inherited says so."""
        try:
            return self._tag in Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return False

    def _is_free(self, uuid: str) -> bool:
        return idle.is_free(self._streaks, uuid, self._rule)

    def _verdict(self, uuid: str) -> str | None:
        if uuid in self._held:
            return self._held[uuid]
        return None if self._is_free(uuid) else self._busy[uuid]

    def _note_holder(self, uuid: str, default: str | None = None) -> None:
        """Remembers who holds a lease on this GPU, or forgets it when nobody does any more."""
        holder = self._leases.holder(uuid)
        if holder is not None:
            self._held[uuid] = _held_by(holder)
        elif default is not None:
            self._held[uuid] = default
        else:
            self._held.pop(uuid, None)


def _held_by(holder: Holder) -> str:
    """A sentence about a lease: ``held by gpuherd of alice (pid 4711) for gpt2``."""
    pid = "" if holder.pid is None else f" (pid {holder.pid})"
    return f"held by gpuherd of {holder.user or 'someone'}{pid}" + (f" for {holder.job}" if holder.job else "")
