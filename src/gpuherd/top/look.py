"""What the screen shows: ``Looker`` reads it, and pure functions draw it.

A ``Snapshot`` is frozen data: the run's status, the GPUs, who holds them, the end of one job's log; ``GpuHistory``
remembers the use of GPUs in the last minutes. Reading takes milliseconds and is therefore done in a thread of its own;
nothing here changes the run. All figures that are drawn have a unit, and an unknown one is N/A. Text of jobs and of
other people's processes is cleaned; none is read as markup.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.text import Text

from gpuherd.errors import CannotWrite, GpuherdError, UsageError, clean
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu, Machine
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import tail
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.job import JobState
from gpuherd.jobs.monitor.format import at_work, colour, gpus, headline, place, state_word, what
from gpuherd.jobs.monitor.idle import IdleGpus
from gpuherd.jobs.monitor.job_status import JobSelection
from gpuherd.jobs.monitor.logs import log_of, terminal_line
from gpuherd.jobs.monitor.status import RunStatus, opened, status_of
from gpuherd.jobs.records import AttemptRow, JobStatus
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.units import duration

if TYPE_CHECKING:
    from gpuherd.gpus.idle_held import IdleGpu
    from gpuherd.gpus.leases import Holder
    from gpuherd.jobs.queue.reader import QueueReader


PAGE = 200
_SETTLED_S = 1.0  # file times are coarse: a younger file may change again without another time
_LOG_LINES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Everything that the screen shows, at one moment.

    Attributes:
        at: wall-clock second.
        machine: its GPUs and their processes.
        holders: holders of leases, by GPU UUID.
        status: the run's status, with the jobs that match the filter; None when its queue can't be read (yet).
        problem: why not.
        running: all running jobs, whatever the filter.
        idle: GPUs that are held and have not been used for long, by UUID.
        log_of: the name of the job whose log this is, None for none; ``log``: its last lines, cleaned for a terminal.
    """

    at: float
    machine: Machine
    holders: Mapping[str, Holder] = field(default_factory=dict)
    status: RunStatus | None = None
    problem: str | None = None
    running: tuple[JobStatus, ...] = ()
    idle: Mapping[str, IdleGpu] = field(default_factory=dict)
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
        self._idle = IdleGpus()
        # A slow look may still run when the next begins, in another thread.
        self._one_at_a_time = threading.Lock()
        # The page of the last look, and the text and state of the queue's files that it was read at.
        self._page: RunStatus | None = None
        self._page_at: object = None

    def look(self, text: str = "", chosen: str | None = None) -> Snapshot:
        """The state now. ``text``: only jobs with it in their name; ``chosen``: the job whose log to read, by default
        the first of the page.
        """
        with self._one_at_a_time:
            machine = self._driver.snapshot()
            holders, idle = self._holders(machine), self._idle.look(machine.gpus)
            try:
                with opened(self._run) as reader:
                    status = self._status(reader, text)
                    running = status.jobs
                    if text:
                        running = status_of(
                            self._run, reader, JobSelection(states=(JobState.RUNNING,), limit=PAGE)
                        ).jobs
            except GpuherdError as problem:
                return Snapshot(at=clock.wall(), machine=machine, holders=holders, idle=idle, problem=str(problem))
        job = next((job for job in status.jobs if job.name == chosen), next(iter(status.jobs), None))
        return Snapshot(
            at=status.at,
            machine=machine,
            holders=holders,
            status=status,
            running=tuple(job for job in running if job.state is JobState.RUNNING),
            idle=idle,
            log_of=None if job is None else job.name,
            log=() if job is None else _log(self._run, job),
        )

    def _status(self, reader: QueueReader, text: str) -> RunStatus:
        """The status of the run. Of a page that was read before, only jobs that have not ended are read again: while
        the queue's files have not changed, no other job has."""
        files = _stamp(self._run)
        if self._page is None or files is None or self._page_at != (files, text):
            status = status_of(self._run, reader, JobSelection(text=text, limit=PAGE))
        else:
            states = (JobState.RUNNING, JobState.WAITING)
            found = status_of(self._run, reader, JobSelection(text=text, states=states, limit=PAGE))
            changed = {job.id: job for job in found.jobs}
            jobs = tuple(changed.get(job.id, job) for job in self._page.jobs)
            status = replace(found, jobs=jobs, matching=self._page.matching)
        self._page, self._page_at = status, (files, text)
        return status

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


def _stamp(run: RunDirectory) -> tuple[tuple[int, int, int], ...] | None:
    """Differs whenever the queue has changed; None where a change just now could have the same time."""
    stamps = []
    for path in (run.queue, run.queue.with_name(f"{run.queue.name}-wal")):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        except OSError:
            return None
        if time.time() - found.st_mtime < _SETTLED_S:
            return None
        stamps.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(stamps)


def _log(run: RunDirectory, job: JobStatus) -> tuple[str, ...]:
    if job.attempt is None:
        return ()
    lines = [terminal_line(line) for line in tail(log_of(run, job.attempt)).split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines[-_LOG_LINES:])


KEPT = 240


@dataclass(slots=True)
class Past:
    """The use of one GPU and of its memory, oldest first, each from 0 to 1; None where unknown."""

    use: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))
    memory: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))


class GpuHistory:
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


# --- drawing: pure functions to lines of styled text, for any width -------------------------------------------------

WIDE = 110
_STEPS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
_FULL, _NEARLY = 0.95, 0.85


def head(look: Snapshot, run: str, width: int) -> Text:
    """Two lines: the counts and the time; the folder and which gpuherd works on it."""
    status = look.status
    at = time.strftime("%H:%M:%S", time.localtime(look.at))
    first = Text(headline(status) if status is not None else "no queue to show", style="bold", no_wrap=True)
    if first.cell_len + len(at) + 2 <= width:
        first.pad_right(width - first.cell_len - len(at))
        first.append(at, style="dim")
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


def gpu_lines(look: Snapshot, history: GpuHistory, width: int) -> list[Text]:
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


def _gpu_line(gpu: Gpu, look: Snapshot, history: GpuHistory, spark: int, *, wide: bool) -> Text:
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


def _who(gpu: Gpu, look: Snapshot) -> Text:
    """The user of the GPU: a job of this run, another gpuherd, another process, or none."""
    if gpu.problem is not None:
        return Text(clean(gpu.problem), style="red")
    if gpu.mig_instances:
        return Text("split into MIG instances", style="dim")
    idle = look.idle.get(gpu.uuid)
    ours = [job for job in look.running if job.attempt is not None and gpu.uuid in job.attempt.gpu_uuids]
    if ours:
        text = Text(style="bold")
        for i, job in enumerate(ours):
            text.append(", " if i else "").append(clean(job.title), style=colour(job))
        if idle is not None:
            text.append(f", idle for {duration(idle.idle_s, parts=1)}{idle.on_cpu}", style="yellow")
        return text
    if look.status is not None and gpu.label in look.status.left_out:
        return Text(clean(look.status.left_out[gpu.label]), style="yellow")
    if idle is not None:
        return Text(idle.sentence, style="yellow")
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


def log_title(look: Snapshot) -> Text:
    """The line above the log."""
    job = look.job(look.log_of)
    if job is None:
        return Text("Log", style="bold")
    text = Text("Log of ", style="bold").append(clean(job.title), style=f"bold {colour(job)}")
    attempt = job.attempt
    if attempt is not None:
        text.append(f" · attempt {attempt.number} · {_place(attempt)}", style="")
        if attempt.peak_mb is not None:
            text.append(f" · at most {attempt.peak_mb} MB", style="")
    return text


def _place(attempt: AttemptRow) -> str:
    if attempt.in_line and attempt.handed is not None:
        handle = "" if attempt.handed.handle is None else f" {clean(attempt.handed.handle)}"
        return f"{engine_name(attempt.handed.engine)}{handle}"
    return place(attempt)


def log_text(look: Snapshot) -> Text:
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
