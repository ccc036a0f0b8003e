"""A run's status as tables and as JSON."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from gpuherd.jobs.attempts.failures import clean, in_words
from gpuherd.jobs.dispatcher_state import there
from gpuherd.jobs.job import ENDED, JobState
from gpuherd.jobs.monitor.format import bar, counted, duration
from gpuherd.jobs.monitor.job_status import SHOWN_FIRST, AttemptStatus, DispatcherStatus, JobStatus, Page, RunStatus
from gpuherd.jobs.monitor.status import looking, opened
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.run_dir import RunDirectory

if TYPE_CHECKING:
    from rich.console import RenderableType


# A run's status as people read it: pure functions of ``RunStatus``.
#
# The table is for a terminal of 80 columns and more; where it is narrow the reasons get more lines, names are never
# cut.

COLOURS = {
    JobState.RUNNING: "green",
    JobState.FAILED: "red",
    JobState.WAITING: "cyan",
    JobState.CANCELLED: "yellow",
    JobState.DONE: "default",
}
PAUSED_COLOUR = "magenta"
_BAR = 8


def headline(status: RunStatus) -> str:
    """The counts in one line."""
    in_line = 0 if status.in_engine is None else status.in_engine.in_line
    return counted(status.counts, paused=status.paused, in_line=in_line, eta_s=status.eta_s)


def at_work(status: RunStatus) -> str:
    """Who works on the run, in one line."""
    if status.dispatcher is None:
        unfinished = status.counts.waiting + status.counts.running
        how = "; the same command again (or gpuherd up, for your own queue) goes on" if unfinished else ""
        meanwhile = "" if status.in_engine is None else f"; {there(status.in_engine)}, all the same"
        return f"no gpuherd works on it now{meanwhile}{how}"
    since = time.strftime(
        "%H:%M" if status.at - status.dispatcher.since < 86_400 else "%Y-%m-%d %H:%M",
        time.localtime(status.dispatcher.since),
    )
    text = f"gpuherd (pid {status.dispatcher.pid}) works on it since {since}"
    told = status.dispatcher.standing
    if told is None:
        return text
    if told.mode != "working":
        return f"{text}; it is {told.mode}: nothing new is started"
    if told.away is not None:
        text += f"; {clean(told.away)}"
    return text if told.closed is None else f"{text}; nothing is started now: {clean(told.closed)}"


def state_word(job: JobStatus) -> str:
    """The job's state; ``paused`` for one that stands still, ``handed`` for one in the line of an engine."""
    if job.paused:
        return "paused"
    return "handed" if _is_in_line(job) else job.state.value


def _is_in_line(job: JobStatus) -> bool:
    return job.state is JobState.RUNNING and job.attempt is not None and job.attempt.in_line


def colour(job: JobStatus) -> str:
    """The state's colour."""
    if job.paused:
        return PAUSED_COLOUR
    return COLOURS[JobState.WAITING if _is_in_line(job) else job.state]


def gpus(job: JobStatus) -> str:
    """Its GPUs, or those of its latest attempt; while it waits how many it asks for, if that is not one."""
    if job.state is JobState.WAITING or job.attempt is None or _is_in_line(job):
        return "CPU" if job.gpus == 0 else "" if job.gpus == 1 else f"any {job.gpus}"
    return where(job.attempt)


def where(attempt: AttemptStatus) -> str:
    """Where an attempt runs or ran: its GPUs, the node of a cluster that it has none on, or the CPU; nothing for one
    that a cluster has not begun."""
    if attempt.gpus:
        return ",".join(clean(label) for label in attempt.gpus)
    if attempt.handed is None:
        return "CPU"
    return f"CPU of {clean(attempt.handed.node)}" if attempt.handed.node else ""


def what(job: JobStatus) -> str:
    """The most telling words about it: progress, why it waits, how it ended."""
    attempt = job.attempt
    if job.state is JobState.RUNNING and attempt is not None:
        return _running(job, attempt)
    reason = "" if job.reason is None else clean(job.reason)
    if job.state is JobState.WAITING and job.learned is not None:
        asks = f"asks for {job.memory_mb} MB: {job.learned}"
        return f"{reason}; {asks}" if reason else asks
    if attempt is None:
        return reason
    if job.state is JobState.DONE:
        return "" if attempt.run_s is None else f"in {duration(attempt.run_s)}"
    if job.state is JobState.FAILED and attempt.failure_class is not None:
        tries = "" if job.attempts < 2 else f", {job.attempts} attempts"
        return in_words(f"{attempt.failure_class}{tries}", attempt.exit_code, reason)
    return reason


def _running(job: JobStatus, attempt: AttemptStatus) -> str:
    if attempt.run_s is None:  # its process is gone, and its end not recorded yet
        reason = "" if job.reason is None else clean(job.reason)
        return f"{reason}, for {duration(attempt.wait_s)}" if attempt.in_line else reason
    run_s = max(0.0, attempt.run_s - attempt.paused_s)
    if job.reason:  # it stands still or is being ended: how long yet is anybody's guess
        time_told = f"ran for {duration(run_s)}"
    else:
        time_told = f"{duration(attempt.eta_s)} left" if attempt.eta_s is not None else f"for {duration(run_s)}"
    stage = None if attempt.progress is None else attempt.progress.stage
    parts = [bar(attempt.progress, _BAR), time_told, clean(stage) if stage else ""]
    told = ", ".join(part for part in parts if part)
    return f"{clean(job.reason)}; {told}" if job.reason else told


def as_table(status: RunStatus, height: int | None = None) -> RenderableType:
    """The status for people. ``height``: on a screen of so many lines, from which nothing scrolls away: a job gets one
    line, and the jobs that have no place are counted.
    """
    from rich.console import Group

    return Group(*as_tables(status, [status.jobs], height))


def as_tables(
    status: RunStatus, pages: Iterable[Sequence[JobStatus]], height: int | None = None
) -> Iterator[RenderableType]:
    """The same in parts, with a table for each page of its jobs, which is made when it is wanted."""
    from rich.console import Group
    from rich.text import Text

    rest = iter(pages)
    jobs = next(rest, ())
    head = [
        # In one line, to be copied; where that is wider than the terminal, it is the terminal that folds it.
        Text(f"{status.folder}", style="bold", no_wrap=True, overflow="ignore" if height is None else "ellipsis"),
        Text(headline(status)),
        Text(at_work(status), style="" if status.dispatcher else "yellow"),
    ]
    if status.held:
        head.append(Text(_held(status, jobs), style=PAUSED_COLOUR))
    head += [Text(f"GPU {clean(label)} is {clean(told)}", style="yellow") for label, told in status.left_out.items()]
    yield Group(*head)
    if height is not None:
        # Below: a blank line and the heading, what is left out, when it was made, and the cursor's own line.
        jobs = _that_fit(jobs, max(2, height - len(head) - 6))
    shown: Counter[JobState] = Counter()
    while jobs:
        shown.update(job.state for job in jobs)
        yield Group(Text(), _table(jobs, one_line=height is not None))
        jobs = next(rest, ())
    for line in _left_out(status, shown):
        yield Text(line, style="dim")


def _held(status: RunStatus, jobs: Sequence[JobStatus]) -> str:
    """Which of the waiting jobs are paused, in one line; somebody may have forgotten them."""
    waiting = status.paused - sum(job.paused and job.state is JobState.RUNNING for job in jobs)
    others = " and others" if waiting > len(status.held) else ""
    return f"paused: {', '.join(clean(name) for name in status.held)}{others} (gpuherd resume)"


def _table(jobs: Sequence[JobStatus], *, one_line: bool) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("State", no_wrap=True)
    table.add_column("Job", overflow="fold", min_width=12, max_width=40)
    table.add_column("GPU", no_wrap=True)
    table.add_column("What", overflow="fold", min_width=24, ratio=1)
    for job in jobs:
        told = Text(what(job))
        title = Text(clean(job.title))
        if job.state is JobState.RUNNING or one_line:
            told.no_wrap, told.overflow = True, "ellipsis"
        if one_line:
            title.no_wrap, title.overflow = True, "ellipsis"
        table.add_row(Text(state_word(job), style=colour(job)), title, gpus(job), told)
    return table


def _that_fit(jobs: Sequence[JobStatus], rows: int) -> Sequence[JobStatus]:
    """So many of the jobs: what runs gets half of the room, and more where the others leave some."""
    running = [job for job in jobs if job.state is JobState.RUNNING]
    others = [job for job in jobs if job.state is not JobState.RUNNING]
    of_running = min(len(running), max((rows + 1) // 2, rows - len(others)))
    return (*running[:of_running], *others[: rows - of_running])


def _left_out(status: RunStatus, shown: Counter[JobState]) -> list[str]:
    """How many of each state the table does not show."""
    if shown.total() == status.matching:
        return [] if shown or not status.counts.total else ["no job is like that"]
    left = {state: getattr(status.counts, state.value) - shown[state] for state in SHOWN_FIRST}
    told = ", ".join(f"{number} {state.value}" for state, number in left.items() if number > 0)
    return [f"and {told} (gpuherd status --all, or --state STATE)"] if told else []


# A run's status as JSON; the schema is in docs/control.md.
#
# Most jobs of a long run have ended and will not change, and all that JSON has of them is in their rows: SQLite makes
# their text itself, twenty times as fast as by way of ``JobStatus``. What it makes is equal to what ``_job`` makes,
# but that it writes times with 15 digits.

_TOGETHER = 500
_JOB_FIELDS = tuple(field.name for field in fields(JobStatus))
_ATTEMPT_FIELDS = tuple(field.name for field in fields(AttemptStatus))
_encode = json.JSONEncoder(separators=(",", ":")).encode

# The JSON of a job that has ended: the same as ``jobstatus`` and ``_job`` make.
_TEXT_OF_ENDED = """
json_object('id', id, 'name', name, 'title', coalesce(nullif(json_extract(spec, '$.title'), ''), name),
    'state', state, 'paused', json(CASE held WHEN 0 THEN 'false' ELSE 'true' END), 'reason', reason, 'gpus', gpus,
    'memory_mb', memory_mb, 'learned', NULL, 'priority', priority, 'tries', tries, 'attempts', attempts,
    'ready_at', NULL, 'command', json_extract(spec, '$.argv'), 'attempt', (
        SELECT json_object('id', a.id, 'number', number, 'state', a.state, 'gpus', json(labels),
            'gpu_uuids', json(a.gpus), 'pid', CASE engine WHEN 'local' THEN pid END, 'log', log,
            'started_at', started_at, 'ended_at', ended_at,
            'run_s', CASE WHEN engine = 'local' OR node IS NOT NULL OR a.state = 'done'
                THEN max(0.0, ended_mono - started_mono) END,
            'wait_s', wait_s, 'exit_code', exit_code, 'signal', signal, 'failure_class', class, 'peak_mb', peak_mb,
            'paused', json('[]'), 'paused_s', paused_s, 'progress', NULL, 'eta_s', NULL,
            'handed', CASE WHEN engine <> 'local' THEN
                json_object('engine', engine, 'batch', batch, 'index', place, 'handle', handle, 'node', node) END)
        FROM attempts a WHERE job = jobs.id ORDER BY a.id DESC LIMIT 1))
"""


def json_text(run: RunDirectory, page: Page, *, lines: bool = True) -> Iterator[str]:
    """The status with all jobs of a page without ``offset`` and ``each``, as pieces of one JSON text.

    Nothing is yielded before all is read, so that a slow reader of the text does not hold the queue's snapshot; what is
    read is kept compressed meanwhile.

    Args:
        lines: a line for each job and each other key, for people to read too; else all in one line.

    Raises UsageError without a queue, and QueueUnreadable.
    """
    with opened(run) as reader, looking(run, reader, page) as look:
        head = as_json(look.status)
        by_sqlite = _can_make_text(reader)
        texts = (
            text
            for state in SHOWN_FIRST
            for text in (
                map(_ascii, look.columns(state, _TEXT_OF_ENDED))
                if by_sqlite and state in ENDED
                else (_encode(_job(job)) for job in look.jobs((state,)))
            )
        )
        kept = [zlib.compress(piece.encode("ascii"), 1) for piece in _pieces(texts, ",\n    " if lines else ",")]
    whole = json.dumps(head, indent=2 if lines else None)
    begun, _, _ = whole.rpartition("[]")
    yield begun + ("[\n    " if lines and kept else "[")
    for piece in kept:
        yield zlib.decompress(piece).decode("ascii")
    yield "\n  ]\n}" if lines and kept else "]\n}" if lines else "]}"


def as_json(status: RunStatus) -> dict[str, Any]:
    """The status as plain data, the jobs last."""
    return {
        "folder": str(status.folder),
        "time": status.at,
        "counts": {
            **asdict(status.counts),
            "total": status.counts.total,
            "paused": status.paused,
            "in_line": 0 if status.in_engine is None else status.in_engine.in_line,
        },
        "in_engine": None if status.in_engine is None else asdict(status.in_engine),
        "eta_s": None if status.eta_s is None else round(status.eta_s, 1),
        "left_out": dict(status.left_out),
        "dispatcher": None if status.dispatcher is None else _dispatcher(status.dispatcher),
        "matching": status.matching,
        "jobs": [_job(job) for job in status.jobs],
    }


def _dispatcher(dispatcher: DispatcherStatus) -> dict[str, Any]:
    told = dispatcher.standing
    return {
        "pid": dispatcher.pid,
        "since": dispatcher.since,
        "mode": None if told is None else told.mode,
        "closed": None if told is None else told.closed,
        "away": None if told is None else told.away,
        "settings": None if told is None else dict(told.settings),
        "gpus": None if told is None else [asdict(gpu) for gpu in told.gpus],
    }


def _job(job: JobStatus) -> dict[str, Any]:
    told = {name: getattr(job, name) for name in _JOB_FIELDS}
    attempt = job.attempt
    if attempt is not None:
        told["attempt"] = {name: getattr(attempt, name) for name in _ATTEMPT_FIELDS}
        told["attempt"]["progress"] = None if attempt.progress is None else asdict(attempt.progress)
        told["attempt"]["handed"] = None if attempt.handed is None else asdict(attempt.handed)
    return told


def _can_make_text(reader: QueueReader) -> bool:
    """Whether SQLite was built with JSON, and the file has all columns: one of an older gpuherd lacks some."""
    return reader.has("attempts", "engine") and reader.can("SELECT json_object('a', json('[]'))")


def _ascii(text: str) -> str:
    return text if text.isascii() else _encode(json.loads(text))


def _pieces(texts: Iterable[str], between: str) -> Iterator[str]:
    """The texts with ``between`` between them, many to a piece."""
    rest, lead = iter(texts), ""
    while together := list(islice(rest, _TOGETHER)):
        yield lead + between.join(together)
        lead = between
