"""One look at all that the screen shows: the run's queue, the GPUs, who holds them, and the end of one job's log.

The only part of the view that reads anything. It is slow by a screen's measure (milliseconds) and therefore called in a
thread of its own; what comes out is frozen data. Nothing here changes the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuherd.errors import CannotWrite, GpuherdError
from gpuherd.gpus.nvml import Nvml
from gpuherd.gpus.state import Machine
from gpuherd.jobs import clock
from gpuherd.jobs.job import JobState
from gpuherd.jobs.joblog import log_of
from gpuherd.jobs.logtail import shown, tail
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.runstatus import JobStatus, Page, RunStatus
from gpuherd.jobs.status import opened, status_of

if TYPE_CHECKING:
    from gpuherd.gpus.lease import Holder

PAGE = 500
_LOG_LINES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What was seen.

    Attributes:
        at: wall-clock second.
        machine: its GPUs and who uses them.
        holders: who holds a lease, by GPU UUID.
        status: how the run stands, with the jobs that match the filter; None when its queue can't be read (yet).
        problem: why not.
        running: all running jobs, whatever the filter.
        log_of: the name of the job whose log this is, None for none; ``log``: its last lines, harmless for a terminal.
    """

    at: float
    machine: Machine
    holders: Mapping[str, Holder] = field(default_factory=dict)
    status: RunStatus | None = None
    problem: str | None = None
    running: tuple[JobStatus, ...] = ()
    log_of: str | None = None
    log: tuple[str, ...] = ()

    def job(self, name: str | None) -> JobStatus | None:
        """The job with this name, if it is on the page."""
        jobs = () if self.status is None else self.status.jobs
        return next((job for job in jobs if job.name == name), None)


class Looker:
    """Looks at one run and at the machine, again and again."""

    def __init__(self, run: RunDirectory):
        self._run = run
        self._driver = Nvml()

    def look(self, text: str = "", chosen: str | None = None) -> Look:
        """What there is now. ``text``: only jobs with it in their name; ``chosen``: whose log is wanted, by default
        that of the first job of the page.
        """
        machine = self._driver.snapshot()
        holders = self._holders(machine)
        try:
            with opened(self._run) as reader:
                status = status_of(self._run, reader, Page(text=text, limit=PAGE))
                running = status.jobs
                if text:
                    running = status_of(self._run, reader, Page(states=(JobState.RUNNING,), limit=PAGE)).jobs
        except GpuherdError as problem:
            return Look(at=clock.wall(), machine=machine, holders=holders, problem=str(problem))
        job = next((job for job in status.jobs if job.name == chosen), None)
        if job is None and status.jobs:
            job = status.jobs[0]
        return Look(
            at=status.at,
            machine=machine,
            holders=holders,
            status=status,
            running=tuple(job for job in running if job.state is JobState.RUNNING),
            log_of=None if job is None else job.name,
            log=() if job is None else _log(self._run, job),
        )

    def _holders(self, machine: Machine) -> dict[str, Holder]:
        from gpuherd.gpus.lease import LeaseFolder

        try:
            folder = LeaseFolder.existing()
        except CannotWrite:
            return {}
        if folder is None:
            return {}
        found = {gpu.uuid: folder.holder(gpu.uuid) for gpu in machine.gpus}
        return {uuid: holder for uuid, holder in found.items() if holder is not None}


def _log(run: RunDirectory, job: JobStatus) -> tuple[str, ...]:
    if job.attempt is None:
        return ()
    lines = [shown(line) for line in tail(log_of(run, job.attempt)).split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines[-_LOG_LINES:])
