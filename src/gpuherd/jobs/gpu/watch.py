"""The state of the GPUs over time: how long each has been free, who holds it, and which were just left.

Joins driver, idle rule and leases of ``gpuherd.gpus`` and keeps the state between two looks. A cheap look queries
memory only, at most eight times a second, so that a GPU which another user frees is noticed at once. A full look, with
processes and leases, follows when that has changed, at each check while a GPU is becoming free, and every few seconds
otherwise. ``scheduler.policy`` decides which job gets which GPU.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpuherd.engines.process_tree import ATTEMPT_VARIABLE
from gpuherd.errors import NoSuchGpu
from gpuherd.gpus import idle
from gpuherd.gpus.choose import choose, links_between
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.query import DRIVER_PAUSE_S, GpuReader
from gpuherd.gpus.state import Gpu, GpuProcess, Machine
from gpuherd.gpus.visible import find, hides_all, is_named, variable_of, visible_in
from gpuherd.jobs import clock
from gpuherd.jobs.gpu.leasing import GpuLeases
from gpuherd.jobs.gpu.usage import NOTHING, GpuFaults, GpuUsage, Stranger
from gpuherd.jobs.options import GpuOptions
from gpuherd.jobs.scheduler.types import GpuView, fits
from gpuherd.jobs.settings import NO_SETTINGS, Settings

# A GPU that our job has left is looked at again after this many seconds, twice as many the next time, and so on.
_FIRST_LOOK_S = 0.005
# A full look at GPUs all of which are in use, for the reasons that people see.
_FULL_LOOK_S = 5.0
# For this long after another user was on the machine, or took a lease, that user may be between two jobs.
_YOUNG_S = 600.0


logger = logging.getLogger(__name__)


def watch_for_plan(options: GpuOptions, settings: Settings = NO_SETTINGS) -> GpuWatch:
    """The GPUs for a plan that depends on them. Waits, and logs why, while the installed driver does not answer.

    Raises as ``GpuWatch``.
    """
    watch = GpuWatch(options, "plan", settings)
    if watch.awaits_driver:
        maker, variable = watch.maker, variable_of(watch.maker)
        logger.warning("waiting for the %s driver: %s (%s= uses the CPU)", maker, watch.problem, variable)
    while watch.awaits_driver:
        time.sleep(DRIVER_PAUSE_S)
        watch.look(clock.mono(), ())
    return watch


class GpuWatch:
    """The GPUs that a run may use.

    Attributes:
        problem: a sentence when there are none, else None.
        maker: whose driver shows them, or should.
        leases: takes GPUs for jobs, within what the user may hold.
        usage: the memory that our attempts use, as of the last look.
        awaits_driver: there are none because the installed driver does not answer (yet): jobs that need a GPU wait, and
            each ``look`` asks the driver again. False where no driver is installed: jobs then run on the CPU.

    Raises NoSuchGpu when the options name a GPU that is not there, or that the machine's policy keeps for others.
    """

    def __init__(self, options: GpuOptions, queue_tag: str, settings: Settings = NO_SETTINGS):
        self._reader = GpuReader()
        self._tag = f"{ATTEMPT_VARIABLE}={queue_tag}/".encode()
        self._streaks = idle.Streaks()
        self._busy: dict[str, str] = {}
        self._checks: dict[str, idle.Check] = {}
        self._full_look_at = 0.0
        self._all_ours = False
        self._haste: dict[str, float] = {}
        # What is free on a GPU that nobody uses: less than all, by the driver's own part.
        self._room_mb: dict[str, int] = {}
        self._notices: list[str] = []
        self._options, self._settings = options, settings
        # As of the last look that gave a verdict: the driver is asked for other reasons as well.
        self._was_low: dict[str, bool] = {}
        self.usage = GpuUsage(options.gpu_memory_threshold)
        self._user = user_name(os.geteuid())
        # Until then another user may come back to the machine.
        self._others_until = -math.inf
        self.leases = GpuLeases(settings)
        # Links between GPUs don't change, so they are asked for once.
        machine = self._reader.snapshot(processes=True, topology=True, errors=True)
        self._faults = GpuFaults(machine.gpus)
        self._peers = {gpu.uuid: gpu.peers for gpu in machine.gpus}
        self._choose_gpus(machine, options, settings, named_now=True)

    def change(self, options: GpuOptions, settings: Settings) -> None:
        """Other options and settings hold from now on; what is known of the GPUs stays. Raises NoSuchGpu, and then all
        stays as it was. A GPU that was named before, and that the policy has come to keep for others, is left out."""
        machine = self._reader.snapshot(processes=True, topology=True)
        self._peers |= {gpu.uuid: gpu.peers for gpu in machine.gpus}
        before = self.gpus
        self._choose_gpus(machine, options, settings, named_now=options.gpu_ids != self._options.gpu_ids)
        excluded = settings.policy.exclude_gpus
        lost = [gpu.label for gpu in before if gpu.uuid not in self._gpus and is_named(gpu, excluded)]
        if lost:
            self._notices.append(
                f"GPU {', '.join(lost)} is not for gpuherd to use any more (exclude_gpus in {settings.policy.path}):"
                " nothing new is started there, and what runs there goes on"
            )
        self._options, self._settings = options, settings
        self.usage.change(options.gpu_memory_threshold)
        self.leases.change(settings)

    def _choose_gpus(
        self, machine: Machine, options: GpuOptions, settings: Settings, *, named_now: bool = False
    ) -> None:
        excluded = settings.policy.exclude_gpus
        hidden_all = hides_all(os.environ, machine.maker)
        seen = visible_in(machine.gpus, os.environ)
        awaits_driver = machine.may_pass and not hidden_all
        chosen = find(seen, options.gpu_ids) if options.gpu_ids and not awaits_driver else seen
        kept = [gpu for gpu in chosen if not is_named(gpu, excluded)]
        if named_now and options.gpu_ids and len(kept) < len(chosen):
            labels = ", ".join(gpu.label for gpu in chosen if gpu not in kept)
            raise NoSuchGpu(f"GPU {labels} is not for gpuherd to use: exclude_gpus in {settings.policy.path}")
        self._preference = tuple(gpu.uuid for gpu in kept) if options.gpu_ids else ()
        self._rule = self._rule_of(options)
        # What the driver last said.
        self._gpus = {gpu.uuid: gpu for gpu in kept}
        self._links = links_between(kept)
        self._busy = {uuid: self._busy.get(uuid, "not looked at yet") for uuid in self._gpus}
        self.maker, self.awaits_driver = machine.maker, awaits_driver
        self.problem: str | None = None
        if not chosen:
            hidden = f"no GPU is visible ({variable_of(machine.maker)} hides them)"
            self.problem = hidden if hidden_all else machine.problem or hidden
        elif not kept:
            self.problem = f"the machine's policy keeps all GPUs from gpuherd (exclude_gpus in {settings.policy.path})"

    def _rule_of(self, options: GpuOptions, *, alone: bool = False) -> idle.IdleRule:
        checks = options.max_checks or (idle.CHECKS_ALONE if alone else idle.MAX_CHECKS)
        return idle.IdleRule(options.gpu_memory_threshold, checks, options.check_interval)

    def _note_others(self, machine: Machine, now: float) -> None:
        """Reduces the checks while no other user is, or just was, on any GPU of the machine."""
        if idle.others_use(machine.gpus, self._rule, self._user) or self.leases.others_took_one(_YOUNG_S):
            self._others_until = now + _YOUNG_S
        self._rule = self._rule_of(self._options, alone=now >= self._others_until)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs as the driver last described them."""
        return tuple(self._gpus.values())

    def able(self, gpus: int) -> tuple[Gpu, ...]:
        """Those that a job on so many GPUs could be given: none that the driver says fails, and MIG instances to a job
        on one GPU alone."""
        return tuple(gpu for gpu in self._gpus.values() if gpu.problem is None and fits(gpu, gpus, None))

    def most_mb(self, gpus: int) -> int | None:
        """The most memory that a job could find free on each of so many GPUs, None where there are fewer."""
        rooms = sorted((self._room_mb.get(gpu.uuid, gpu.total_mb) for gpu in self.able(gpus)), reverse=True)
        return rooms[gpus - 1] if 1 <= gpus <= len(rooms) else None

    @property
    def quiet_s(self) -> float:
        """For how long a GPU must have been free of others until it is taken, in seconds, where there are others."""
        return self._rule_of(self._options).quiet_s

    @property
    def checks(self) -> int:
        """So many checks in a row must find a GPU free, by the last look."""
        return self._rule.max_checks

    # --- looking ----------------------------------------------------------------------------------------------

    def look(self, now: float, ours: Collection[str]) -> bool:
        """A look, wanted ``look_in_s`` after the last one while a job waits for a GPU: at all GPUs but those that our
        jobs use (``ours``). Returns whether a verdict has changed, so that a decision is worth while."""
        if self.awaits_driver:
            return self._ask_driver_again(now)
        waited_for = [uuid for uuid in self._gpus if uuid not in ours]
        self._all_ours = not waited_for
        # A full one that is due before the next half look is made now: to wake up costs more than to look.
        if now + self._rule.look_s / 2 < self._full_look_at and not self._has_changed(waited_for):
            return False
        before = self._picture(now)
        self._get_to_know()
        waited_for = [uuid for uuid in self._gpus if uuid not in ours]
        self._streaks = idle.forgotten(self._streaks, self._rule, now)
        self._refresh(self._gpus)
        if any(self._is_low(self._gpus[uuid].used_mb) for uuid in waited_for):
            # Also what tells the better of two that are free, like how much they compute; and who else is here.
            self._note_others(self._refresh_all(), now)
        self._observe(waited_for, now)
        unused = {uuid: self._checks[uuid].free for uuid in waited_for if uuid in self._checks}
        self.leases.look(unused, now)
        self.leases.ours(ours, now)
        low = any(self._is_low(self._gpus[uuid].used_mb) for uuid in waited_for)
        self._full_look_at = now + (self._rule.interval_s if low else max(self._rule.interval_s, _FULL_LOOK_S))
        return before != self._picture(now)

    def _ask_driver_again(self, now: float) -> bool:
        self._full_look_at = now + DRIVER_PAUSE_S
        before = self.problem
        machine = self._reader.snapshot(processes=True, topology=True, errors=True)
        try:
            self._choose_gpus(machine, self._options, self._settings, named_now=True)
        except NoSuchGpu as missing:
            self.problem = str(missing)  # until a GPU of this name appears, or other ones are chosen
        self._faults.look(machine.gpus)
        self._peers = {gpu.uuid: gpu.peers for gpu in machine.gpus}
        if not self.awaits_driver:
            self._full_look_at = now
            self._notices.append(f"the {machine.maker} driver answers: {len(self._gpus)} GPUs")
        return before != self.problem

    def _get_to_know(self) -> None:
        """A GPU that the driver could not tell anything of at the start may have a name by now."""
        unread = {gpu.index for gpu in self._gpus.values() if gpu.is_unread}
        if not unread:
            return
        machine = self._reader.snapshot(processes=True, topology=True)
        if any(gpu.index in unread and not gpu.is_unread for gpu in machine.gpus):
            with suppress(NoSuchGpu):  # Another one is in trouble just now: the next look will do.
                self._choose_gpus(machine, self._options, self._settings)
                self._peers |= {gpu.uuid: gpu.peers for gpu in machine.gpus}

    def look_in_s(self, now: float) -> float:
        """Seconds until the next ``look`` is wanted. While our own jobs use all GPUs nobody else can free one."""
        if self._all_ours or self.awaits_driver:
            return max(0.0, self._full_look_at - now)
        return max(0.0, min(self._rule.look_s, self._full_look_at - now))

    def rest(self) -> None:
        """No job waits for a GPU any more: nothing of ours shall be in the way of those who do."""
        self.leases.rest()

    def _has_changed(self, uuids: Collection[str]) -> bool:
        """A cheap look: whether a GPU's memory is on the other side of the threshold now, or a lease has ended."""
        used = self._reader.used_mb(uuids)
        for uuid in uuids:
            # What the cheap look does not tell of is left to the full ones.
            if uuid in used and self._is_low(used[uuid]) is not self._was_low.get(uuid):
                return True
        return self.leases.any_given_back(uuids)

    def _is_low(self, used_mb: int) -> bool:
        return used_mb < self._rule.memory_threshold_mb

    def released(self, uuids: Collection[str], now: float) -> None:
        """Our job has just left these GPUs: they are looked at soon, and one clean check will do."""
        for uuid in uuids:
            if uuid in self._gpus:
                self._streaks = idle.released(self._streaks, uuid, self._rule, now)
                self._haste[uuid] = 0.0
                self._busy[uuid] = "our own job has just left it"
                self._full_look_at = min(self._full_look_at, now + self._rule.interval_s)
                self._all_ours = False

    def hasty_look(self, ours: Collection[str], now: float) -> None:
        """A look at the GPUs that our jobs have just left, between two regular ones."""
        due = [uuid for uuid in self._haste if uuid not in ours]
        self._refresh(due)
        self._observe(due, now)
        self._haste = {
            uuid: max(_FIRST_LOOK_S, 2 * wait)
            for uuid, wait in self._haste.items()
            if uuid in due and not self._is_free(uuid) and 2 * wait < self._rule.interval_s
        }

    @property
    def haste_s(self) -> float | None:
        """Seconds until ``hasty_look`` is wanted, None for not at all."""
        return min(self._haste.values(), default=None)

    def views(self, now: float, ours: Collection[str]) -> tuple[GpuView, ...]:
        """Each GPU with the verdict of the last look. One so long ago that it says nothing any more is forgotten."""
        verdicts = self._verdicts(now)
        left = self._streaks.left
        return tuple(
            GpuView(
                gpu,
                verdicts[uuid],
                uuid in ours,
                returning=left.get(uuid, -math.inf) >= now,
                room_mb=self._room_mb.get(uuid),
            )
            for uuid, gpu in self._gpus.items()
        )

    def choose(self, candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
        """The best ``count`` of the candidates, in the user's order of preference; None when there are too few."""
        return choose(
            candidates,
            count,
            preference=self._preference,
            memory_mb=memory_mb,
            keep_together=True,
            links=self._links,
        )

    def fetch_notices(self) -> tuple[str, ...]:
        """What people should be told of the GPUs, once each: leases that were passed over."""
        notices, self._notices = self._notices, []
        return (*notices, *self.leases.fetch_notices())

    # --- while our jobs run -----------------------------------------------------------------------------------

    def strangers(
        self, own: Mapping[str, Collection[str]], declared_mb: Mapping[str, int] = NOTHING
    ) -> tuple[Stranger, ...]:
        """A look at the GPUs on which our jobs run, every ``WATCH_EVERY_S``: who else is there. It feeds ``peaks`` too.

        Args:
            own: by GPU's UUID, the tags (GPUHERD_ATTEMPT) of our attempts on it.
            declared_mb: by GPU's UUID, how much memory they may use together, where that is known.
        """
        self._refresh(errors=True)
        self._faults.look(self._gpus.values())
        return self.usage.look(self._gpus, own, declared_mb)

    def gpu_problem(self, uuids: Collection[str]) -> str | None:
        """What the driver says against these GPUs since our job took them, as a sentence: asked when a job has failed.
        None for nothing."""
        self._refresh(uuids, errors=True)
        return self._faults.problem(self._gpus, uuids)

    # --- taking -----------------------------------------------------------------------------------------------

    def still_free(self, uuids: Collection[str], now: float) -> set[str]:
        """One more look, under the leases: which of these GPUs nobody has begun to use since the last one."""
        self._refresh(uuids)
        checks = {uuid: idle.check(self._gpus[uuid], self._rule) for uuid in uuids}
        # A clean look here is no further step in the row of checks; an unclean one ends the row.
        unclean = {uuid: found for uuid, found in checks.items() if not found.free}
        self._streaks = idle.observe(self._streaks, unclean, self._rule, now)
        self._busy |= {uuid: found.reason for uuid, found in unclean.items()}
        free = set(uuids) - unclean.keys()
        self.usage.taken(self._gpus[uuid] for uuid in free)
        self._faults.taken(free)
        return free

    # --- inside -----------------------------------------------------------------------------------------------

    def _refresh(self, only: Collection[str] | None = None, *, errors: bool = False) -> None:
        """Asks the driver anew: of all GPUs, or of these only, then what changes by itself: memory and processes."""
        if only is not None and not errors:
            renewed = self._reader.renewed([self._gpus[uuid] for uuid in self._gpus.keys() & only])
            if renewed:
                self._gpus |= renewed
                return
        machine = self._reader.snapshot(processes=True, topology=False, errors=errors, only=only)
        self._update(machine, self._gpus if only is None else self._gpus.keys() & only)

    def _refresh_all(self) -> Machine:
        machine = self._reader.snapshot(processes=True, topology=False)
        self._update(machine, self._gpus)
        return machine

    def _update(self, machine: Machine, uuids: Collection[str]) -> None:
        for uuid in uuids:
            self._gpus[uuid] = self._refreshed(self._gpus[uuid], machine)

    def _refreshed(self, old: Gpu, machine: Machine) -> Gpu:
        for gpu in machine.gpus:
            if gpu.uuid == old.uuid:
                return replace(gpu, peers=self._peers.get(gpu.uuid, ()))
        return replace(old, problem=machine.problem or "the driver no longer lists it", processes=())

    def _observe(self, uuids: Iterable[str], now: float) -> None:
        checks = {}
        for uuid in uuids:
            gpu = self._gpus[uuid]
            self._was_low[uuid] = self._is_low(gpu.used_mb)
            if uuid in self._streaks.left and any(self._is_ours(process) for process in gpu.processes):
                self._busy[uuid] = "our own job is still leaving it"
                continue
            checks[uuid] = idle.check(gpu, self._rule)
        self._streaks = idle.observe(self._streaks, checks, self._rule, now)
        self._checks |= checks
        for uuid, found in checks.items():
            if found.free:
                self._room_mb[uuid] = self._gpus[uuid].free_mb
            clean = idle.clean_checks(self._streaks, uuid, self._rule)
            self._busy[uuid] = found.reason or f"free for {clean} of {self._rule.max_checks} checks"

    def _is_ours(self, process: GpuProcess) -> bool:
        """Whether a process belongs to an attempt of this queue: what it inherited says so."""
        try:
            return self._tag in Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return False

    def _is_free(self, uuid: str) -> bool:
        return idle.is_free(self._streaks, uuid, self._rule)

    def _picture(self, now: float) -> dict[str, str | int]:
        """What a decision goes by: why each GPU is not to be had, or how much memory is free on it."""
        verdicts = self._verdicts(now)
        return {uuid: self._gpus[uuid].free_mb if why is None else why for uuid, why in verdicts.items()}

    def _verdicts(self, now: float) -> dict[str, str | None]:
        """Why each GPU is not to be had; None for one that is."""
        recent = idle.forgotten(self._streaks, self._rule, now)
        verdicts: dict[str, str | None] = {}
        for uuid in self._gpus:
            held = self.leases.held(uuid, now)
            if held is None and uuid in self._streaks.clean and uuid not in recent.clean:
                held = "not looked at lately"
            verdicts[uuid] = held or (None if self._is_free(uuid) else self._busy[uuid])
        return verdicts
