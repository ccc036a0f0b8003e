"""Reads everything that the screen shows: the run's queue, the GPUs, who holds them, the end of one job's log; and
remembers the use of GPUs in the last minutes.

The only part of the view that reads anything. It takes milliseconds and is therefore called in a thread of its own;
what comes out is frozen data. Nothing here changes the run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpuherd.errors import CannotWrite, GpuherdError, UsageError
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu, Machine
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import tail
from gpuherd.jobs.job import JobState
from gpuherd.jobs.monitor.job_status import Page
from gpuherd.jobs.monitor.logs import log_of, shown
from gpuherd.jobs.monitor.status import RunStatus, snapshot, status_of
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.records import JobStatus
from gpuherd.jobs.run_dir import RunDirectory

if TYPE_CHECKING:
    from gpuherd.gpus.leases import Holder


PAGE = 200
_LOG_LINES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Everything that the screen shows, at one moment.

    Attributes:
        at: wall-clock second.
        machine: its GPUs and their processes.
        holders: holders of leases, by GPU UUID.
        status: the run's status, with the jobs that match the filter; None when its queue can't be read (yet).
        problem: why not.
        running: all running jobs, whatever the filter.
        log_of: the name of the job whose log this is, None for none; ``log``: its last lines, cleaned for a terminal.
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
    """Reads the state of one run and of the machine, again and again."""

    def __init__(self, run: RunDirectory):
        self._run = run
        self._driver = GpuReader()
        # A slow look may still run when the next begins, in another thread.
        self._one_at_a_time = threading.Lock()
        self._reader: QueueReader | None = None
        self._inode: int | None = None
        # The jobs of the last page, and the version of the queue and the filter that they are of.
        self._page: tuple[int | None, str] = (None, "")
        self._jobs: tuple[JobStatus, ...] = ()

    def close(self) -> None:
        """Closes the queue, after the look that runs now."""
        with self._one_at_a_time:
            self._close()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def look(self, text: str = "", chosen: str | None = None) -> Look:
        """The state now. ``text``: only jobs with it in their name; ``chosen``: the job whose log to read, by default
        the first of the page.
        """
        with self._one_at_a_time:
            return self._look(text, chosen)

    def _look(self, text: str, chosen: str | None) -> Look:
        machine = self._driver.snapshot()
        holders = self._holders(machine)
        try:
            reader = self._opened()
            status = self._status(reader, text)
            running = status.jobs
            if text:
                running = status_of(self._run, reader, Page(states=(JobState.RUNNING,), limit=PAGE)).jobs
        except GpuherdError as problem:
            self._close()
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

    def _opened(self) -> QueueReader:
        """The queue, which is opened again when another file has taken its place."""
        try:
            inode: int | None = self._run.queue.stat().st_ino
        except OSError:
            inode = None
        if self._reader is None or self._reader.version() is None or inode != self._inode:
            self._close()
            self._reader, self._inode, self._jobs = QueueReader(self._run.queue), inode, ()
            self._page = (None, "")
        return self._reader

    def _status(self, reader: QueueReader, text: str) -> RunStatus:
        """The status of the run. Of a page that was read before only jobs that have not ended are read again: while the
        queue's file has not changed, no other job has."""
        page = (reader.version(), text)
        with snapshot(self._run, reader, Page(text=text, limit=PAGE)) as look:
            if page == self._page and page[0] is not None:
                changed = {job.id: job for job in look.jobs((JobState.RUNNING, JobState.WAITING))}
                self._jobs = tuple(changed.get(job.id, job) for job in self._jobs)
            else:
                self._jobs = tuple(look.jobs())
            self._page = page
            return replace(look.status, jobs=self._jobs)

    def _holders(self, machine: Machine) -> dict[str, Holder]:
        from gpuherd.gpus.leases import LeaseFolder

        try:
            folder = LeaseFolder.existing()
        except (CannotWrite, UsageError):  # UsageError: the policy, which may name the folder, is wrong
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


KEPT = 240


@dataclass(slots=True)
class Past:
    """The use of one GPU and of its memory, oldest first, each from 0 to 1; None where unknown."""

    use: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))
    memory: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))


class History:
    """The past of every GPU, by UUID."""

    def __init__(self) -> None:
        self._past: dict[str, Past] = {}

    def add(self, gpus: Iterable[Gpu]) -> None:
        """Adds one look at the GPUs."""
        for gpu in gpus:
            past = self._past.setdefault(gpu.uuid, Past())
            percent = gpu.utilisation_percent
            past.use.append(None if percent is None else percent / 100)
            past.memory.append(gpu.used_mb / gpu.total_mb if gpu.total_mb and gpu.problem is None else None)

    def of(self, uuid: str) -> Past:
        """The past of this GPU."""
        return self._past.get(uuid) or Past()
