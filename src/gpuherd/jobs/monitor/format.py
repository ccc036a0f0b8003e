"""A run's status in words, as tables and as JSON: functions of ``RunStatus`` and ``JobStatus``.

Text that comes from a job passes through ``failures.clean``, so that a terminal obeys none of it. Tables are made for
terminals of 80 columns and more; where it is narrow the reasons get more lines, and names are never cut.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from gpuherd.engines.progress import Progress
from gpuherd.errors import clean
from gpuherd.jobs.attempts.failures import in_words
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.job import JobState
from gpuherd.jobs.monitor.job_status import SHOWN_FIRST, JobSelection
from gpuherd.jobs.monitor.status import DispatcherStatus, InEngine, RunStatus, opened, snapshot
from gpuherd.jobs.monitor.turns import Turn
from gpuherd.jobs.records import AttemptRow, Counts, JobStatus
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.units import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

COLOURS = {
    JobState.RUNNING: "green",
    JobState.FAILED: "red",
    JobState.WAITING: "cyan",
    JobState.CANCELLED: "yellow",
    JobState.DONE: "default",
}
PAUSED_COLOUR = "magenta"
_BAR_WIDTH, _TABLE_BAR_WIDTH = 20, 8


# --- a run --------------------------------------------------------------------------------------------------------


def counted(counts: Counts, *, paused: int = 0, in_line: int = 0, eta_s: float | None = None) -> str:
    """Counts in one line. ``paused`` of the running and waiting jobs are paused; ``in_line`` of the running ones were
    handed over to an engine that has not begun them.

    >>> counted(Counts(waiting=12, running=4, done=3, failed=1), eta_s=300)
    '3 of 20 done, 1 failed, 4 running, 12 waiting, about 5 min 0 s left'
    """
    parts = [f"{counts.done} of {counts.total} done"]
    for number, word in ((counts.failed, "failed"), (counts.cancelled, "cancelled")):
        if number:
            parts.append(f"{number} {word}")
    parts += [f"{counts.running - in_line} running", f"{counts.waiting} waiting"]
    if in_line:
        parts.insert(-1, f"{in_line} handed over")
    if paused:
        parts.append(f"{paused} paused")
    if eta_s is not None and counts.running + counts.waiting:
        parts.append(f"about {duration(eta_s)} left")
    return ", ".join(parts)


def headline(status: RunStatus) -> str:
    """The counts of a run in one line."""
    in_line = 0 if status.in_engine is None else status.in_engine.in_line
    return counted(status.counts, paused=status.paused, in_line=in_line, eta_s=status.eta_s)


def at_work(status: RunStatus) -> str:
    """Which gpuherd works on the run, in one line."""
    if status.dispatcher is None:
        unfinished = status.counts.waiting + status.counts.running
        how = "; the same command again (or gpuherd up, for your own queue) goes on" if unfinished else ""
        meanwhile = "" if status.in_engine is None else f"; {in_engine(status.in_engine)}, all the same"
        return f"no gpuherd works on it now{meanwhile}{how}"
    since = time.strftime(
        "%H:%M" if status.at - status.dispatcher.since < 86_400 else "%Y-%m-%d %H:%M",
        time.localtime(status.dispatcher.since),
    )
    text = f"gpuherd (pid {status.dispatcher.pid}) works on it since {since}"
    state = status.dispatcher.state
    if state is None:
        return text
    if state.mode != "working":
        return f"{text}; it is {state.mode}: nothing new is started"
    if state.away is not None:
        text += f"; {clean(state.away)}"
    if status.turn is not None:
        others = ", ".join(clean(user.user) for user in status.turn.others)
        text += f"; for GPUs also wait: {others}; the next job {_next_start(status.turn, status.at)}"
    return text if state.closed is None else f"{text}; nothing is started now: {clean(state.closed)}"


def _next_start(turn: Turn, now: float) -> str:
    return turn.start_sentence(now) if turn.starts_at is not None else "starts at a time that can't be predicted"


def in_engine(there: InEngine) -> str:
    """The jobs in an engine, as a part of a sentence.

    >>> in_engine(InEngine("slurm", 12, 5)), in_engine(InEngine("ray", 1, 1))
    ('12 jobs in SLURM, 5 of them in its queue', '1 job in Ray, in its queue')
    """
    if there.jobs == 1:
        return f"1 job in {engine_name(there.engine)}" + (", in its queue" if there.in_line else "")
    of_them = f", {there.in_line} of them in its queue" if there.in_line else ""
    return f"{there.jobs} jobs in {engine_name(there.engine)}{of_them}"


# --- a job --------------------------------------------------------------------------------------------------------


def state_word(job: JobStatus) -> str:
    """The job's state; ``paused`` for a paused one, ``handed`` for one in an engine's queue."""
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


def where(attempt: AttemptRow) -> str:
    """Where an attempt runs or ran: its GPUs (``0,3:1``), ``CPU of NODE`` on a cluster, or ``CPU``; "" for one that a
    cluster has not begun."""
    if attempt.gpus:
        return ",".join(clean(label) for label in attempt.gpus)
    if attempt.handed is None:
        return "CPU"
    return f"CPU of {clean(attempt.handed.node)}" if attempt.handed.node else ""


def place(attempt: AttemptRow) -> str:
    """Where an attempt runs or ran, with the word: ``GPU 0,3:1``."""
    return f"GPU {where(attempt)}" if attempt.gpus else where(attempt)


def bar(progress: Progress | None, width: int = _BAR_WIDTH) -> str:
    """How far a job is: a bar and figures where it reported a total, else the count.

    >>> bar(Progress(3, 12), 8)
    '━━╌╌╌╌╌╌ 3/12'
    """
    if progress is None:
        return ""
    if not progress.total:
        return f"{progress.done} done"
    filled = round(min(1.0, progress.done / progress.total) * width)
    return f"{'━' * filled}{'╌' * (width - filled)} {progress.done}/{progress.total}"


def stage(attempt: AttemptRow) -> str:
    """The stage that a running attempt reports, "" for none."""
    return "" if attempt.progress is None or not attempt.progress.stage else clean(attempt.progress.stage)


def time_left(attempt: AttemptRow) -> str:
    """How long a running attempt will still take, or where that is unknown for how long it has run."""
    return f"for {duration(attempt.worked_s or 0)}" if attempt.eta_s is None else f"{duration(attempt.eta_s)} left"


def what(job: JobStatus) -> str:
    """The most useful words about a job: its progress, why it waits, how it ended."""
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


def _running(job: JobStatus, attempt: AttemptRow) -> str:
    reason = "" if job.reason is None else clean(job.reason)
    if attempt.worked_s is None:  # in an engine's queue, or its process is gone and its end not recorded yet
        return f"{reason}, for {duration(attempt.wait_s)}" if attempt.in_line else reason
    # A paused job, or one that is being ended, has no useful estimate.
    time_text = f"ran for {duration(attempt.worked_s)}" if reason else time_left(attempt)
    text = ", ".join(part for part in (bar(attempt.progress, _TABLE_BAR_WIDTH), time_text, stage(attempt)) if part)
    return f"{reason}; {text}" if reason else text


# --- tables -------------------------------------------------------------------------------------------------------


def as_table(status: RunStatus, height: int | None = None) -> RenderableType:
    """The status for people. ``height``: for a screen of so many lines that must not scroll: a job gets one line, and
    the jobs for which there is no room are counted.
    """
    from rich.console import Group

    return Group(*as_tables(status, [status.jobs], height))


def as_tables(
    status: RunStatus, pages: Iterable[Sequence[JobStatus]], height: int | None = None
) -> Iterator[RenderableType]:
    """The status in parts, with a table for each page of its jobs, made when it is used."""
    from rich.console import Group
    from rich.text import Text

    rest = iter(pages)
    jobs = next(rest, ())
    head = [
        # In one line, to be copied; the terminal folds it where that is wider.
        Text(f"{status.folder}", style="bold", no_wrap=True, overflow="ignore" if height is None else "ellipsis"),
        Text(headline(status)),
        Text(at_work(status), style="" if status.dispatcher else "yellow"),
    ]
    if status.held:
        head.append(Text(_held(status, jobs), style=PAUSED_COLOUR))
    head += [Text(f"GPU {clean(label)} is {clean(text)}", style="yellow") for label, text in status.left_out.items()]
    yield Group(*head)
    if height is not None:
        # Below: a blank line and the heading, the counts, the time of the look, and the cursor's own line.
        jobs = _that_fit(jobs, max(2, height - len(head) - 6))
    shown: Counter[JobState] = Counter()
    while jobs:
        shown.update(job.state for job in jobs)
        yield Group(Text(), _table(jobs, one_line=height is not None))
        jobs = next(rest, ())
    for line in _omitted(status, shown):
        yield Text(line, style="dim")


def _held(status: RunStatus, jobs: Sequence[JobStatus]) -> str:
    """Which of the waiting jobs are paused, in one line, in case they were forgotten."""
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
        text, title = Text(what(job)), Text(clean(job.title))
        if job.state is JobState.RUNNING or one_line:
            text.no_wrap, text.overflow = True, "ellipsis"
        if one_line:
            title.no_wrap, title.overflow = True, "ellipsis"
        table.add_row(Text(state_word(job), style=colour(job)), title, gpus(job), text)
    return table


def _that_fit(jobs: Sequence[JobStatus], rows: int) -> Sequence[JobStatus]:
    """The jobs for which there is room: running jobs get half of the rows, and more where the others leave some."""
    running = [job for job in jobs if job.state is JobState.RUNNING]
    others = [job for job in jobs if job.state is not JobState.RUNNING]
    of_running = min(len(running), max((rows + 1) // 2, rows - len(others)))
    return (*running[:of_running], *others[: rows - of_running])


def _omitted(status: RunStatus, shown: Counter[JobState]) -> list[str]:
    """How many of each state the table does not show."""
    if shown.total() == status.matching:
        return [] if shown or not status.counts.total else ["no job matches"]
    left = {state: getattr(status.counts, state.value) - shown[state] for state in SHOWN_FIRST}
    text = ", ".join(f"{number} {state.value}" for state, number in left.items() if number > 0)
    return [f"and {text} (gpuherd status --all, or --state STATE)"] if text else []


# --- JSON; the schema is in docs/control.md -----------------------------------------------------------------------
#
# Most jobs of a long run have ended, will not change, and are wholly in their rows: SQLite itself makes their text,
# twenty times as fast as by way of ``JobStatus``, and equal to what ``_job`` makes but for times with 15 digits.

_TOGETHER = 500
_JOB_FIELDS = tuple(each.name for each in fields(JobStatus))
_ATTEMPT_FIELDS = tuple(each.name for each in fields(AttemptRow) if each.name not in ("job", "shared_mb"))
_encode = json.JSONEncoder(separators=(",", ":")).encode

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


def json_text(run: RunDirectory, page: JobSelection, *, lines: bool = True) -> Iterator[str]:
    """The status with all jobs of a page without ``offset`` and ``each``, as pieces of one JSON text.

    Nothing is yielded before all is read, so that a slow reader of the text does not hold the queue's snapshot; the
    text is kept compressed meanwhile.

    Args:
        lines: a line for each job and each other key, which people can read too; else all in one line.

    Raises UsageError without a queue, and QueueUnreadable.
    """
    with opened(run) as reader, snapshot(run, reader, page) as taken:
        head = as_json(taken.status)
        texts = (
            text
            for ended, rows in groupby(taken.rows(of_ended=f"{_TEXT_OF_ENDED} AS text"), lambda row: len(row) == 1)
            for text in (
                (_ascii(text) for (text,) in rows) if ended else (_encode(_job(job)) for job in taken.jobs(rows))
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
        "turn": None if status.turn is None else status.turn.as_json(),
        "dispatcher": None if status.dispatcher is None else _dispatcher(status.dispatcher),
        "matching": status.matching,
        "jobs": [_job(job) for job in status.jobs],
    }


def _dispatcher(dispatcher: DispatcherStatus) -> dict[str, Any]:
    state = {} if dispatcher.state is None else asdict(dispatcher.state)
    keys = ("mode", "closed", "away", "settings", "gpus")
    return {"pid": dispatcher.pid, "since": dispatcher.since, **{key: state.get(key) for key in keys}}


def _job(job: JobStatus) -> dict[str, Any]:
    values = {name: getattr(job, name) for name in _JOB_FIELDS}
    attempt = job.attempt
    if attempt is not None:
        values["attempt"] = {name: getattr(attempt, name) for name in _ATTEMPT_FIELDS}
        values["attempt"]["progress"] = None if attempt.progress is None else asdict(attempt.progress)
        values["attempt"]["handed"] = None if attempt.handed is None else asdict(attempt.handed)
    return values


def _ascii(text: str) -> str:
    return text if text.isascii() else _encode(json.loads(text))


def _pieces(texts: Iterable[str], between: str) -> Iterator[str]:
    """The texts with ``between`` between them, many to a piece."""
    rest, lead = iter(texts), ""
    while together := list(islice(rest, _TOGETHER)):
        yield lead + between.join(together)
        lead = between
