"""Grid Engine as an engine: batches go to qsub as arrays, and qstat and qacct say how they stand. At the end the
doctor's checks of the site.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from gpuherd.checks import CheckResult, Status
from gpuherd.engines import host
from gpuherd.engines.base import Batch, End, EngineAway, EngineMissing, Phase, Placement, Refused, Sighting, Ticket
from gpuherd.engines.batch_system import keep_script, some
from gpuherd.engines.gridengine import commands, translate
from gpuherd.engines.gridengine.commands import GRID_ENGINE, Complex, GridEngineJobRow
from gpuherd.engines.gridengine.options import GridEngineOptions
from gpuherd.engines.gridengine.translate import CannotRequest
from gpuherd.errors import UsageError
from gpuherd.gpus.lease_files import user_name

# A job that has ended stands in the accounting file a moment later: after the site's accounting_flush_time, 15 s
# where it says nothing. One that is in neither place for so long was deleted before it began.
_ACCOUNTED_S = 20.0
# So long a node must be unknown to sge_qmaster, by our own looks, before its jobs count as lost. sge_qmaster itself
# waits for max_unheard first (5 min by default); after its own restart it knows no node for a minute.
_LOST_S = 300.0
_UNKNOWN_EVERY_S = 15.0
# Seconds between two queries for the scheduler's reason why a job waits: each is about one job.
_REASON_EVERY_S = 20.0


@dataclass(slots=True)
class _Had:
    """The history of a job that Grid Engine has had: whether a look was about it, whether it was being deleted, and
    since when qstat shows it no more."""

    followed: bool = False
    is_deleted: bool = False
    missing_since: float | None = None

    def is_missing_for(self, seconds: float) -> bool:
        """Whether qstat has not shown it for so long; the time begins with the first call."""
        now = time.monotonic()
        if self.missing_since is None:
            self.missing_since = now
        return now - self.missing_since >= seconds


class GridEngine:
    """See ``base.Engine``. Raises UsageError for ``--sge-args`` that can't be."""

    name = "gridengine"
    look_s = 2.0
    chains = True
    # It forgets a job at its end, and takes one that it does not know for done (which the leader on the node looks
    # after); so others are submitted behind those only that were seen a moment ago.
    remembers_s = 30.0

    def __init__(self, options: GridEngineOptions):
        translate.checked(options.sge_args)
        self._options = options
        self._requests: dict[Placement, list[str]] = {}
        self._after: dict[str, frozenset[str]] = {}
        # Handles that Grid Engine has had: those that were followed in the last look, and those submitted since.
        self._had: dict[str, _Had] = {}
        self._in_error: dict[str, str] = {}
        self._unknown_since: dict[str, float] = {}
        self._unknown_at = float("-inf")
        self._reasons: dict[str, str] = {}
        self._reason_at = float("-inf")

    def check(self, wanted: Collection[Placement]) -> Mapping[Placement, str]:
        """See ``base.Engine``; also raises UsageError for a queue that takes no jobs. Grid Engine itself says whether
        an empty cluster could run a job (``qsub -w v``)."""
        self._refuse_unknown_names()
        reasons = {placement: self._why_never(placement) for placement in wanted}
        return {placement: reason for placement, reason in reasons.items() if reason is not None}

    def submit(self, batch: Batch) -> Sequence[str]:
        """See ``base.Engine``."""
        placement = batch.placement
        if placement not in self._requests:
            reason = self._why_never(placement)
            if reason is not None:
                raise Refused(reason)
        words = translate.arguments(batch, self._requests[placement])
        # The jobs start in another folder, and modules are to be found from this one.
        own = {**os.environ, host.NAME: host.absolute(os.environ.get(host.NAME, ""))}
        text = translate.script(batch, self._options, own)
        keep_script(batch.folder / f"{batch.name}.sh", text)
        job = GRID_ENGINE.submit(words, text)
        handles = GRID_ENGINE.handles(job, len(batch.parcels))
        self._had.update({each: _Had() for each in handles})
        if any(GRID_ENGINE.mark in each for each in batch.after):
            self._after[job] = frozenset(batch.after)
        return handles

    def look(self, tickets: Collection[Ticket]) -> Mapping[int, Sighting]:
        """See ``base.Engine``. One qstat for all jobs, and qacct for those that it does not show any more.

        Also releases jobs that wait for a whole array of which they need only tasks that have ended, and removes jobs
        in error whose end has been recorded.
        """
        if not tickets:
            return {}
        self._forget_all_but({ticket.handle for ticket in tickets if ticket.handle is not None})
        rows = commands.read_qstat(GRID_ENGINE.qstat("-u", user_name(os.geteuid()).removeprefix("uid ")))
        found = GRID_ENGINE.rows_of(_places(tickets), rows)
        missing = [ticket for ticket in tickets if ticket not in found]
        self._explain_errors([row.job for row in found.values() if row.is_in_error])
        self._explain_a_wait([row.job for row in found.values() if row.state == "qw"])
        lost = self._lost_hosts(found.values())
        sightings = {}
        for ticket, row in found.items():
            had = self._had.setdefault(row.handle(ticket.index), _Had(followed=True))
            had.missing_since = None
            had.is_deleted = had.is_deleted or row.is_being_deleted
            sightings[ticket.attempt] = self._sighting(row, ticket.index, lost)
        for ticket, sighting in self._ended(missing).items():
            sightings[ticket.attempt] = sighting
        self._release(rows)
        self._remove_errors({row.job for row in found.values()}, {row.job for row in rows})
        return sightings

    def cancel(self, handles: Collection[str]) -> None:
        """See ``base.Engine``."""
        GRID_ENGINE.cancel(handles)

    def close(self) -> None:
        """Removes the jobs that Grid Engine keeps in error, as far as it answers; nothing else of ours stays there but
        jobs that wait or run."""
        with suppress(EngineAway, EngineMissing):
            self._remove_errors(set(), set(self._in_error))

    # --- what can be had ------------------------------------------------------------------------------------------

    @cached_property
    def _complexes(self) -> Mapping[str, Complex]:
        return GRID_ENGINE.resources()

    @cached_property
    def _environments(self) -> Mapping[str, Mapping[str, str]]:
        """The parallel environments, or the one that the user names. Raises UsageError for one that is not there."""
        names = GRID_ENGINE.answer("qconf", "-spl").split()
        chosen = self._options.sge_pe
        if chosen is not None:
            GRID_ENGINE.refuse_unknown("--sge-pe", chosen, names, "there is no parallel environment")
            names = [chosen]
        return {name: commands.fields_of(GRID_ENGINE.answer("qconf", "-sp", name)) for name in names}

    def _refuse_unknown_names(self) -> None:
        options = self._options
        if options.sge_project is not None:
            projects = GRID_ENGINE.answer("qconf", "-sprjl").split()
            GRID_ENGINE.refuse_unknown("--sge-project", options.sge_project, projects, "there is no project")
        if options.sge_queue is None:
            return
        there = GRID_ENGINE.answer("qconf", "-sql").split()
        for word in options.sge_queue.split(","):
            if word.isidentifier() or set(word).isdisjoint("*?[]@!&|()"):
                GRID_ENGINE.refuse_unknown("--sge-queue", word, there, "there is no queue")
        instances = GRID_ENGINE.select("-q", options.sge_queue)
        if instances and set(instances) <= set(GRID_ENGINE.select("-q", options.sge_queue, "-qs", "d")):
            raise UsageError(
                f"Grid Engine's queue {options.sge_queue} takes no jobs now (it is disabled); "
                f"there are: {some(sorted(there))}"
            )

    def _why_never(self, placement: Placement) -> str | None:
        """Why the cluster can never grant it; None where it can: then the words that request it are kept."""
        if placement.tasks > 1:
            return "Grid Engine starts one process on each node; several are for SLURM (--ntasks-per-node)"
        try:
            choices: Sequence[tuple[str, int] | None] = [None]
            if placement.nodes > 1 or (placement.cpus or 1) > 1:
                choices = translate.suitable(placement, self._environments)
            reasons = []
            for choice in choices:
                words = translate.requests(placement, self._options, self._complexes, choice)
                refusal = GRID_ENGINE.verify(translate.verification(words, self._complexes))
                if refusal is None:
                    self._requests[placement] = words
                    return None
                reasons.append(commands.why_unsuitable(refusal) or "no queue is suitable")
        except CannotRequest as problem:
            return str(problem)
        if not reasons:
            return _no_environment(placement, self._options.sge_pe)
        return f"Grid Engine has no queue for it: {reasons[0]}"

    def _forget_all_but(self, handles: AbstractSet[str]) -> None:
        """A queue may be served for months: jobs whose end has been recorded are not kept."""
        self._had = {each: had for each, had in self._had.items() if each in handles or not had.followed}
        for each in handles & self._had.keys():
            self._had[each].followed = True

    # --- how they stand -------------------------------------------------------------------------------------------

    def _sighting(self, row: GridEngineJobRow, place: int, lost: frozenset[str]) -> Sighting:
        if row.is_in_error:
            return row.sighting(place, f"Grid Engine could not start it: {self._in_error[row.job] or row.state}")
        if row.node in lost:
            reason = "its node does not answer any more"
            return Sighting(
                handle=row.handle(place), phase=Phase.ENDED, end=End.NODE_LOST, reason=reason, node=row.node
            )
        silent = row.node in self._unknown_since
        waits = self._reasons.get(row.job) if row.state == "qw" else None
        return row.sighting(place, "its node does not answer" if silent else waits)

    def _explain_errors(self, jobs: Collection[str]) -> None:
        new = sorted({job for job in jobs if not self._in_error.get(job)})
        if new:
            messages = commands.errors_of(GRID_ENGINE.details(new))
            self._in_error.update({job: messages.get(job, "") for job in new})

    def _explain_a_wait(self, jobs: Sequence[str]) -> None:
        """Queries the scheduler's reason for the job that waits first; the others keep theirs while they wait."""
        now = time.monotonic()
        self._reasons = {job: reason for job, reason in self._reasons.items() if job in jobs}
        if jobs and now >= self._reason_at + _REASON_EVERY_S:
            self._reason_at = now
            first = min(jobs, key=int)
            reason = commands.why_it_waits(GRID_ENGINE.details([first]))
            if reason is not None:
                self._reasons[first] = reason

    def _remove_errors(self, open_jobs: Collection[str], there: Collection[str]) -> None:
        """Grid Engine would keep a job that it could not start for ever."""
        done = [job for job in self._in_error if job not in open_jobs]
        if done:
            self.cancel([job for job in done if job in there])
            for job in done:
                del self._in_error[job]

    def _lost_hosts(self, rows: Collection[GridEngineJobRow]) -> frozenset[str]:
        """The hosts of these jobs of which sge_qmaster has heard nothing for long. Their jobs are deleted, for Grid
        Engine would take them for running until the node is back, and let them run on then."""
        now, running = time.monotonic(), {row.node for row in rows if row.node is not None}
        if not running:
            return frozenset()
        if now >= self._unknown_at + _UNKNOWN_EVERY_S:
            self._unknown_at = now
            unknown = commands.unknown_hosts(GRID_ENGINE.qstat("-f", "-qs", "u"))
            self._unknown_since = {
                name: self._unknown_since.get(name, now) for name in sorted(running & unknown) if name is not None
            }
        lost = frozenset(name for name, since in self._unknown_since.items() if now - since >= _LOST_S)
        gone = [row.handle(row.places[0].start if row.places else 0) for row in rows if row.node in lost]
        if gone:
            self.cancel(gone)
        return lost

    def _ended(self, missing: Collection[Ticket]) -> dict[Ticket, Sighting]:
        """The ends of jobs that qstat does not show, by accounting; or by its silence, where it can be read."""
        if not missing:
            return {}
        names = sorted({translate.job_name(ticket.batch) for ticket in missing})
        pattern = names[0] if len(names) == 1 else f"{os.path.commonprefix(names)}*"  # noqa: RUF071 - of characters
        accounted = GRID_ENGINE.qacct(pattern)
        records = GRID_ENGINE.rows_of(_places(missing), accounted or ())
        found = {}
        for ticket in missing:
            handle = ticket.handle or ""
            had = self._had.get(handle)
            if ticket in records:
                found[ticket] = records[ticket].sighting(deleted=had is not None and had.is_deleted)
            elif accounted is not None and had is not None and had.is_missing_for(_ACCOUNTED_S):
                # It never ran: Grid Engine keeps no record of those.
                found[ticket] = Sighting(handle=handle, phase=Phase.ENDED, end=End.CANCELLED, reason="deleted")
        return found

    def _release(self, rows: Collection[GridEngineJobRow]) -> None:
        """Releases jobs that were submitted behind tasks of an array and wait for all of it: Grid Engine can't hold a
        job for some tasks of an array only."""
        if not self._after:
            return
        there = {row.job for row in rows}
        for job, after in list(self._after.items()):
            needed = [GRID_ENGINE.parts(each) for each in after]
            waits = any(
                row.job == other and (row.is_job or row.speaks_of(place)) for other, place in needed for row in rows
            )
            if not waits or job not in there:
                del self._after[job]
            if not waits and job in there:
                GRID_ENGINE.release(job)


def _places(tickets: Iterable[Ticket]) -> dict[Ticket, tuple[str, int]]:
    return {ticket: (translate.job_name(ticket.batch), ticket.index) for ticket in tickets}


def _no_environment(placement: Placement, named: str | None) -> str:
    slots = translate.slots_of(placement)
    if placement.nodes == 1:
        rule = f"gives {slots} slots on one node (allocation_rule $pe_slots)"
    else:
        rule = f"gives {slots or 'a fixed number of'} slots on each node (allocation_rule {slots or 'N'}), and lets "
        rule += "jobs start tasks there (control_slaves TRUE)"
    if named is not None:
        return f"Grid Engine's parallel environment {named} is none that {rule}; leave --sge-pe out to have one chosen"
    return f"Grid Engine has no parallel environment that {rule}; the administrator makes them with qconf -ap"


# --- the doctor's checks ----------------------------------------------------------------------------------------------


def find_grid_engine(options: GridEngineOptions) -> list[CheckResult]:
    """Grid Engine in as many lines as there is something to say."""
    return GRID_ENGINE.diagnose(lambda: _checks(options))


def _checks(options: GridEngineOptions) -> list[CheckResult]:
    queues = GRID_ENGINE.answer("qconf", "-sql").split()
    if queues:
        found = CheckResult("Grid Engine", Status.OK, f"sge_qmaster answers; queues: {some(queues)}")
    else:
        found = CheckResult(
            "Grid Engine", Status.FAIL, "it has no queue", "its administrator makes them with qconf -aq"
        )
    gpus = _check_gpus(GRID_ENGINE.resources().get(options.sge_gpu), options.sge_gpu)
    return [found, gpus, _check_environments(GRID_ENGINE.answer("qconf", "-spl").split()), _check_accounting()]


def _check_gpus(found: Complex | None, name: str) -> CheckResult:
    title = "Grid Engine GPUs"
    if found is None:
        remedy = "name the resource that `qconf -sc` lists by --sge-gpu; without one only jobs without GPUs can run"
        return CheckResult(title, Status.WARN, f"there is no resource {name}", remedy)
    counted = {"YES": "by slot", "JOB": "once for a job"}.get(found.consumable)
    if counted is None:
        remedy = "its administrator can make it consumable (qconf -mc), so that no two jobs get one GPU"
        return CheckResult(title, Status.WARN, f"the resource {name} is not counted (consumable NO)", remedy)
    return CheckResult(title, Status.OK, f"jobs request them by -l {name}=N, counted {counted}")


def _check_environments(names: list[str]) -> CheckResult:
    title = "Grid Engine parallel environments"
    if names:
        return CheckResult(title, Status.OK, some(names))
    remedy = "jobs with several CPU cores or nodes can't be submitted; its administrator makes them with qconf -ap"
    return CheckResult(title, Status.WARN, "there are none", remedy)


def _check_accounting() -> CheckResult:
    title = "Grid Engine accounting"
    if GRID_ENGINE.qacct("gpuherd-doctor") is not None:
        return CheckResult(title, Status.OK, "qacct says how jobs have ended")
    remedy = "jobs run all the same and report their own ends; only its administrator can share common/accounting"
    return CheckResult(title, Status.WARN, "qacct can't read it here: who deleted a job is not known", remedy)
