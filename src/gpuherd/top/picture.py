"""Draws a ``Look``: pure functions to lines of styled text, for any width.

All figures have a unit, and an unknown one is N/A. Text of jobs and of other people's processes is cleaned before or
here; none is read as markup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.job import JobState
from gpuherd.jobs.monitor.format import at_work, colour, gpus, headline, place, state_word, what
from gpuherd.jobs.records import AttemptRow, JobStatus
from gpuherd.top.look import History, Look

WIDE = 110
_STEPS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
_FULL, _NEARLY = 0.95, 0.85


def head(look: Look, run: str, width: int) -> Text:
    """Two lines: the counts and the time; the folder and which gpuherd works on it."""
    status = look.status
    clock = time.strftime("%H:%M:%S", time.localtime(look.at))
    first = Text(headline(status) if status is not None else "no queue to show", style="bold", no_wrap=True)
    if first.cell_len + len(clock) + 2 <= width:
        first.pad_right(width - first.cell_len - len(clock))
        first.append(clock, style="dim")
    first.truncate(width, overflow="ellipsis")
    second = Text(no_wrap=True)
    if status is None:
        second.append(clean(look.problem or ""), style="yellow")
    else:
        text = at_work(status)
        if status.dispatcher is None and len(text) > width // 2:
            text = text.partition(";")[0]  # the folder matters more than the remedy
        second.append(_shortened(run, max(12, width - len(text) - 3)), style="cyan")
        second.append(f" · {text}", style="" if status.dispatcher else "yellow")
    second.truncate(width, overflow="ellipsis")
    return Text("\n").join([first, second])


def _shortened(path: str, most: int) -> str:
    """A path, shortened at its beginning: its end distinguishes one run from another."""
    plain = clean(path)
    return plain if len(plain) <= most else "…" + plain[-(most - 1) :]


def gpu_lines(look: Look, history: History, width: int) -> list[Text]:
    """A heading and a line for each GPU; one sentence when there are none."""
    if not look.machine.gpus:
        problem = look.machine.problem or "the driver finds none"
        where_else = None if look.status is None else look.status.in_engine
        runs = "on the CPU" if where_else is None else f"in {engine_name(where_else.engine)}"
        return [Text(f"No GPUs: {problem}. Jobs run {runs}.", style="yellow", no_wrap=True, overflow="ellipsis")]
    wide = width >= WIDE
    spark = 16 if wide else 10
    heading = f"{'GPU':<5}" + (f"{'Name':<14} " if wide else "")
    heading += f"{'Use':<{spark + 6}}  {'Memory':<{spark + 14}}  " + (f"{'Temp':>5} {'Power':>6}  " if wide else "")
    lines = [Text(heading + "Who", style="bold", no_wrap=True)]
    for gpu in look.machine.gpus:
        line = _gpu_line(gpu, look, history, spark, wide=wide)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def _gpu_line(gpu: Gpu, look: Look, history: History, spark: int, *, wide: bool) -> Text:
    past = history.of(gpu.uuid)
    line = Text(no_wrap=True)
    line.append(f"{gpu.label if gpu.mig_parent is None else ' ' + gpu.label:<5}", style="bold")
    if wide:
        line.append(f"{_name(gpu):<14.14} ", style="dim")
    use = None if gpu.utilisation_percent is None else gpu.utilisation_percent / 100
    line.append(sparkline(past.use, spark), style=_busy_style(use))
    line.append(f"{'N/A' if use is None else f'{gpu.utilisation_percent} %':>6}  ")
    share = gpu.used_mb / gpu.total_mb if gpu.total_mb else None
    line.append(sparkline(past.memory, spark), style=_memory_style(share))
    memory = "N/A" if share is None else f"{gpu.used_mb / 1024:.1f}/{gpu.total_mb / 1024:.1f} GB"
    line.append(f" {memory:>13}  ")
    if wide:
        line.append(f"{_figure(gpu.temperature_c, 'C'):>5} {_figure(gpu.power_w, 'W'):>6}  ", style="dim")
    return line.append_text(_who(gpu, look))


def _name(gpu: Gpu) -> str:
    return clean(gpu.name).removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("Tesla ")


def _figure(value: float | None, unit: str) -> str:
    return "N/A" if value is None else f"{value:.0f} {unit}"


def _busy_style(use: float | None) -> str:
    """Green for a GPU that computes, dim for one that does not."""
    return "green" if use else "dim"


def _memory_style(share: float | None) -> str:
    if share is None:
        return "dim"
    return "red" if share >= _FULL else "yellow" if share >= _NEARLY else "green"


def _who(gpu: Gpu, look: Look) -> Text:
    """The user of the GPU: a job of this run, another gpuherd, another process, or none."""
    if gpu.problem is not None:
        return Text(clean(gpu.problem), style="red")
    if gpu.mig_instances:
        return Text("split into MIG instances", style="dim")
    ours = [job for job in look.running if job.attempt is not None and gpu.uuid in job.attempt.gpu_uuids]
    if ours:
        text = Text(style="bold")
        for i, job in enumerate(ours):
            text.append(", " if i else "").append(clean(job.title), style=colour(job))
        return text
    if look.status is not None and gpu.label in look.status.left_out:
        return Text(clean(look.status.left_out[gpu.label]), style="yellow")
    holder = look.holders.get(gpu.uuid)
    if holder is not None:
        return Text(clean(holder.sentence()), style="cyan")
    found = check(gpu, IdleRule())
    # Without the threshold, which is the user's own.
    reason = clean(found.reason).partition(" (threshold")[0]
    return Text("free", style="green") if found.free else Text(reason, style="yellow")


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last ``width`` values, each from 0 to 1, as a line of blocks; it grows from the right.

    >>> sparkline([0.0, 0.5, 1.0, None], 6)
    '  ▁▅█·'
    """
    last = list(values)[-width:] if width > 0 else []
    drawn = "".join(_UNKNOWN if value is None else _STEPS[_step(value)] for value in last)
    return drawn.rjust(max(0, width))


def _step(value: float) -> int:
    """A block's number. Only nothing at all is the lowest: a little use must not look like none."""
    if value <= 0:
        return 0
    return max(1, min(len(_STEPS) - 1, round(value * (len(_STEPS) - 1))))


Widths = tuple[int, int, int, int]
Cells = tuple[Text, Text, Text, Text]


def job_cells(job: JobStatus, widths: Widths) -> Cells:
    """A job's line in the table: state, title, GPUs, what; each as wide as its column at most."""
    dim = "dim" if job.state is JobState.DONE else ""
    cells = (
        Text(state_word(job), style=dim or colour(job)),
        Text(clean(job.title), style=dim),
        Text(gpus(job), style=dim),
        Text(what(job), style=dim),
    )
    for cell, width in zip(cells, widths, strict=True):
        cell.truncate(width, overflow="ellipsis")
    return cells


def job_widths(jobs: Sequence[JobStatus], width: int) -> Widths:
    """Widths of the four columns in a table of this width, so that nothing has to be scrolled sideways."""
    room = width - 8  # a blank on each side of each cell
    state = max((len(state_word(job)) for job in jobs), default=7)
    where = min(12, max((len(gpus(job)) for job in jobs), default=3))
    most = max(16, (room - state - where) * 2 // 5)
    title = min(most, max((len(clean(job.title)) for job in jobs), default=3))
    title, where = max(3, title), max(3, where)
    return state, title, where, max(4, room - state - title - where)


def log_title(look: Look) -> Text:
    """The line above the log."""
    job = look.job(look.log_of)
    if job is None:
        return Text("Log", style="bold")
    text = Text("Log of ", style="bold").append(clean(job.title), style=f"bold {colour(job)}")
    attempt = job.attempt
    if attempt is not None:
        place = _place(attempt)
        text.append(f" · attempt {attempt.number} · {place}", style="")
        if attempt.peak_mb is not None:
            text.append(f" · at most {attempt.peak_mb} MB", style="")
    return text


def _place(attempt: AttemptRow) -> str:
    if attempt.in_line and attempt.handed is not None:
        handle = "" if attempt.handed.handle is None else f" {clean(attempt.handed.handle)}"
        return f"{engine_name(attempt.handed.engine)}{handle}"
    return place(attempt)


def log_text(look: Look) -> Text:
    """The end of the log, or why there is none."""
    job = look.job(look.log_of)
    if job is None:
        empty = look.status is not None and not look.status.matching
        return Text("No job matches." if empty and look.status and look.status.counts.total else _NOTHING, style="dim")
    if job.attempt is None:
        return Text(f"It has not been started yet: {clean(job.reason or '')}".rstrip(": "), style="dim")
    if not look.log:
        if job.attempt.in_line:
            return Text(f"It has not begun: {clean(job.reason or '')}".rstrip(": "), style="dim")
        return Text("It has written nothing yet.", style="dim")
    return Text("\n".join(look.log))


_NOTHING = "The queue is empty. Begin with: gpuherd submit -- COMMAND, or gpuherd batch commands.txt"
