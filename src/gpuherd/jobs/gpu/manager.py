"""The dispatcher's GPUs: when to query them, which may be used, and the leases of those that several jobs share.

Joins the state of the GPUs (``watch``) with GPUs left out because jobs fail on them (``health``), reservations
(``reserved``), memory promised on shared ones (``scheduler.memory``), contention with other users (``usage``), and jobs
that don't use their GPUs (``idle_jobs``). ``scheduler.policy`` decides which job gets which GPU.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuherd.errors import clean
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.tickets import Need
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.supervise import Attempt, Supervisor
from gpuherd.jobs.completion import Observed
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.gpu.idle_jobs import IdleAction, JobIdleRows, JobLook, idle_actions, is_used
from gpuherd.jobs.gpu.recording import AttemptLedger
from gpuherd.jobs.gpu.reserved import ReservedGpus
from gpuherd.jobs.gpu.usage import Action, OurAttempt, Sightings, Stranger, contention_actions
from gpuherd.jobs.gpu.watch import GpuWatch
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import AttemptRecord, PauseReason, QueuedJob
from gpuherd.jobs.scheduler import memory
from gpuherd.jobs.scheduler.limits import Allowance
from gpuherd.jobs.scheduler.types import GpuView, Start, fits
from gpuherd.jobs.settings import NO_SETTINGS, Settings

if TYPE_CHECKING:
    from gpuherd.gpus.leases import Lease

# Seconds between two looks at the GPUs of running jobs, for strangers and memory.
WATCH_EVERY_S = 2.0
# The length of jobs that wait is expected to be that of so many before them.
_LENGTHS = 20
# Others' use of GPUs is recorded as often while jobs wait and none runs.
SAMPLE_EVERY_S = 10.0
# Memory in use on shared GPUs is queried again before a decision when the figure is older than this.
_STALE_S = 0.05


class GpuManager:
    """The GPUs of a dispatcher.

    Attributes:
        watch: the state of the GPUs; open from the moment when the first job needs one.
        reserved: the reservations of the machine's users.
        ledger: where the use of the GPUs is recorded.
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
        self.watch = GpuWatch(options, queue_tag, settings, at_once=False)
        self.reserved = ReservedGpus(settings)
        self.ledger = AttemptLedger(queue_tag, supervisor.run.root, self.watch, options.project)
        self.changed = False
        self._options = options
        self._supervisor = supervisor
        self._health = health
        self._shared: dict[str, Lease] = {}
        self._sightings: Sightings = {}
        self._idle_rows: JobIdleRows = {}
        self._idle_actions: tuple[IdleAction, ...] = ()
        self._notices: tuple[str, ...] = ()
        self._overuse_reported: set[str] = set()
        self._wanted = False
        self._check_at = 0.0
        self._haste_at: float | None = None
        self._ours_at: float | None = None
        self._seen_at = 0.0
        self._lengths: deque[float] = deque(maxlen=_LENGTHS)  # seconds of the latest jobs on GPUs

    # --- options and reports ----------------------------------------------------------------------------------

    def retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Sets which GPUs, the free test and the limits from now on. Raises NoSuchGpu; then nothing has changed."""
        self.watch.change(options, settings)
        self.reserved.change(settings)
        self._options = options
        self._check_at = 0.0

    def allowance(self) -> Allowance:
        """The number of GPUs that the run may hold now, by the user's and the machine's settings."""
        return self.watch.leases.allowance(self._supervisor.gpus) if self.watch.is_open else Allowance()

    def fetch_notices(self) -> tuple[str, ...]:
        """Sentences about the GPUs for people, once each."""
        notices, self._notices = self._notices, ()
        returned = self._health.fetch_returned(clock.wall())
        back = (f"GPU {label} is {sentence}" for label, sentence in self._labelled(returned))
        return (*notices, *back, *self.watch.fetch_notices(), *self.reserved.fetch_notices())

    def fetch_left_out(self, wall: float) -> tuple[tuple[str, str], ...]:
        """The label of each GPU that has been left out since the last call, and a sentence on how long and why."""
        return self._labelled(self._health.fetch_news(wall))

    def _labelled(self, sentences: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        labels = {gpu.uuid: gpu.label for gpu in self.watch.gpus}
        return tuple((labels.get(uuid, uuid), sentence) for uuid, sentence in sentences.items())

    def close(self) -> None:
        """Gives our copies of leases back; those of running jobs stay with them."""
        self.ledger.close()
        for lease in self._shared.values():
            lease.close()
        self._shared.clear()
        self.watch.rest()

    def count_elsewhere(self) -> int:
        """The number of GPUs that our jobs use and the run may not use any more."""
        return len(self._supervisor.gpus - {gpu.uuid for gpu in self.watch.gpus})

    # --- when to look -----------------------------------------------------------------------------------------

    def set_waiting(self, waits: bool, now: float, need: Need | None = None) -> None:
        """Sets whether a job waits for a GPU: only then are those that are not ours looked at. ``need``: for
        the ticket."""
        if waits and need is not None:
            self.watch.leases.turns.wait(need, now)
        if waits and not self._wanted:
            self._check_at = max(self._check_at, now)
            self._plan_hasty_look(now)
            if self._ours_at is None:
                self._ours_at = now + SAMPLE_EVERY_S
        elif self._wanted and not waits:
            self.watch.rest()
        self._wanted = waits

    def need(self, waiting: Sequence[QueuedJob], most_gpus: int, jobs: int, wall: float) -> Need:
        """What the jobs that wait for GPUs need, for the ticket.

        Args:
            waiting: the first of them, in order.
            most_gpus: how many GPUs the run may hold now.
            jobs: how many there are.
        """
        kinds = {(queued.gpus, queued.memory_mb) for queued in waiting}
        left_out = self._health.excluded(wall)
        usable = [gpu.uuid for gpu in self.watch.gpus if any(fits(gpu, *kind) for kind in kinds)]
        most = min(sum(queued.gpus for queued in waiting), most_gpus - len(self._supervisor.gpus))
        # Those behind the first one don't overtake it: what it lacks is reserved for it.
        return Need(
            gpus=max(0, most),
            smallest=waiting[0].gpus,
            usable=frozenset(usable).difference(left_out),
            job_s=round(statistics.median(self._lengths), 1) if self._lengths else None,
            jobs=jobs,
        )

    def _plan_hasty_look(self, now: float) -> None:
        wait = self.watch.haste_s
        self._haste_at = None if wait is None else now + wait

    def next_at(self, *, may_start: bool) -> float | None:
        """Time of the next look that ``keep_time`` makes; None for none."""
        times = [self._ours_at]
        if self._wanted and may_start:
            times += [self._check_at, self._haste_at]
        return min((at for at in times if at is not None), default=None)

    def keep_time(self, now: float, *, may_start: bool) -> tuple[Action, ...]:
        """Looks, if it is time. Returns the actions against contention with other users on our GPUs."""
        if not self.watch.is_open:
            return ()
        if self._wanted and may_start:
            self._look_for_free(now)
        if self._ours_at is None or now < self._ours_at:
            return ()
        if self._supervisor.gpus:
            self._ours_at = now + WATCH_EVERY_S
            actions = self._look_at_ours(now)
            self._look_for_idle(now)
            return actions
        self._ours_at = now + SAMPLE_EVERY_S if self._wanted else None
        if self._wanted:
            self.ledger.look((), {}, now, clock.wall(), waits=True)
        else:
            self.ledger.rest(now, clock.wall())
        return ()

    def fetch_idle_actions(self) -> tuple[IdleAction, ...]:
        """The actions on jobs that don't use their GPUs, once each."""
        actions, self._idle_actions = self._idle_actions, ()
        return actions

    def started(self, now: float) -> None:
        """Jobs of ours have been started or taken over: their GPUs are looked at from now on."""
        if self._supervisor.gpus:
            self.ledger.began(self._supervisor.running.values())
        if self._supervisor.gpus and (self._ours_at is None or self._ours_at > now + WATCH_EVERY_S):
            self._ours_at = now + WATCH_EVERY_S
        self._note_use_of_reserved(now)

    def _look_for_free(self, now: float) -> None:
        ours = self._supervisor.gpus
        if now >= self._check_at:
            self.changed |= self.watch.look(now, ours)
            self.changed |= self.reserved.look(clock.wall(), now)
            self._check_at = now + self.watch.look_in_s(now)
        if self._haste_at is not None and now >= self._haste_at:
            self.watch.hasty_look(ours, now)
            self._plan_hasty_look(now)
            self.changed = True

    def _look_at_ours(self, now: float) -> tuple[Action, ...]:
        self._note_use_of_reserved(now)
        strangers = self._note_use(now)
        self.ledger.look(self._supervisor.running.values(), self.watch.usage.in_use, now, clock.wall())
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
            quiet_s=self.watch.quiet_s,
        )
        return actions

    def _note_use_of_reserved(self, now: float) -> None:
        wall = clock.wall()
        self.changed |= self.reserved.look(wall, now)
        self.reserved.note_use(self._supervisor.gpus, wall, now)

    def _look_for_idle(self, now: float) -> None:
        """By the look that was just made at our GPUs."""
        if self._options.idle_after is None:
            self._idle_rows = {}
            return
        gpus = {gpu.uuid: gpu for gpu in self.watch.gpus}
        looks = [
            JobLook(
                attempt.record.id,
                clean(attempt.record.title),
                attempt.record.labels,
                is_used(gpus, attempt.record.gpus),
                bool(attempt.paused),
            )
            for attempt in self._supervisor.running.values()
            if attempt.record.gpus and attempt.kill_at is None
        ]
        options = self._options
        self._idle_actions, self._idle_rows = idle_actions(
            options.on_idle, options.idle_after, self._idle_rows, looks, now
        )

    def _note_use(self, now: float) -> tuple[Stranger, ...]:
        self._seen_at = now
        strangers = self.watch.strangers(*self._ours())
        for attempt in self._supervisor.running.values():
            if attempt.record.shared_mb is not None and attempt.tag not in self._overuse_reported:
                # Promised less than it declares, it is reported only when it uses more than that.
                declared_mb = max(attempt.record.shared_mb, attempt.record.queued.memory_mb or 0)
                tenant = replace(self._tenant(attempt), declared_mb=declared_mb)
                for found in memory.overuses([tenant], self._options.gpu_memory_threshold):
                    self._overuse_reported.add(attempt.tag)
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
                    # Promised more than it declared, or less: by the measured peak of its family.
                    declared[uuid] += max(memory_mb, attempt.record.shared_mb or 0)
        return own, {uuid: mb for uuid, mb in declared.items() if uuid not in unknown}

    # --- which GPUs may be used -------------------------------------------------------------------------------

    def views(self, now: float, wall: float) -> tuple[GpuView, ...]:
        """Each GPU with the verdict on it."""
        if self._shared and now - self._seen_at > _STALE_S:
            # Memory promised on shared GPUs is compared with the memory that is free on them now.
            self._note_use(now)
        left_out = self._health.excluded(wall)
        self.changed |= self.reserved.look(wall, now)
        views = self.reserved.watched(self.watch, self._supervisor.gpus, now, wall)
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
        """By UUID, the jobs that share the GPU; without those on which a job of ours does not share."""
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
        return None if tenants is None else memory.shareable_mb(gpu, tenants, self.watch.usage.idle_mb(gpu.uuid))

    def _tenant(self, attempt: Attempt) -> memory.Tenant:
        return memory.Tenant(
            attempt.record.queued.job.name,
            attempt.record.shared_mb or 0,
            learned_mb=self.watch.usage.peaks.get(attempt.tag),
            now_mb=self.watch.usage.in_use.get(attempt.tag),
        )

    # --- taking and giving back -------------------------------------------------------------------------------

    def open_ahead(self) -> dict[str, Lease]:
        """By UUID, the lock files of the GPUs that jobs of ours have for themselves, open and not locked: for a process
        that is started before one of these is free."""
        return self.watch.leases.open_ahead(self._supervisor.gpus - self._shared.keys())

    def take(
        self, start: Start, queued: QueuedJob, held: ExitStack, ahead: Mapping[str, Lease]
    ) -> tuple[Lease, ...] | None:
        """The leases for a start, None when another process was faster.

        ``held`` closes our copies of them when the job has its own. We keep that of a GPU which others may share.
        ``ahead``: the lock files that ``open_ahead`` opened for this job.
        """
        if not start.gpus:
            return ()
        if start.shared and start.gpus[0].uuid in self._shared:
            return (self._shared[start.gpus[0].uuid],)
        leases = self.watch.leases.take(start.gpus, clean(queued.job.title or queued.job.name), clock.mono(), ahead)
        if leases is None:
            return None
        if start.shared:
            self._shared[leases[0].uuid] = leases[0]
        else:
            for lease in leases:
                held.enter_context(lease)
        return leases

    def still_free(self, starts: Sequence[Start]) -> set[str]:
        """One more look, under the leases: which of these GPUs no process has begun to use but those of our jobs."""
        uuids = {gpu.uuid for start in starts for gpu in start.gpus}
        fresh = uuids - self._supervisor.gpus
        return (uuids - fresh) | (self.watch.still_free(fresh, clock.mono()) if fresh else set())

    def released(self, record: AttemptRecord, now: float) -> None:
        """Our job has left its GPUs: they are looked at soon, and the lease of a shared one goes with the last."""
        if not record.gpus:
            return
        self._lengths.append(now - record.started_mono)
        left = set(record.gpus) - self._supervisor.gpus
        self.drop_unused()
        if left:
            self.watch.released(left, now)
            self._haste_at = now
            self._check_at = min(self._check_at, now + self.watch.look_in_s(now))

    def drop_unused(self) -> None:
        """Closes the leases of shared GPUs on which no job of ours runs any more."""
        for uuid in self._shared.keys() - self._supervisor.gpus:
            self._shared.pop(uuid).close()

    def observed(self, attempt: Attempt, *, disk_low: bool) -> Observed:
        """GPUs and memory as they were observed for an attempt that has ended."""
        record = attempt.record
        self._overuse_reported.discard(attempt.tag)
        here = [gpu for gpu in self.watch.gpus if gpu.uuid in record.gpus]
        smallest = min((gpu.total_mb for gpu in here), default=None)
        able = self.watch.able(len(record.gpus))
        larger = smallest is not None and sum(gpu.total_mb > smallest for gpu in able) >= len(record.gpus)
        return Observed(
            gpus=record.gpus,
            faulty=tuple(gpu.uuid for gpu in here if gpu.problem is not None),
            peak_mb=self.watch.usage.peaks.get(attempt.tag),
            from_start=not attempt.adopted,
            most_mb=self.watch.most_mb(len(record.gpus)),
            gpu_total_mb=smallest,
            larger_exists=larger,
            disk_low=disk_low,
            on_trial=self._health.is_on_trial(record.gpus, clock.wall()),
        )

    def problem_of(self, record: AttemptRecord) -> str | None:
        """Faults of the GPUs of an attempt that has failed, since it took them, as a sentence; None without any."""
        return self.watch.gpu_problem(record.gpus) if record.gpus else None
