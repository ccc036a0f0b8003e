"""A run's status as people read it: pure functions of ``RunStatus``.

The table is for a terminal of 80 columns and more; where it is narrow the reasons get more lines, names are never cut.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpuherd.jobs.failures import clean, in_words
from gpuherd.jobs.job import JobState
from gpuherd.jobs.runstatus import SHOWN_FIRST, AttemptStatus, JobStatus, RunStatus
from gpuherd.jobs.whereabouts import there
from gpuherd.jobs.wording import bar, counted, duration

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
