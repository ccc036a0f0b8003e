"""The state of the GPUs over time: for how long each has been free, who holds its lease, which our jobs just left.

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
from functools import cached_property
from typing import TYPE_CHECKING

from gpuherd.errors import NoSuchGpu
from gpuherd.gpus import idle
from gpuherd.gpus.choose import LinkMap, choose, links_between
from gpuherd.gpus.driver import DRIVER_PAUSE_S
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.state import Gpu, GpuProcess, Machine, Maker
from gpuherd.gpus.visible import find, hides_all, is_named, variable_of, visible_in
from gpuherd.jobs import clock
from gpuherd.jobs.gpu.leasing import GpuLeases
from gpuherd.jobs.gpu.usage import NOTHING, GpuFaults, GpuUsage, Stranger, attempts_of
from gpuherd.jobs.options import GpuOptions
from gpuherd.jobs.scheduler.types import GpuView, fits
from gpuherd.jobs.settings import NO_SETTINGS, Settings

if TYPE_CHECKING:
    from gpuherd.gpus.query import GpuReader

# A GPU that our job has left is looked at again after this many seconds, twice as many the next time, and so on.
_FIRST_LOOK_S = 0.005
# A full look at GPUs all of which are in use, for the reasons that people see.
_FULL_LOOK_S = 5.0
# For this long after another user was on the machine, or took a lease, that user may be between two jobs.
_YOUNG_S = 600.0

_NOT_LOOKED_AT = idle.Check(False, "not looked at yet")
_JUST_LEFT = idle.Check(False, "our own job has just left it")
_STILL_LEAVING = idle.Check(False, "our own job is still leaving it")

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
    """The GPUs that a run may use: none until ``open``.

    Attributes:
        is_open: the driver has been queried.
        problem: a sentence when there are no GPUs, else None.
        maker: whose driver shows them, or should.
        leases: takes GPUs for jobs, within what the user may hold.
        usage: the memory that our attempts use, as of the last look.
        preferred: UUIDs of GPUs that jobs get before all others: those that the user has reserved.
        without_turns: UUIDs of GPUs on which users take no turns: those that somebody has reserved for now.
        awaits_driver: there are none because the installed driver does not answer (yet): jobs that need a GPU wait, and
            each ``look`` queries the driver again. False where no driver is installed: jobs then run on the CPU.

    Args:
        options: which GPUs, and when one is free.
        queue_tag: identifies the attempts of this queue.
        settings: the limits that the user and the machine set.
        at_once: open it now; otherwise when the first job needs a GPU: a run of CPU jobs needs no driver.

    Raises NoSuchGpu when the options name a GPU that is not there, or that the machine's policy keeps for others.
    """

    def __init__(
        self, options: GpuOptions, queue_tag: str, settings: Settings = NO_SETTINGS, *, at_once: bool = True
    ) -> None:
        self._options, self._settings = options, settings
        self._tag = queue_tag
        self._user = user_name(os.geteuid())
        self.is_open = self.awaits_driver = False
        self.problem: str | None = None
        self.maker = Maker.NVIDIA
        self.leases = GpuLeases(settings)
        self.usage = GpuUsage(options.gpu_memory_threshold)
        self.preferred: frozenset[str] = frozenset()
        self.without_turns: frozenset[str] = frozenset()
        self._faults = GpuFaults()
        self._gpus: dict[str, Gpu] = {}  # as the driver last described them
        self._preference: tuple[str, ...] = ()
        self._links: LinkMap = {}
        self._rule = self._rule_of(options)
        self._streaks = idle.Streaks()
        self._checks: dict[str, idle.Check] = {}  # of the last look
        self._haste: dict[str, float] = {}
        # Memory that is free on an idle GPU: less than its total, by the driver's own part.
        self._room_mb: dict[str, int] = {}
        # As of the last look that gave a verdict: the driver is queried for other reasons as well.
        self._was_low: dict[str, bool] = {}
        self._pictured: dict[str, str | int] = {}
        self._kept: Mapping[str, str] = {}
        self._notices: list[str] = []
        self._full_look_at = 0.0
        self._all_ours = False
        # Until then another user may come back to the machine.
        self._others_until = -math.inf
        if at_once:
            self.open()

    @cached_property
    def _reader(self) -> GpuReader:
        from gpuherd.gpus.query import GpuReader  # here: a run of CPU jobs loads no driver

        return GpuReader()

    def open(self) -> None:
        """Queries the driver, unless that was done. Raises NoSuchGpu for a GPU id that is not there."""
        if not self.is_open:
            self._open(self._options, self._settings)

    def _open(self, options: GpuOptions, settings: Settings) -> None:
        machine = self._reader.snapshot(topology=True, errors=True)
        self._choose_gpus(machine, options, settings, named_now=True)
        self._faults.look(machine.gpus)
        self.is_open = True

    def change(self, options: GpuOptions, settings: Settings) -> None:
        """Sets options and settings from now on; what is known of the GPUs stays. Raises NoSuchGpu; then nothing has
        changed. A GPU that was named before, and that the policy has come to keep for others, is left out."""
        if self.is_open:
            self._choose_again(options, settings)
        elif options.gpu_ids:
            # GPUs that are named are looked up at once, not when the first job needs one.
            self._open(options, settings)
        self._options, self._settings = options, settings
        self.usage.change(options.gpu_memory_threshold)
        self.leases.change(settings)

    def _choose_again(self, options: GpuOptions, settings: Settings) -> None:
        before = self.gpus
        machine = self._reader.snapshot(topology=True)
        self._choose_gpus(machine, options, settings, named_now=options.gpu_ids != self._options.gpu_ids)
        excluded = settings.policy.exclude_gpus
        lost = [gpu.label for gpu in before if gpu.uuid not in self._gpus and is_named(gpu, excluded)]
        if lost:
            self._notices.append(
                f"GPU {', '.join(lost)} is not for gpuherd to use any more (exclude_gpus in {settings.policy.path}):"
                " nothing new is started there, and what runs there goes on"
            )

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
        self._gpus = {gpu.uuid: gpu for gpu in kept}
        self._links = links_between(kept)
        self._checks = {uuid: self._checks.get(uuid, _NOT_LOOKED_AT) for uuid in self._gpus}
        self.maker, self.awaits_driver, self.problem = machine.maker, awaits_driver, None
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
        """Those that a job on so many GPUs could get: none that fails, and MIG instances only for a job on one GPU."""
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
        before = self._pictured
        self._get_to_know()
        waited_for = [uuid for uuid in self._gpus if uuid not in ours]
        self._streaks = idle.forgotten(self._streaks, self._rule, now)
        self._refresh(self._gpus)
        if any(self._is_low(self._gpus[uuid].used_mb) for uuid in waited_for):
            # With figures that rank two free GPUs, such as utilisation; and with the other users of the machine.
            self._note_others(self._refresh(), now)
        self._observe(waited_for, now)
        self.leases.look({uuid: self._checks[uuid].free for uuid in waited_for}, now)
        self.leases.ours(ours, now)
        self.leases.turns.look(now, ours)
        low = any(self._is_low(self._gpus[uuid].used_mb) for uuid in waited_for)
        self._full_look_at = now + (self._rule.interval_s if low else max(self._rule.interval_s, _FULL_LOOK_S))
        # Not the picture of before at this moment: a GPU that was kept for others may be so no more just by now.
        self._pictured = self._picture(now, ours)
        return before != self._pictured

    def _ask_driver_again(self, now: float) -> bool:
        self._full_look_at = now + DRIVER_PAUSE_S
        before = self.problem
        machine = self._reader.snapshot(topology=True, errors=True)
        try:
            self._choose_gpus(machine, self._options, self._settings, named_now=True)
        except NoSuchGpu as missing:
            self.problem = str(missing)  # until a GPU of this name appears, or other ones are chosen
        self._faults.look(machine.gpus)
        if not self.awaits_driver:
            self._full_look_at = now
            self._notices.append(f"the {machine.maker} driver answers: {len(self._gpus)} GPUs")
        return before != self.problem

    def _get_to_know(self) -> None:
        """A GPU that the driver could not read at the start may have a name by now."""
        unread = {gpu.index for gpu in self._gpus.values() if gpu.is_unread}
        if not unread:
            return
        machine = self._reader.snapshot(topology=True)
        if any(gpu.index in unread and not gpu.is_unread for gpu in machine.gpus):
            with suppress(NoSuchGpu):  # another one fails just now; the next look tries again
                self._choose_gpus(machine, self._options, self._settings)

    def look_in_s(self, now: float) -> float:
        """Seconds until the next ``look`` is wanted. While our own jobs use all GPUs no other user can free one."""
        if self._all_ours or self.awaits_driver:
            return max(0.0, self._full_look_at - now)
        return max(0.0, min(self._rule.look_s, self._full_look_at - now))

    def rest(self) -> None:
        """No job waits for a GPU any more: gives up what would hinder other gpuherds that do."""
        self.leases.rest()

    def _has_changed(self, uuids: Collection[str]) -> bool:
        """A cheap look: whether a GPU's memory is on the other side of the threshold now, or a lease has ended."""
        used = self._reader.used_mb(uuids)
        for uuid in uuids:
            # GPUs that the cheap look can't read are left to the full ones.
            if uuid in used and self._is_low(used[uuid]) is not self._was_low.get(uuid):
                return True
        return self.leases.any_given_back(uuids)

    def _is_low(self, used_mb: int) -> bool:
        return used_mb < self._rule.memory_threshold_mb

    def released(self, uuids: Collection[str], now: float) -> None:
        """Our job has just left these GPUs: they are looked at soon, and one clean check will do."""
        self.leases.turns.left(uuids, now)
        for uuid in uuids:
            if uuid in self._gpus:
                self._streaks = idle.released(self._streaks, uuid, self._rule, now)
                self._haste[uuid] = 0.0
                self._checks[uuid] = _JUST_LEFT
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
        """Each GPU with the verdict of the last look, unless that is too long ago to count."""
        verdicts = self._verdicts(now, ours)
        left = self._streaks.left
        return tuple(
            GpuView(
                gpu,
                verdicts[uuid],
                uuid in ours,
                returning=left.get(uuid, -math.inf) >= now,
                room_mb=self._room_mb.get(uuid),
                kept=uuid in self._kept,
            )
            for uuid, gpu in self._gpus.items()
        )

    def choose(self, candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
        """The best ``count`` of the candidates, reserved ones first, then in the user's order of preference; None when
        there are too few."""
        reserved = [gpu for gpu in candidates if gpu.uuid in self.preferred] if self.preferred else []
        if len(reserved) >= count > 0 and (chosen := self._choose(reserved, count, memory_mb)) is not None:
            return chosen
        return self._choose(candidates, count, memory_mb, first=[gpu.uuid for gpu in reserved])

    def _choose(
        self, candidates: Sequence[Gpu], count: int, memory_mb: int | None, first: Sequence[str] = ()
    ) -> tuple[Gpu, ...] | None:
        return choose(
            candidates,
            count,
            preference=(*first, *self._preference),
            memory_mb=memory_mb,
            keep_together=True,
            links=self._links,
        )

    def fetch_notices(self) -> tuple[str, ...]:
        """Sentences about the GPUs for people, once each: leases that were passed over, a driver that answers."""
        notices, self._notices = self._notices, []
        return (*notices, *self.leases.fetch_notices())

    # --- while our jobs run -----------------------------------------------------------------------------------

    def strangers(
        self, own: Mapping[str, Collection[str]], declared_mb: Mapping[str, int] = NOTHING
    ) -> tuple[Stranger, ...]:
        """A look at the GPUs on which our jobs run: other users' processes there. It updates ``usage`` too.

        Args:
            own: by GPU's UUID, the tags (GPUHERD_ATTEMPT) of our attempts on it.
            declared_mb: by GPU's UUID, how much memory they may use together, where that is known.
        """
        self._refresh(errors=True)
        self._faults.look(self._gpus.values())
        return self.usage.look(self._gpus, own, declared_mb)

    def machine(self) -> Machine:
        """All GPUs of the machine now, also those that the run may not use, with processes and sensors."""
        return self._reader.snapshot()

    def gpu_problem(self, uuids: Collection[str]) -> str | None:
        """Faults of these GPUs since our job took them, as a sentence; None without any. For a job that has failed."""
        self._refresh(uuids, errors=True)
        return self._faults.problem(self._gpus, uuids)

    # --- taking -----------------------------------------------------------------------------------------------

    def still_free(self, uuids: Collection[str], now: float) -> set[str]:
        """One more look, under the leases: which of these GPUs no process has begun to use since the last one."""
        self._refresh(uuids)
        checks = {uuid: idle.check(self._gpus[uuid], self._rule) for uuid in uuids}
        # A clean look here is no further step in the row of checks; an unclean one ends the row.
        unclean = {uuid: found for uuid, found in checks.items() if not found.free}
        self._streaks = idle.observe(self._streaks, unclean, self._rule, now)
        self._checks |= unclean
        free = set(uuids) - unclean.keys()
        self.usage.taken(self._gpus[uuid] for uuid in free)
        self._faults.taken(free)
        return free

    # --- inside -----------------------------------------------------------------------------------------------

    def _refresh(self, only: Collection[str] | None = None, *, errors: bool = False) -> Machine:
        """Queries the driver: about all GPUs, or about these only, and then about memory and processes only."""
        sensors = only is None or errors
        machine = self._reader.snapshot(errors=errors, sensors=sensors, only=only, known=self._gpus)
        found = {gpu.uuid: gpu for gpu in machine.gpus}
        for uuid in list(self._gpus) if only is None else self._gpus.keys() & only:
            gpu = found.get(uuid)
            if gpu is None:
                problem = machine.problem or "the driver no longer lists it"
                gpu = replace(self._gpus[uuid], problem=problem, processes=())
            self._gpus[uuid] = gpu
        return machine

    def _observe(self, uuids: Iterable[str], now: float) -> None:
        checks = {}
        for uuid in uuids:
            gpu = self._gpus[uuid]
            self._was_low[uuid] = self._is_low(gpu.used_mb)
            if uuid in self._streaks.left and any(self._is_ours(process) for process in gpu.processes):
                self._checks[uuid] = _STILL_LEAVING
                continue
            checks[uuid] = idle.check(gpu, self._rule)
            if checks[uuid].free:
                self._room_mb[uuid] = gpu.free_mb
        self._streaks = idle.observe(self._streaks, checks, self._rule, now)
        self._checks |= checks

    def _is_ours(self, process: GpuProcess) -> bool:
        """Whether a process belongs to an attempt of this queue."""
        return any(tag.startswith(f"{self._tag}/") for tag in attempts_of(process.pid))

    def _is_free(self, uuid: str) -> bool:
        return idle.is_free(self._streaks, uuid, self._rule)

    def _picture(self, now: float, ours: Collection[str]) -> dict[str, str | int]:
        """The facts that a decision depends on: why each GPU can't be used, or how much memory is free on it."""
        verdicts = self._verdicts(now, ours)
        return {uuid: self._gpus[uuid].free_mb if why is None else why for uuid, why in verdicts.items()}

    def _verdicts(self, now: float, ours: Collection[str]) -> dict[str, str | None]:
        """Why each GPU can't be used; None for one that can."""
        recent = idle.forgotten(self._streaks, self._rule, now)
        verdicts: dict[str, str | None] = {}
        for uuid in self._gpus:
            held = self.leases.held(uuid, now)
            if held is None and uuid in self._streaks.clean and uuid not in recent.clean:
                held = "not looked at lately"
            verdicts[uuid] = held or (None if self._is_free(uuid) else self._checks[uuid].reason or self._clean(uuid))
        free = [uuid for uuid, why in verdicts.items() if why is None and uuid not in ours]
        # Those that will be free in a moment count as coming for others who wait for several.
        leaving = self._streaks.left
        coming = [uuid for uuid in self._gpus if self._checks[uuid].free or uuid in leaving]
        free, coming = ([uuid for uuid in some if uuid not in self.without_turns] for some in (free, coming))
        self._kept = self.leases.turns.kept(free, ours, now, coming)
        return {**verdicts, **self._kept}

    def _clean(self, uuid: str) -> str:
        clean = idle.clean_checks(self._streaks, uuid, self._rule)
        return f"free for {clean} of {self._rule.max_checks} checks"
