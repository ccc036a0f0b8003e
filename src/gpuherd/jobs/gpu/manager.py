"""The dispatcher's GPUs: when to query them, which may be used, and the leases of those that several jobs share.

Joins the state of the GPUs (``watch``) with GPUs left out because jobs fail on them (``health``), memory promised on
shared ones (``scheduler.memory``), and contention with other users (``usage``). ``scheduler.policy`` decides which job
gets which GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuherd.gpus.state import Gpu, Maker
from gpuherd.gpus.visible import variable_of
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.attempts.supervise import Attempt, Supervisor
from gpuherd.jobs.completion import Observed
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.gpu.usage import Action, OurAttempt, Sightings, Stranger, contention_actions
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import AttemptRecord, PauseReason, QueuedJob
from gpuherd.jobs.scheduler import memory
from gpuherd.jobs.scheduler.limits import Allowance
from gpuherd.jobs.scheduler.types import GpuView, Start
from gpuherd.jobs.settings import NO_SETTINGS, Settings

if TYPE_CHECKING:
    from gpuherd.gpus.leases import Lease
    from gpuherd.jobs.gpu.watch import GpuWatch

# Seconds between two looks at the GPUs of running jobs, for strangers and memory.
WATCH_EVERY_S = 2.0
# Memory in use on shared GPUs is queried again before a decision when the figure is older than this.
_STALE_S = 0.05


class GpuManager:
    """The GPUs that a run may use, from the moment when the first job wants one (``open``).

    Attributes:
        changed: a look has found something, so that a decision may come out otherwise.
    """

    def __init__(
        self,
        options: DispatchOptions,
        queue_tag: str,
        supervisor: Supervisor,
        health: GpuHealth,
        settings: Settings = NO_SETTINGS,
    ):
        self._options = options
        self._settings = settings
        self._tag = queue_tag
        self._supervisor = supervisor
        self._health = health
        self._watch: GpuWatch | None = None
        self._shared: dict[str, Lease] = {}
        self._peaks: dict[str, int] = {}
        self._sightings = Sightings()
        self._notices: tuple[str, ...] = ()
        self._told: set[str] = set()
        self._wanted = False
        self._check_at = 0.0
        self._haste_at: float | None = None
        self._ours_at: float | None = None
        self._seen_at = 0.0
        self.changed = False

    # --- what there is ----------------------------------------------------------------------------------------

    def open(self) -> None:
        """The first job that wants a GPU is there. Raises NoSuchGpu for a GPU id that is not."""
        if self._watch is None:
            # Only now: a run of CPU jobs needs no driver.
            from gpuherd.jobs.gpu.watch import GpuWatch

            self._watch = GpuWatch(self._options, self._tag, self._settings)

    def retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Other GPUs, another free test or other limits from now on. Raises NoSuchGpu; then nothing is changed."""
        if self._watch is not None:
            self._watch.change(options, settings)
        elif options.gpu_ids:
            # GPUs that are named are looked for at once, not when the first job wants one.
            from gpuherd.jobs.gpu.watch import GpuWatch

            self._watch = GpuWatch(options, self._tag, settings)
        self._options, self._settings = options, settings
        self._check_at = 0.0

    def allowance(self) -> Allowance:
        """How many GPUs the run may hold now, by the user's and the machine's settings."""
        return Allowance() if self._watch is None else self._watch.leases.allowance(self._supervisor.gpus)

    def fetch_notices(self) -> tuple[str, ...]:
        """What people should be told of the GPUs, once each."""
        notices, self._notices = self._notices, ()
        returned = self._health.fetch_returned(clock.wall())
        back = (f"GPU {label} is {sentence}" for label, sentence in self._labelled(returned))
        return notices if self._watch is None else (*notices, *back, *self._watch.fetch_notices())

    def fetch_left_out(self, wall: float) -> tuple[tuple[str, str], ...]:
        """The label of each GPU that has been left out since the last call, and a sentence on how long and why."""
        return self._labelled(self._health.fetch_news(wall))

    def _labelled(self, told: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        labels = {gpu.uuid: gpu.label for gpu in self.gpus} if told else {}
        return tuple((labels.get(uuid, uuid), sentence) for uuid, sentence in told.items())

    def close(self) -> None:
        """Gives our copies of leases back; those of running jobs stay with them."""
        for lease in self._shared.values():
            lease.close()
        self._shared.clear()

    @property
    def is_open(self) -> bool:
        """Whether a job has wanted a GPU yet."""
        return self._watch is not None

    @property
    def problem(self) -> str | None:
        """Why there are no GPUs, None when there are some or nobody wants one."""
        return None if self._watch is None else self._watch.problem

    @property
    def hiding_variable(self) -> str:
        """The environment variable that, when empty, runs jobs on the CPU."""
        return variable_of(Maker.NVIDIA if self._watch is None else self._watch.maker)

    @property
    def awaits_driver(self) -> bool:
        """Whether there are no GPUs because the installed driver does not answer: jobs that need one wait."""
        return self._watch is not None and self._watch.awaits_driver

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs as the driver last described them."""
        return () if self._watch is None else self._watch.gpus

    def count_elsewhere(self) -> int:
        """How many GPUs our jobs use that the run may not use any more."""
        known = {gpu.uuid for gpu in self.gpus}
        return len(self._supervisor.gpus - known)

    # --- when to look -----------------------------------------------------------------------------------------

    def wanted(self, waits: bool, now: float) -> None:
        """Whether a job waits for a GPU: only then are those that are not ours looked at."""
        if waits and not self._wanted and self._watch is not None:
            self._check_at = max(self._check_at, now)
            self._haste_at = None if self._watch.haste_s is None else now + self._watch.haste_s
        elif self._wanted and not waits and self._watch is not None:
            self._watch.rest()
        self._wanted = waits

    def next_at(self, *, may_start: bool) -> float | None:
        """When ``keep_time`` has something to do, None for never."""
        times = [self._ours_at]
        if self._wanted and may_start:
            times += [self._check_at, self._haste_at]
        return min((at for at in times if at is not None), default=None)

    def keep_time(self, now: float, *, may_start: bool) -> tuple[Action, ...]:
        """Looks, if it is time. Returns what strangers on our GPUs make us do."""
        watch = self._watch
        if watch is None:
            return ()
        if self._wanted and may_start:
            self._look_for_free(watch, now)
        if self._ours_at is None or now < self._ours_at:
            return ()
        self._ours_at = now + WATCH_EVERY_S if self._supervisor.gpus else None
        return self._look_at_ours(watch, now)

    def started(self, now: float) -> None:
        """Jobs of ours have been started or taken over: their GPUs are looked at from now on."""
        if self._ours_at is None and self._supervisor.gpus:
            self._ours_at = now + WATCH_EVERY_S

    def _look_for_free(self, watch: GpuWatch, now: float) -> None:
        ours = self._supervisor.gpus
        if now >= self._check_at:
            self.changed |= watch.look(now, ours)
            self._check_at = now + watch.look_in_s(now)
        if self._haste_at is not None and now >= self._haste_at:
            watch.hasty_look(ours, now)
            wait = watch.haste_s
            self._haste_at = None if wait is None else now + wait
            self.changed = True

    def _look_at_ours(self, watch: GpuWatch, now: float) -> tuple[Action, ...]:
        strangers = self._note_use(watch, now)
        running = [attempt for attempt in self._supervisor.running.values() if attempt.record.gpus]
        actions, self._sightings = contention_actions(
            self._options.yield_to_others,
            self._sightings,
            strangers,
            [
                OurAttempt(attempt.record.id, clean(attempt.record.title), frozenset(attempt.record.gpus))
                for attempt in running
                if attempt.kill_at is None
            ],
            {attempt.record.id for attempt in running if PauseReason.STRANGER in attempt.paused},
            now=now,
            quiet_s=watch.quiet_s,
        )
        return actions

    def _note_use(self, watch: GpuWatch, now: float) -> tuple[Stranger, ...]:
        self._seen_at = now
        strangers = watch.strangers(*self._ours())
        self._peaks.update(watch.usage.peaks)
        for attempt in self._supervisor.running.values():
            if attempt.record.shared_mb is not None and attempt.tag not in self._told:
                # Promised less than it declares, it is told of only when it uses more than that.
                declared_mb = max(attempt.record.shared_mb, attempt.record.queued.memory_mb or 0)
                tenant = replace(self._tenant(attempt), declared_mb=declared_mb)
                for found in memory.overuses([tenant], self._options.gpu_memory_threshold):
                    self._told.add(attempt.tag)
                    self._notices += (f"{clean(attempt.record.title)} {found.sentence}",)
        return strangers

    def _ours(self) -> tuple[Mapping[str, Collection[str]], Mapping[str, int]]:
        own: dict[str, list[str]] = defaultdict(list)
        declared: dict[str, int] = defaultdict(int)
        unknown = set()
        for attempt in self._supervisor.running.values():
            for uuid in attempt.record.gpus:
                own[uuid].append(attempt.tag)
                memory_mb = attempt.record.queued.memory_mb
                if memory_mb is None:
                    unknown.add(uuid)
                else:
                    # Promised more than it declared, or less: by what was learned of its family.
                    declared[uuid] += max(memory_mb, attempt.record.shared_mb or 0)
        return own, {uuid: mb for uuid, mb in declared.items() if uuid not in unknown}

    # --- what may be had --------------------------------------------------------------------------------------

    def views(self, now: float, wall: float) -> tuple[GpuView, ...]:
        """Each GPU with the verdict on it."""
        if self._watch is None:
            return ()
        if self._shared and now - self._seen_at > _STALE_S:
            # What is promised on shared GPUs is compared with what is free on them now.
            self._note_use(self._watch, now)
        left_out = self._health.excluded(wall)
        views = self._watch.views(now, self._supervisor.gpus)
        over_at = self._supervisor.over_at
        if not left_out and not self._shared and not over_at:
            return views
        tenants = self._tenants() if self._shared else {}
        return tuple(self._overlaid(view, left_out, over_at, tenants) for view in views)

    def _overlaid(
        self,
        view: GpuView,
        left_out: Mapping[str, str],
        over_at: Mapping[str, float],
        tenants: Mapping[str, Sequence[memory.Tenant]],
    ) -> GpuView:
        uuid = view.gpu.uuid
        if uuid in left_out:
            return replace(view, busy=left_out[uuid], shareable_mb=None)
        if view.ours and uuid in self._shared:
            return replace(view, shareable_mb=self._shareable_mb(view.gpu, tenants.get(uuid)))
        if view.ours and uuid in over_at:
            return replace(view, over_at=over_at[uuid])
        return view

    def _tenants(self) -> dict[str, list[memory.Tenant]]:
        """By UUID, who shares the GPU; without those on which a job of ours does not share."""
        found: dict[str, list[memory.Tenant]] = defaultdict(list)
        alone: set[str] = set()
        for attempt in self._supervisor.running.values():
            if attempt.record.shared_mb is None:
                alone.update(attempt.record.gpus)
            else:
                for uuid in attempt.record.gpus:
                    found[uuid].append(self._tenant(attempt))
        return {uuid: tenants for uuid, tenants in found.items() if uuid not in alone}

    def _shareable_mb(self, gpu: Gpu, tenants: Sequence[memory.Tenant] | None) -> int | None:
        idle_mb = None if self._watch is None else self._watch.usage.idle_mb(gpu.uuid)
        return None if tenants is None else memory.shareable_mb(gpu, tenants, idle_mb)

    def _tenant(self, attempt: Attempt) -> memory.Tenant:
        return memory.Tenant(
            attempt.record.queued.job.name,
            attempt.record.shared_mb or 0,
            learned_mb=self._peaks.get(attempt.tag),
            now_mb=None if self._watch is None else self._watch.usage.in_use.get(attempt.tag),
        )

    def most_mb(self, gpus: int) -> int | None:
        """The most memory that a job could ever find free on each of so many GPUs, None where there are fewer."""
        return None if self._watch is None else self._watch.most_mb(gpus)

    def choose(self, candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
        """The best ``count`` of the candidates, None when there are too few."""
        return None if self._watch is None else self._watch.choose(candidates, count, memory_mb)

    # --- taking and giving back -------------------------------------------------------------------------------

    def open_ahead(self) -> dict[str, Lease]:
        """By UUID, the lock files of the GPUs that jobs of ours have for themselves, open and not locked: for a process
        that is started before one of these is free."""
        if self._watch is None:
            return {}
        return self._watch.leases.open_ahead(self._supervisor.gpus - self._shared.keys())

    def take(
        self, start: Start, queued: QueuedJob, held: ExitStack, ahead: Mapping[str, Lease]
    ) -> tuple[Lease, ...] | None:
        """The leases for a start, None when somebody else was faster.

        ``held`` closes our copies of them when the job has its own. That of a GPU which others may share stays with us.
        ``ahead``: what ``open_ahead`` opened for this job, {} for nothing.
        """
        if self._watch is None or not start.gpus:
            return ()
        if start.shared and start.gpus[0].uuid in self._shared:
            return (self._shared[start.gpus[0].uuid],)
        leases = self._watch.leases.take(start.gpus, clean(queued.job.title or queued.job.name), clock.mono(), ahead)
        if leases is None:
            return None
        if start.shared:
            self._shared[leases[0].uuid] = leases[0]
        else:
            for lease in leases:
                held.enter_context(lease)
        return leases

    def still_free(self, starts: Sequence[Start]) -> set[str]:
        """One more look, under the leases: which of these GPUs nobody but those whom we know has begun to use."""
        ours = self._supervisor.gpus
        uuids = {gpu.uuid for start in starts for gpu in start.gpus}
        fresh = uuids - ours
        free = set(uuids & ours)
        if self._watch is not None and fresh:
            free |= self._watch.still_free(fresh, clock.mono())
        return free

    def released(self, record: AttemptRecord, now: float) -> None:
        """Our job has left its GPUs: they are looked at soon, and the lease of a shared one goes with the last."""
        if self._watch is None or not record.gpus:
            return
        left = set(record.gpus) - self._supervisor.gpus
        self.drop_unused()
        if left:
            self._watch.released(left, now)
            self._haste_at = now
            self._check_at = min(self._check_at, now + self._watch.look_in_s(now))

    def drop_unused(self) -> None:
        """Closes the leases of shared GPUs on which nobody of ours runs any more."""
        for uuid in self._shared.keys() - self._supervisor.gpus:
            self._shared.pop(uuid).close()

    def observed(self, attempt: Attempt, *, disk_low: bool) -> Observed:
        """GPUs and memory as they were observed for an attempt that has ended."""
        record = attempt.record
        if self._watch is not None and attempt.tag in self._watch.usage.peaks:
            self._peaks[attempt.tag] = self._watch.usage.peaks[attempt.tag]
        peak = self._peaks.pop(attempt.tag, None)
        self._told.discard(attempt.tag)
        here = [gpu for gpu in self.gpus if gpu.uuid in record.gpus]
        smallest = min((gpu.total_mb for gpu in here), default=None)
        able = () if self._watch is None else self._watch.able(len(record.gpus))
        larger = smallest is not None and sum(gpu.total_mb > smallest for gpu in able) >= len(record.gpus)
        return Observed(
            gpus=record.gpus,
            faulty=tuple(gpu.uuid for gpu in here if gpu.problem is not None),
            peak_mb=peak,
            from_start=not attempt.adopted,
            most_mb=self.most_mb(len(record.gpus)),
            gpu_total_mb=smallest,
            larger_exists=larger,
            disk_low=disk_low,
            on_trial=self._health.is_on_trial(record.gpus, clock.wall()),
        )

    def problem_of(self, record: AttemptRecord) -> str | None:
        """What the driver says against the GPUs of an attempt that has failed, since it took them."""
        return self._watch.gpu_problem(record.gpus) if self._watch is not None and record.gpus else None
