"""The dispatcher for engines beyond this machine: chooses the engine, submits jobs, tracks them, records their ends.

An event loop over the same queue as ``jobs.dispatcher``, with the same signals, requests, records and displays. What no
event reports it polls: the nodes' files a few times a second while jobs are in the engine, the engine as often as it
bears. When this process is killed, jobs go on in the engine, and the next dispatcher tracks them by the queue's file,
the nodes' files and the engine's answers.

``submit`` submits, and ``tracker`` tracks what was submitted; this module says when.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from typing import TypeVar, Unpack

from gpuherd.atomic import private_write
from gpuherd.engines.base import Engine, Inside, Placement
from gpuherd.engines.options import EngineOptions, engine_values, for_this_machine
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import CannotWrite, GpuherdError, UsageError, clean
from gpuherd.gpus.visible import hide_unless_named
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.supervise import Supervisor
from gpuherd.jobs.control.messages import StopLevel, StopSignals, wake
from gpuherd.jobs.dispatcher_state import DispatcherState, engine_name
from gpuherd.jobs.event_loop import Loop, Terms
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.connection import QueueFile
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.remote import AGAIN_S, REPORT_DELAY_S
from gpuherd.jobs.remote.outcome import RemoteAttempt
from gpuherd.jobs.remote.protocol import say
from gpuherd.jobs.remote.submit import Submitter
from gpuherd.jobs.remote.tracker import EngineQueries, Tracker
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.settings import Settings

# The engine to which a run submits its jobs: connected by the options, which are kept for later dispatchers, and never
# changed while another engine has jobs of the folder.

DispatchT = TypeVar("DispatchT", bound=DispatchOptions)


def make(options: EngineOptions) -> Engine:
    """The connection to the engine of these options. Raises EngineMissing, EngineAway and UsageError."""
    from gpuherd.jobs.remote.agent import join, lead

    return options.spec.connect(options, lead, join)


@contextmanager
def opened(options: EngineOptions) -> Iterator[Engine | None]:
    """The engine while the context lasts; None for this machine."""
    if options.engine == LOCAL:
        yield None
        return
    with closing(make(options)) as engine:
        yield engine


def place_inside(
    wanted: Callable[[], Sequence[Placement]], options: EngineOptions, run: RunDirectory | None
) -> Inside | None:
    """The running job of the engine, of which this process is a part, that is to run jobs with these placements; None
    where they are to be submitted. Tells which in one line on standard error, where both could be meant.

    A run whose jobs were submitted before goes on so. ``run``: None where there is no folder yet.

    Raises as ``Foreground.inside``.
    """
    submitted = None if run is None or recall(run) is None else str(run.root)
    foreground = options.spec.foreground()
    found = None if foreground is None else foreground.inside(wanted, options, submitted, say)
    if found is not None:
        # Where the engine has given this process no GPU, those that the machine has are others'.
        hide_unless_named(os.environ)
    return found


def settled(jobs: Sequence[Job], options: DispatchT, run: RunDirectory | None) -> DispatchT:
    """The options by which these jobs run: as they are, or those of this machine, where the jobs run inside of the
    engine's job that this process is a part of. Tells so, and raises, as ``place_inside``."""
    from gpuherd.jobs.feasibility import would_ask

    found = place_inside(lambda: [would_ask(job, options) for job in jobs], options, run)
    if found is None:
        return options
    most = [each for each in (options.max_concurrent, found.at_once) if each is not None]
    return replace(for_this_machine(options), max_concurrent=min(most, default=None))


def refuse_other_engine(queue: QueueFile, run: RunDirectory, options: EngineOptions) -> None:
    """Raises UsageError when another engine than that of ``options`` has jobs of this folder: they must end there, or
    be cancelled, first.
    """
    elsewhere = Counter[str]()
    for record in queue.running():
        if not queue.owns(record):
            continue
        if record.handed is not None:
            elsewhere[record.handed.engine] += 1
        elif record.process is not None and record.process.is_alive():
            elsewhere[LOCAL] += 1
    for engine, jobs in elsewhere.items():
        how = f"go on with --engine {engine}, or end them first: gpuherd cancel --run {run.root} --all"
        if engine != options.engine:
            many = jobs > 1
            where = f"{'are' if many else 'is'} in the hands of {engine_name(engine)}"
            if engine == LOCAL:
                where = f"{'run' if many else 'runs'} on this machine"
            raise UsageError(f"{jobs} job{'s' if many else ''} of {run.root} {where}; {how}")
        before = recall(run)
        another = None if before is None else options.spec.another_cluster(before, options)
        if another is not None:
            cluster, flags = another
            raise UsageError(f"{jobs} jobs of {run.root} are in the hands of {cluster}; go on {flags}")


def remember(run: RunDirectory, options: EngineOptions) -> None:
    """Records the options of the engine for later dispatchers. Raises CannotWrite."""
    try:
        run.handover.mkdir(exist_ok=True)
        private_write(run.engine_options, json.dumps(engine_values(options)).encode())
    except OSError as problem:
        raise CannotWrite(
            f"can't write in {run.handover}: {problem.strerror}; put that right and start again"
        ) from None


def recall(run: RunDirectory) -> EngineOptions | None:
    """The options of the last engine that this folder's jobs were submitted to; None where there was none."""
    try:
        values = json.loads(run.engine_options.read_bytes())
        known = {each.name for each in fields(EngineOptions)}
        return EngineOptions(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError, GpuherdError):
        return None


def in_line_sentence(followed: Iterable[RemoteAttempt], title: str) -> str | None:
    """How many jobs wait in the engine, and its most frequent reason; None when none waits."""
    waiting = [each for each in followed if not each.has_begun]
    if not waiting:
        return None
    reasons = Counter(each.in_line for each in waiting if each.in_line)
    why = f" ({clean(reasons.most_common(1)[0][0])})" if reasons else ""
    return f"{len(waiting)} wait{'s' if len(waiting) == 1 else ''} in {title}{why}"


logger = logging.getLogger(__name__)


class RemoteDispatcher(Loop):
    """Works a queue off through an engine. One use: ``run`` once.

    Args:
        queue, run, options, reporter, and by name serve, lock, settings, load_settings, on_ready, grace_s: as for
            ``Loop``; the grace is that on the nodes.
        engine: what runs the jobs; the caller closes it.
        jobs: the submitted jobs, to check before the start that they can run there at all.

    Raises JobCannotFit when none of the jobs could ever run there, and what ``Engine.check`` raises.
    """

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        options: DispatchOptions,
        engine: Engine,
        reporter: Reporter | None = None,
        jobs: Sequence[Job] = (),
        **terms: Unpack[Terms],
    ):
        super().__init__(queue, run, options, reporter, engine=engine.name, **terms)
        self._title = engine_name(engine.name)
        self._queries = EngineQueries(engine, self._reporter, self._title, lambda: wake(run.control_fifo))
        self._tracker = Tracker(
            queue,
            run,
            self._reporter,
            self._queries,
            self._completion,
            self._grace_s + REPORT_DELAY_S,
            changed=self._note_change,
        )
        self._submitter = self._decisions = Submitter(
            queue,
            run,
            self._reporter,
            options,
            self._queries,
            self._tracker,
            self._completion,
            self._disk,
            grace_s=self._grace_s,
            delay_s=REPORT_DELAY_S,
        )
        self._leaves = False
        self._held_until = 0.0
        self._submitter.refuse_if_none_can_be_had(jobs)

    def _begin(self, run_id: int, began_at: float, held: ExitStack) -> None:  # noqa: ARG002 - nothing is to be closed
        self._submitter.begin(run_id, began_at)

    def _adopt(self) -> None:
        self._tracker.adopt(Supervisor(self._run, self._queue.tag, self.options, self._grace_s))

    def _left_at_work(self) -> Collection[int]:
        return self._tracker.open

    def _hold(self, problem: sqlite3.OperationalError) -> None:
        logger.warning("can't use the queue now, trying again in %g s: %s", AGAIN_S, problem)
        self._held_until = clock.mono() + AGAIN_S
        self.decide_soon(self._held_until)

    def _is_over(self) -> bool:
        out = bool(self._tracker.open)
        if self._completion.again_at is not None:
            if self._leaves or (not out and self.stop_level >= StopLevel.STOP):
                raise self._cannot_end()
            return False
        if self._leaves or out:
            return self._leaves
        return not self._is_work_left()

    def _look_after(self, now: float) -> None:
        if now >= self._held_until:
            self._tracker.keep_time(now)
        if self._disk.due_at is not None and now >= self._disk.due_at and self._disk.look(now):
            low = self._disk.low
            self._reporter.notice(f"{low}; nothing is handed over" if low else "there is space on the disk again")
            self.decide_soon(now)

    def _ends_recorded(self, now: float) -> None:  # noqa: ARG002 - it decides at once
        self._tracker.ends_recorded()

    def _due(self) -> Sequence[float | None]:
        busy = [self._tracker.due_at]
        if self.stop_level is StopLevel.GO_ON:
            # Otherwise no decision is made any more, and one that is due would keep the loop spinning.
            busy.append(self._submitter.due_at)
        return [self._disk.due_at, *(None if time is None else max(time, self._held_until) for time in busy)]

    # --- decisions ----------------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        if self.stop_level is StopLevel.GO_ON and clock.mono() >= self._held_until:
            self._submitter.submit_what_can()

    def _note_change(self) -> None:
        self._state_file.touch()
        self.decide_soon(clock.mono())

    # --- signals and requests -----------------------------------------------------------------------------------

    def _signalled(self, signals: StopSignals) -> None:
        if signals.level is StopLevel.STOP_NOW or (signals.terminated and self.stop_level < StopLevel.STOP):
            self._leave(signals.level)
        else:
            super()._signalled(signals)

    def _leave(self, level: StopLevel) -> None:
        """Ends at once. Unlike a job of this machine, an engine's job does not need this process: a shutdown of this
        machine must not lose days of a cluster's work."""
        self.stop_level, self._leaves = level, True
        if self._tracker.open:
            self._reporter.notice(
                f"leaving {len(self._tracker.open)} jobs in the hands of {self._title}; the same command follows"
                " them again"
            )

    def _end_words(self, *, drains: bool) -> tuple[str, str]:
        out = len(self._tracker.open)
        if drains:
            text = f"nothing more is handed over; what {self._title} has goes on to its end ({out} jobs)"
            return text, "cancels them there and puts them back in the queue"
        return f"cancelling what {self._title} has and putting it back in the queue ({out} jobs)", ""

    def _end_work(self, level: StopLevel) -> None:
        if level is not StopLevel.DRAIN:
            self._tracker.take_back_all()

    def _retune(self, options: DispatchOptions, settings: Settings) -> None:  # noqa: ARG002 - GPUs of this machine
        self._submitter.options = options

    def enforce_marks(self) -> None:
        """Cancels the attempts that are marked in the queue by now."""
        self._tracker.enforce_marks()
        self._note_change()

    # --- state --------------------------------------------------------------------------------------------------

    def _waiting_for(self) -> str | None:
        sentences = [in_line_sentence(self._tracker.open.values(), self._title), super()._waiting_for()]
        return "; ".join(each for each in sentences if each) or None

    def _state(self) -> DispatcherState:
        reasons = ((number, each.in_line) for number, each in self._tracker.open.items())
        return replace(
            super()._state(),
            closed=None if self._queries.away is not None else self._submitter.closed(clock.mono()),
            at_once=max(1, len(self._tracker.running)),
            handed={number: clean(reason) for number, reason in reasons if reason is not None},
            away=self._queries.away,
        )
