"""Queues and jobs as the pages show them: frozen data, read from a run folder; nothing here changes a run.

Pages of jobs are read from the queue's indexes (``jobs.monitor.job_status``), so that of 100,000 jobs no more is read
than is shown. Words are those of ``gpuherd status``. Text of jobs is cleaned here and escaped by the templates.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import GpuherdError, QueueUnreadable, UsageError, clean, printable
from gpuherd.jobs.attempts.failures import in_words
from gpuherd.jobs.control.messages import ControlKind
from gpuherd.jobs.job import ENDED, Job, JobState, job_of
from gpuherd.jobs.monitor import format as words
from gpuherd.jobs.monitor.job_status import JobSelection
from gpuherd.jobs.monitor.logs import log_of
from gpuherd.jobs.monitor.status import RunStatus, attempts_of, opened, snapshot, status_of
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.records import AttemptRow, AttemptState, JobStatus
from gpuherd.units import counted, duration
from gpuherd.web.places import Place

PAGE_JOBS = 50
LONGEST_SEARCH = 200
# SQLite's numbers are of 64 bits.
_MOST_JOBS = 2**31
_ATTEMPTS = 50
_BAR = "[━╌]+ ?"  # the terminal's bar, in whose place the page has one of its own
_LONGEST_COMMAND = 20_000
_TODAY_S = 43_200
_LAST_SECOND = 32_503_680_000.0  # of the year 2999; a clock that is further on is wrong
_STATES = tuple(JobState)


class NotThere(GpuherdError):
    """What the address names is not there, or no more."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU that a queue may use: ``note`` says that it is free, runs a job of the queue, or why it is not free."""

    label: str
    note: str
    is_free: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueView:
    """A queue at one moment.

    Attributes:
        headline: the counts in a line. ``counts``: by state, with ``paused``.
        dispatcher: which gpuherd works on it, in a sentence. ``is_worked``: one does; ``is_ending``: it starts nothing.
        next_job: title, number and reason of the waiting job that is first in line; None where none waits.
        gpus: those that the dispatcher may use.
        notes: what people should know: GPUs that are left out, why nothing starts.
        problem: why the queue can't be read; the other fields are empty then.
    """

    place: Place
    headline: str = ""
    counts: Mapping[str, int]
    dispatcher: str = ""
    is_worked: bool = False
    is_ending: bool = False
    next_job: tuple[str, int, str] | None = None
    gpus: tuple[GpuUse, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def total(self) -> int:
        """All jobs of the latest submission."""
        return sum(self.counts.get(state.value, 0) for state in _STATES)


@dataclass(frozen=True, slots=True)
class JobLine:
    """A job in a list.

    Attributes:
        id: its number, by which addresses and forms name it.
        state: the word for people (``paused``, ``handed`` besides the states).
        gpus: its GPUs, or how many it asks for.
        what: progress, why it waits, how it ended.
        done: how much of it is done, from 0 to 1; None where unknown.
        may: the requests that can do something for it now.
    """

    id: int
    title: str
    name: str
    state: str
    gpus: str
    what: str
    done: float | None
    priority: int
    may: frozenset[ControlKind]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs a page lists: in this state (all if None), with this text in their name, from which one on."""

    state: JobState | None = None
    text: str = ""
    page: int = 1

    @staticmethod
    def of(query: Mapping[str, str]) -> Filter:
        """From an address; what is no state and no number there means all, and the first page.

        >>> Filter.of({"state": "failed", "q": " a\\x1b[1m ", "page": "2"}), Filter.of({"page": "-9", "state": "x"})
        (Filter(state=<JobState.FAILED: 'failed'>, text='a', page=2), Filter(state=None, text='', page=1))
        """
        state = query.get("state", "")
        number = query.get("page", "1")
        digits = number.isascii() and number.isdigit() and len(number) < 9
        return Filter(
            state=JobState(state) if state in set(_STATES) else None,
            text=clean(query.get("q", "")[:LONGEST_SEARCH]),
            page=max(1, min(int(number), _MOST_JOBS // PAGE_JOBS)) if digits else 1,
        )

    @property
    def selection(self) -> JobSelection:
        """The same for ``monitor.status``."""
        states = () if self.state is None else (self.state,)
        return JobSelection(states=states, text=self.text, limit=PAGE_JOBS, offset=(self.page - 1) * PAGE_JOBS)


@dataclass(frozen=True, slots=True)
class JobsView:
    """A page of the jobs of a queue. ``matching``: how many jobs the page is taken from."""

    queue: QueueView
    filter: Filter
    jobs: tuple[JobLine, ...]
    matching: int

    @property
    def pages(self) -> int:
        """How many pages there are, at least one."""
        return max(1, -(-self.matching // PAGE_JOBS))


@dataclass(frozen=True, slots=True)
class AttemptLine:
    """An attempt of a job, in words. ``is_over``: nothing is added to its log any more."""

    number: int
    state: str
    where: str
    began: str
    took: str
    waited: str
    peak: str
    ended_by: str
    is_over: bool
    log: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job.

    Attributes:
        command: as a shell would take it, without control characters.
        facts: (what, value), in order.
        needs: (number, title, state) of the jobs that it needs.
        attempts: the latest first.
    """

    queue: QueueView
    line: JobLine
    command: str
    facts: tuple[tuple[str, str], ...]
    needs: tuple[tuple[int, str, str], ...]
    attempts: tuple[AttemptLine, ...]

    def attempt(self, number: int | None) -> AttemptLine | None:
        """The attempt with this number, or the latest; None where there is none."""
        return next((each for each in self.attempts if number is None or each.number == number), None)


# --- queues -------------------------------------------------------------------------------------------------------


def read_queue(place: Place) -> QueueView:
    """A queue, with the first of its waiting jobs; never raises for one that can't be read."""
    try:
        with _reading(place) as reader:
            status = status_of(place.run, reader, JobSelection(states=(JobState.WAITING,), limit=1))
            return _queue(place, status, next(iter(status.jobs), None))
    except GpuherdError as problem:
        return QueueView(place=place, counts={}, problem=str(problem))


@contextmanager
def _reading(place: Place) -> Iterator[QueueReader]:
    """The queue. Raises NotThere where it is gone, and QueueUnreadable also for content that no gpuherd writes: the
    folder may be a stranger's."""
    try:
        with opened(place.run) as reader:
            yield reader
    except UsageError as problem:
        raise NotThere(str(problem)) from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as problem:
        raise QueueUnreadable(
            f"the queue in {place.folder} holds what no gpuherd writes ({type(problem).__name__}: {problem})"
        ) from problem


def _queue(place: Place, status: RunStatus, first: JobStatus | None = None) -> QueueView:
    state = None if status.dispatcher is None else status.dispatcher.state
    gpus = (
        ()
        if state is None
        else tuple(
            GpuUse(
                clean(gpu.label),
                "runs a job of this queue" if gpu.ours else clean(gpu.busy or "free"),
                gpu.busy is None,
            )
            for gpu in state.gpus
        )
    )
    notes = [f"GPU {clean(label)} {clean(sentence)}" for label, sentence in status.left_out.items()]
    if status.in_engine is not None:
        notes.append(words.in_engine(status.in_engine))
    return QueueView(
        place=place,
        headline=words.headline(status),
        counts={each.value: int(getattr(status.counts, each.value)) for each in _STATES} | {"paused": status.paused},
        dispatcher=words.at_work(status),
        is_worked=status.dispatcher is not None,
        is_ending=state is not None and state.mode != "working",
        next_job=None if first is None else (clean(first.title), first.id, clean(first.reason or "")),
        gpus=gpus,
        notes=tuple(notes),
    )


# --- jobs ---------------------------------------------------------------------------------------------------------


def read_jobs(place: Place, chosen: Filter) -> JobsView:
    """A page of jobs. Raises NotThere for a queue that is gone, QueueUnreadable."""
    with _reading(place) as reader:
        status = status_of(place.run, reader, chosen.selection)
        return JobsView(_queue(place, status), chosen, tuple(map(line_of, status.jobs)), status.matching)


def line_of(job: JobStatus) -> JobLine:
    """A job as a line of a list."""
    progress = None if job.attempt is None or job.state is not JobState.RUNNING else job.attempt.progress
    done = min(1.0, progress.done / progress.total) if progress is not None and progress.total else None
    what = words.what(job)
    return JobLine(
        id=job.id,
        title=clean(job.title),
        name=clean(job.name),
        state=words.state_word(job),
        gpus=words.gpus(job),
        what=what if done is None else re.sub(_BAR, "", what),
        done=done,
        priority=job.priority,
        may=may(job),
    )


def may(job: JobStatus) -> frozenset[ControlKind]:
    """The requests that can do something for a job now."""
    if job.state in ENDED:
        return frozenset() if job.state is JobState.DONE else frozenset({ControlKind.RETRY})
    pause = ControlKind.RESUME if job.paused else ControlKind.PAUSE
    return frozenset({ControlKind.CANCEL, ControlKind.PRIORITY, pause})


def names_of(place: Place, ids: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the jobs with these numbers. Raises NotThere where one does not exist, QueueUnreadable."""
    with _reading(place) as reader:
        names = [reader.value("SELECT name FROM jobs WHERE id = ?", (number,)) for number in ids]
    for number, name in zip(ids, names, strict=True):
        if name is None:
            raise NotThere(f"there is no job number {number} in this queue")
    return tuple(names)


def read_job(place: Place, number: int) -> JobView:
    """A job by its number. Raises NotThere for one that does not exist, QueueUnreadable."""
    with _reading(place) as reader:
        name = reader.value("SELECT name FROM jobs WHERE id = ?", (number,))
        if name is None:
            raise NotThere(f"there is no job number {number} in this queue")
        return _job(place, reader, number, name)


def _job(place: Place, reader: QueueReader, number: int, name: str) -> JobView:
    page = JobSelection(names=(name,), limit=1)
    with snapshot(place.run, reader, page) as taken:
        job = next(taken.jobs(taken.rows()), None)
        if job is None:
            raise NotThere(f"job number {number} is not of the latest submission of this queue; its record is kept")
        status = taken.status
        spec = job_of(reader.value("SELECT spec FROM jobs WHERE id = ?", (number,)))
        attempts = attempts_of(reader, name)
        needs = reader.rows(
            "SELECT n.id, n.name, n.state FROM needs JOIN jobs n ON n.id = needs.needed WHERE needs.job = ?"
            " ORDER BY n.id LIMIT 100",
            (number,),
        )
        reasons = {
            each["id"]: each["reason"]
            for each in reader.rows("SELECT id, reason FROM attempts WHERE job = ?", (number,))
        }
    latest = job.attempt
    # The status knows more of an attempt that runs than the queue has recorded.
    known = [latest if latest is not None and latest.id == each.id else each for each in attempts[-_ATTEMPTS:]]
    return JobView(
        queue=_queue(place, status),
        line=line_of(job),
        command=_command(spec),
        facts=_facts(job, spec, status.at),
        needs=tuple((need["id"], clean(need["name"]), need["state"]) for need in needs),
        attempts=tuple(_attempt(place, each, reasons.get(each.id), status.at) for each in reversed(known)),
    )


def _command(spec: Job) -> str:
    text = printable(shlex.join(spec.argv))
    return text if len(text) <= _LONGEST_COMMAND else f"{text[:_LONGEST_COMMAND]}… ({len(text)} characters)"


def _facts(job: JobStatus, spec: Job, now: float) -> tuple[tuple[str, str], ...]:
    """What the job asks for, and what limits it, as far as there is something to say."""
    asks = "no GPU" if job.gpus == 0 else counted(job.gpus, "GPU")
    if job.memory_mb is not None and job.gpus:
        asks += f" with {job.memory_mb} MB of free memory" + (" each" if job.gpus > 1 else "")
    limits = {"in all": spec.timeout_s, "in a stage": spec.stage_timeout_s, "without progress": spec.heartbeat_s}
    facts = {
        "asks for": asks + (f" ({clean(job.learned)})" if job.learned else ""),
        "priority": str(job.priority),
        "folder": clean(spec.cwd or ""),
        "time limits": ", ".join(f"{duration(limit)} {what}" for what, limit in limits.items() if limit is not None),
        "tries": f"{job.tries} of {spec.retries + 1} have failed" if job.tries else "",
        "could run since": _when(job.ready_at, now) if job.ready_at is not None else "",
        "result": clean(spec.result or ""),
    }
    return tuple((what, value) for what, value in facts.items() if value)


def _attempt(place: Place, attempt: AttemptRow, reason: str | None, now: float) -> AttemptLine:
    ended_by = clean(reason or "")
    if attempt.failure_class is not None:
        ended_by = in_words(attempt.failure_class, attempt.exit_code, ended_by)
    state = attempt.state.value
    if attempt.state is AttemptState.RUNNING and attempt.paused:
        state = "paused"
    return AttemptLine(
        number=attempt.number,
        state=state,
        where=words.place(attempt),
        began=_when(attempt.started_at, now),
        took="" if attempt.worked_s is None else duration(attempt.worked_s),
        waited=duration(attempt.wait_s) if attempt.wait_s >= 1 else "",
        peak="" if attempt.peak_mb is None else f"{attempt.peak_mb} MB",
        ended_by=ended_by,
        is_over=attempt.state is not AttemptState.RUNNING,
        log=log_of(place.run, attempt),
    )


def _when(at: float, now: float) -> str:
    """A moment as people write it; today without the date."""
    local = time.localtime(min(max(at, 0.0), _LAST_SECOND))
    return time.strftime("%H:%M:%S" if 0 <= now - at < _TODAY_S else "%Y-%m-%d %H:%M", local)
