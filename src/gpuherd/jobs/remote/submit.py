"""Submits jobs to an engine: decides which waiting jobs are submitted when, and which of them together, and keeps the
order of manifest, record in the queue, engine, engine's ids.

``decide`` and ``placement_of`` are pure:

1. Priority first, as on this machine. Within a priority, jobs that could run at once come first, then those that depend
on others in the engine: otherwise dependent jobs would take the places of jobs that need not wait. Then age, or the
longest first.
2. At most ``at_most`` are in the engine at once. The engine decides which of them runs where and when.
3. Jobs with the same placement and the same dependencies form a batch.
"""

from __future__ import annotations

import math
import os
import sqlite3
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from gpuherd.atomic import private_write
from gpuherd.engines.base import Batch, EngineAway, Parcel, Placement, Refused
from gpuherd.errors import CannotWrite, JobCannotFit, clean
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.complete import Completion, give_up
from gpuherd.jobs.attempts.failures import FailureClass, back_off_s
from gpuherd.jobs.attempts.preempt import DiskGuard
from gpuherd.jobs.attempts.time_limits import TimeLimits
from gpuherd.jobs.event_loop import Decisions
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.schema import may_pass
from gpuherd.jobs.queue.store import Overtaken, Queue
from gpuherd.jobs.records import AttemptRecord, EventKind, Handed, Predecessor, QueuedJob, StartRecord
from gpuherd.jobs.remote import (
    AGAIN_S,
    AROUND_S,
    AT_A_TIME_S,
    LONG_STEP_S,
    REFUSAL_EVERY_S,
    SHORT_S,
    SHORT_STEP_S,
    SUBMIT_EVERY_S,
)
from gpuherd.jobs.remote.outcome import RemoteAttempt
from gpuherd.jobs.remote.protocol import Manifest, Order, portable, to_json
from gpuherd.jobs.remote.tracker import EngineQueries, Tracker
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.scheduler.types import Wait

# SLURM's default for the largest array.
LARGEST_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that can be submitted. ``after``: the attempts of those of its needs that are in the engine and have not
    succeeded yet.
    """

    queued: QueuedJob
    after: tuple[Predecessor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """How much is submitted at once.

    Attributes:
        at_most: jobs in the engine; ``open``: so many are there now.
        option: the option that sets that limit.
        longest_first: within a priority the job of the highest rank goes first; else the oldest.
        largest: the most jobs of a batch.
        closed: a sentence when nothing is submitted now, else None.
    """

    at_most: int
    open: int
    option: str = "--at-most"
    longest_first: bool = False
    largest: int = LARGEST_BATCH
    closed: str | None = None


@dataclass(frozen=True, slots=True)
class SubmitGroup:
    """Jobs that go together, in their order."""

    placement: Placement
    after: tuple[Predecessor, ...]
    jobs: tuple[QueuedJob, ...]


@dataclass(frozen=True, slots=True)
class SubmitDecision:
    """The decision: each candidate is in a group, in ``waits`` or in ``refused``. Groups are in the order of their
    first jobs."""

    groups: tuple[SubmitGroup, ...] = ()
    waits: tuple[Wait, ...] = ()
    refused: tuple[Wait, ...] = ()


def placement_of(job: Job, gpus: int, options: DispatchOptions, grace_s: float) -> Placement:
    """The placement that a job requests: its own options first, then those of the run. ``gpus``: on each node, now.

    The engine's time limit comes after the job's own has ended it on its node, with the notice before it: otherwise the
    engine would end a job that hangs again and again, and the job would never fail. It is rounded up in steps, so that
    jobs whose limits differ a little form one batch.
    """
    time_s, own_s = options.time_limit, TimeLimits.of(job, options).whole_s
    if time_s is None and own_s is not None:
        time_s = stepped(own_s + grace_s + options.notice + AROUND_S)
    return Placement(
        gpus=gpus,
        nodes=job.nodes,
        tasks=options.spec.tasks(options),
        cpus=job.cpus if job.cpus is not None else options.cpus_per_job,
        memory_mb=job.host_memory_mb if job.host_memory_mb is not None else options.host_mem,
        time_s=time_s,
    )


def stepped(seconds: float) -> float:
    """The time in seconds, rounded up to the step in which it is requested.

    >>> stepped(61), stepped(3600), stepped(3601)
    (120, 3600, 4500)
    """
    step_s = SHORT_STEP_S if seconds <= SHORT_S else LONG_STEP_S
    return step_s * math.ceil(seconds / step_s)


def decide(
    candidates: Sequence[Candidate],
    asks: Callable[[QueuedJob], Placement],
    never: Mapping[Placement, str],
    limits: BatchLimits,
) -> SubmitDecision:
    """Decides what to submit now. ``never``: placements that the engine can never provide, with the reason."""
    places = max(0, limits.at_most - limits.open)
    groups: dict[tuple[Placement, tuple[Predecessor, ...], int], list[QueuedJob]] = {}
    sizes: dict[tuple[Placement, tuple[Predecessor, ...]], int] = {}
    waits, refused = [], []
    for each in sorted(candidates, key=lambda one: _key(one, limits)):
        job, placement = each.queued, asks(each.queued)
        if placement in never:
            refused.append(Wait(job.id, never[placement]))
        elif limits.closed is not None:
            waits.append(Wait(job.id, limits.closed))
        elif places == 0:
            text = f"{limits.at_most} jobs are in the cluster's hands, which is the most at once ({limits.option})"
            waits.append(Wait(job.id, text))
        else:
            places -= 1
            alike = placement, each.after
            size = sizes.get(alike, 0)
            sizes[alike] = size + 1
            groups.setdefault((*alike, size // limits.largest), []).append(job)
    found = [SubmitGroup(placement, after, tuple(jobs)) for (placement, after, _), jobs in groups.items()]
    return SubmitDecision(tuple(found), tuple(waits), tuple(refused))


def _key(candidate: Candidate, limits: BatchLimits) -> tuple[int, bool, float, int]:
    queued = candidate.queued
    rank = -queued.rank if limits.longest_first else 0.0
    return (-queued.job.priority, bool(candidate.after), rank, queued.id)


# The order of a submission: the manifest, the record in the queue, the engine, the engine's ids.
#
# A crash between two of these loses nothing. A manifest without recorded attempts means nothing. An attempt that is
# recorded and that the engine never got is unknown there, and the tracker claims it before its job waits again; one
# that the engine got is found there by the name of its batch.

_LEADER = "gpuherd.jobs.remote.agent"


# Jobs that are considered beyond those that can be submitted, to report what waits.
_BEYOND = 8
# Each submission is a command to the engine: jobs that come so soon after the last one wait for more, and longer while
# fewer places than this part of all are free.
_FEW = 10


class Submitter(Decisions):
    """Decides what goes to the engine when, and submits it, for one dispatcher.

    Args:
        disk: nothing is submitted while it says that there is too little space.
        delay_s: how long a node's report may be on its way.
    """

    _run_id: int
    _began_at: float
    _numbers: Iterator[int]

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        reporter: Reporter,
        options: DispatchOptions,
        queries: EngineQueries,
        tracker: Tracker,
        completion: Completion,
        disk: DiskGuard,
        *,
        grace_s: float,
        delay_s: float,
    ):
        self._queue = queue
        self._run = run
        self._reporter = reporter
        super().__init__()
        self.options = options
        self._queries = queries
        self._tracker = tracker
        self._completion = completion
        self._disk = disk
        self._grace_s = grace_s
        self._delay_s = delay_s
        self._largest = LARGEST_BATCH
        self._again_at = 0.0
        self._refill_at = 0.0
        self._refusals = 0
        self._refused_so_far = 0
        self._tell_again_at = 0.0

    def begin(self, run_id: int, began_at: float) -> None:
        """The run has its number, and may submit."""
        self._run_id, self._began_at = run_id, began_at
        # Where the queue is older than the folder (restored, or created anew), its next numbers may be in use there.
        self._numbers = count(max(self._queue.last_attempt(), self._tracker.spool.highest()) + 1)

    def refuse_if_none_can_be_had(self, jobs: Sequence[Job]) -> None:
        """Raises JobCannotFit, with the first job's reason, when none of the jobs could ever run there; and what
        ``Engine.check`` raises."""
        asked = {job.name: self._asks(job, job.gpus) for job in jobs}
        wanted = frozenset(asked.values())
        never = self._queries.engine.check(wanted)
        if jobs and wanted <= never.keys():
            raise JobCannotFit(f"job {clean(jobs[0].title or jobs[0].name)}: {never[asked[jobs[0].name]]}")
        self._queries.note_check(wanted, never)

    def closed(self, now: float) -> str | None:
        """A sentence while nothing is submitted."""
        if self._completion.again_at is not None:
            return self._completion.trouble
        if self._queries.silent(now):
            return self._queries.away
        return self._disk.low

    def submit_what_can(self) -> None:
        """Submits all that can go now."""
        now = clock.mono()
        if self.due_at is None or now < self.due_at:
            return
        if now < self._again_at:
            self.due_at = self._again_at
            return
        self.due_at = None
        self._disk.look(now)
        while self._decide(now):
            self._again_at = now + min(SUBMIT_EVERY_S, self._queries.engine.look_s)
            self._refill_at = now + self._queries.engine.look_s
        if self._queries.away is not None and not self._queries.busy:
            self.soon(self._queries.due_at)  # otherwise when it has answered
        later = self._queue.next_not_before(clock.wall())
        if later is not None:
            self.waiting_for = self.waiting_for or "a job that has ended waits a moment for its next try"
            self.soon(clock.mono() + max(0.0, later - clock.wall()))

    def _asks(self, job: Job, gpus: int) -> Placement:
        return placement_of(job, gpus, self.options, self._grace_s)

    def _asks_now(self, queued: QueuedJob) -> Placement:
        return self._asks(queued.job, queued.gpus)

    def _decide(self, now: float) -> bool:
        """Makes one decision and carries it out; whether to decide again: more jobs may be submitted, or behind those
        submitted now."""
        at_most, option = self.options.at_most, "--at-most"
        if self.options.max_concurrent is not None and self.options.max_concurrent < at_most:
            at_most, option = self.options.max_concurrent, "--max-concurrent"
        out = len(self._tracker.open)
        candidates = self._candidates(max(0, at_most - out))
        jobs = {each.queued.id: each.queued for each in candidates}
        limits = BatchLimits(
            at_most=at_most,
            open=out,
            option=option,
            longest_first=self.options.order == "longest",
            largest=self._largest,
            closed=self._closed_now(at_most, out, jobs.values(), now),
        )
        decision = decide(candidates, self._asks_now, self._queries.never, limits)
        for reason in dict.fromkeys(wait.reason for wait in decision.refused):
            self._give_up([jobs[wait.job] for wait in decision.refused if wait.reason == reason], reason)
        until, behind = clock.mono() + AT_A_TIME_S, False
        for group in decision.groups:
            # Where it takes long, the rest is submitted after requests and ends that came meanwhile.
            behind = not self._hand_over(group) or self._queries.away is not None or clock.mono() > until
            if behind:
                self.soon(max(now, self._again_at))
                break
        self._note_waits(decision.waits, jobs)
        return bool(decision.groups or decision.refused) and not behind

    def _candidates(self, places: int) -> list[Candidate]:
        wall, engine = clock.wall(), self._queries.engine
        found = [Candidate(queued) for queued in self._queue.head(places + _BEYOND, wall, self.options.order)]
        if engine.chains and places:
            # An attempt that the engine may have forgotten by now would not hold its successors back there.
            leading = self._tracker.can_be_followed(clock.mono())
            pairs = self._queue.following(engine.name, places, wall)
            found += [
                Candidate(queued, after)
                for queued, after in pairs
                if leading.issuperset(each.attempt for each in after)
            ]
        return found

    def _closed_now(self, at_most: int, out: int, jobs: Collection[QueuedJob], now: float) -> str | None:
        closed = self.closed(now)
        if closed is None and not self._queries.check({self._asks_now(queued) for queued in jobs}, now):
            closed = self._queries.away
        if closed is None and 0 < at_most - out < at_most / _FEW and now < self._refill_at:
            self.soon(self._refill_at)
            closed = "it goes to the cluster in a moment"
        return closed

    def _cannot_write(self, problem: Exception) -> bool:
        """A failed write, here or by the engine: a retry with more space may succeed."""
        if isinstance(problem, sqlite3.OperationalError) and not may_pass(problem):
            raise problem
        self._again_at = clock.mono() + AGAIN_S
        self._reporter.notice(f"can't hand jobs over now, trying again in {AGAIN_S:g} s: {problem}")
        return False

    def _refused(self, problem: Refused, jobs: Sequence[QueuedJob]) -> bool:
        """The engine refuses these jobs: for good, or now; then it may take some of them, or never so many at once.
        Fewer are tried soon, a single one less and less often."""
        if not problem.may_pass:
            self._give_up(jobs, f"{self._queries.title} refuses it: {problem}")
            return True
        self._largest = max(1, len(jobs) // 2)
        self._refusals += len(jobs) == 1
        now, wait_s = clock.mono(), back_off_s(self._refusals) if len(jobs) == 1 else AGAIN_S
        self._again_at = now + wait_s
        self._refused_so_far += 1
        first = self._refused_so_far == 1
        times = ", and is asked again and again" if first else f" ({self._refused_so_far} times so far)"
        if first or now >= self._tell_again_at:
            self._reporter.notice(f"{self._queries.title} takes no more jobs now{times}: {problem}")
            self._tell_again_at = now + REFUSAL_EVERY_S
        return False

    def _give_up(self, jobs: Sequence[QueuedJob], reason: str) -> None:
        problem = give_up(self._queue, self._reporter, jobs, FailureClass.BAD_INPUT, reason)
        if problem is not None:
            raise problem

    def _note_waits(self, waits: Sequence[Wait], jobs: Mapping[int, QueuedJob]) -> None:
        self.note(waits, jobs)
        if not waits and self._queue.held():
            self.waiting_for = "what still waits is paused"

    # --- one batch ----------------------------------------------------------------------------------------------

    def _hand_over(self, group: SubmitGroup) -> bool:
        """Submits these jobs as one batch. False where no more can be submitted for a while."""
        numbers = [next(self._numbers) for _ in group.jobs]
        batch = self._batch(group, numbers)
        records = [
            self._record(queued, number, batch.name, place)
            for place, (queued, number) in enumerate(zip(group.jobs, numbers, strict=True))
        ]
        try:
            self._write_manifest(batch, records, group)
            self._queue.record_starts([self._start(record, bool(group.after)) for record in records], self._run_id)
        except Overtaken:
            self._forget(batch.name)
            return True  # the next decision, which follows at once, reads the jobs again
        except (OSError, sqlite3.OperationalError) as problem:
            self._forget(batch.name)
            return self._cannot_write(problem)
        submitted, asked_at, goes_on = RemoteAttempt.among(records), clock.mono(), True
        try:
            handles = self._queries.engine.submit(batch)
        except EngineAway as problem:
            # It may have it or not: the next query shows.
            self._queries.failed(problem, clock.mono())
        except CannotWrite as problem:
            # The engine's own file, on a full disk. The next query shows whether it has some of them.
            goes_on = self._cannot_write(problem)
        except Refused as problem:
            try:
                self._queue.withdraw(numbers)
            except sqlite3.OperationalError as unwritten:
                goes_on = self._cannot_write(unwritten)  # the next queries find that the engine has none of it
            else:
                self._forget(batch.name)
                return self._refused(problem, group.jobs)
        else:
            self._accepted(list(submitted.values()), handles, asked_at)
        self._tracker.add(batch.name, submitted, [each.attempt for each in group.after])
        return goes_on

    def _accepted(self, submitted: Sequence[RemoteAttempt], handles: Sequence[str], asked_at: float) -> None:
        """The engine has taken them."""
        self._queries.answered()
        self._refusals = 0
        if len(submitted) == self._largest:
            self._largest = min(LARGEST_BATCH, 2 * self._largest)
        for each, handle in zip(submitted, handles, strict=True):
            each.handed = replace(each.handed, handle=handle)
            each.known_at = asked_at
        title = self._queries.title
        if len(submitted) == 1:
            self._reporter.about(EventKind.HANDED, submitted[0].record, f"handed to {title} as {clean(handles[0])}")
        else:
            text = f"{len(submitted)} jobs handed to {title} as {clean(handles[0])} to {clean(handles[-1])}"
            self._reporter.emit(EventKind.HANDED, text)

    def _batch(self, group: SubmitGroup, numbers: Sequence[int]) -> Batch:
        name = self._queue.batch_name(numbers[0])
        return Batch(
            name=name,
            placement=group.placement,
            parcels=tuple(
                Parcel(attempt=number, title=clean(queued.job.title or queued.job.name))
                for queued, number in zip(group.jobs, numbers, strict=True)
            ),
            command=(sys.executable, "-m", _LEADER, str(self._run.manifest(name))),
            folder=self._run.handover,
            after=tuple(each.handle for each in group.after),
            at_once=self.options.spec.at_once(self.options),
        )

    def _record(self, queued: QueuedJob, number: int, batch: str, place: int) -> AttemptRecord:
        return AttemptRecord(
            id=number,
            queued=queued,
            number=queued.attempts + 1,
            gpus=(),
            labels=(),
            process=None,
            handed=Handed(self.options.engine, batch, place),
            log=str(self._run.attempt_log(queued.job.name, queued.attempts + 1)),
            started_at=clock.wall(),
            started_mono=clock.mono(),
        )

    def _start(self, record: AttemptRecord, follows: bool) -> StartRecord:
        waited_s = 0.0 if follows else max(0.0, record.started_at - max(record.queued.ready_at, self._began_at))
        return StartRecord(record, waited_s, None)

    def _write_manifest(self, batch: Batch, records: Sequence[AttemptRecord], group: SubmitGroup) -> None:
        orders = tuple(self._order(record, group) for record in records)
        manifest = Manifest(
            batch=batch.name, engine=self.options.engine, environment=portable(os.environ), orders=orders
        )
        self._run.handover.mkdir(exist_ok=True)
        private_write(self._run.manifest(batch.name), to_json(manifest).encode())

    def _order(self, record: AttemptRecord, group: SubmitGroup) -> Order:
        job, placement = record.queued.job, group.placement
        limits = TimeLimits.of(job, self.options)
        return Order(
            attempt=record.id,
            tag=f"{self._queue.tag}/{record.id}",
            job=replace(
                job,
                cwd=job.cwd or str(Path.cwd()),
                timeout_s=limits.whole_s,
                stage_timeout_s=limits.stage_s,
                heartbeat_s=limits.heartbeat_s,
            ),
            log=record.log,
            progress=str(self._run.attempt_progress(record.id)),
            claim=str(self._run.attempt_claim(record.id)),
            ended=str(self._run.attempt_ended(record.id)),
            after=tuple(str(self._run.attempt_ended(each.attempt)) for each in group.after),
            delay_s=self._delay_s,
            gpus=placement.gpus,
            tasks=placement.tasks,
            mpi=self.options.spec.launcher(self.options),
            grace_s=self._grace_s,
            notice_s=self.options.notice,
            threads=None if placement.cpus is None else max(1, placement.cpus // placement.tasks),
        )

    def _forget(self, batch: str) -> None:
        with suppress(OSError):
            self._run.manifest(batch).unlink()
