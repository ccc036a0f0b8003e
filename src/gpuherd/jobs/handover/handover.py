"""Works a queue off by way of an engine beyond this machine: hands jobs over, follows them, and collects their ends.

An event loop like the dispatcher's, on the same queue, with the same signals, bell, records and displays. What it can't
be told it looks for: the files of nodes a few times a second while something is out, the engine as often as it bears.
All progress is in the queue before it counts: the loop may be killed at any instant, jobs go on in the engine, and the
next one follows them from the queue's file, the nodes' files and the engine's word.

What goes over is ``sending``'s part, how it goes ``handing``'s, what is out ``following``'s, what is told of it means
``meaning``'s, and how it ends ``collecting``'s; here is when.
"""

from __future__ import annotations

import logging
import os
import selectors
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext

from gpuherd.engines.cluster import Engine
from gpuherd.errors import CannotWrite
from gpuherd.jobs import clock
from gpuherd.jobs.diskguard import DiskGuard
from gpuherd.jobs.ending import Endings
from gpuherd.jobs.failures import clean
from gpuherd.jobs.fulldisk import may_pass
from gpuherd.jobs.handover.asking import Asking
from gpuherd.jobs.handover.collecting import Collecting
from gpuherd.jobs.handover.folder import Folder
from gpuherd.jobs.handover.following import Following
from gpuherd.jobs.handover.handing import AGAIN_S, Handing
from gpuherd.jobs.handover.picture import in_line_sentence
from gpuherd.jobs.handover.sending import Sending
from gpuherd.jobs.health import HealthBook
from gpuherd.jobs.job import Job
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.obeying import Obeying
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.outcome import Outcome
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.retuning import SETTABLE
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settings import NO_SETTINGS, Settings
from gpuherd.jobs.standing import Standing, StandingFile
from gpuherd.jobs.stopping import Ask, StopSignals
from gpuherd.jobs.supervisor import GRACE_S, Supervisor
from gpuherd.jobs.whereabouts import engine_name

logger = logging.getLogger(__name__)

# So long a report may be on its way when the engine calls its attempt ended; after the grace, in which a leader's
# guardian may still be ending it.
PATIENCE_S = 15.0


class Handover:
    """Works a queue off. One use: ``run`` once.

    Args:
        queue, run, options, reporter, serve, lock, settings, load_settings, on_ready: as for ``Dispatcher``.
        engine: what takes the jobs; the caller closes it.
        jobs: what was submitted, to see before the start that it can be had there at all.
        grace_s: seconds between SIGTERM and SIGKILL, on the nodes.

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
        *,
        serve: bool = False,
        lock: DispatcherLock | None = None,
        settings: Settings = NO_SETTINGS,
        load_settings: Callable[[], Settings] = lambda: NO_SETTINGS,
        on_ready: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
    ):
        self._queue = queue
        self._run = run
        self._tell = reporter or Reporter(queue, run)
        self._serve = serve
        self._lock = lock
        self._on_ready = on_ready
        self._grace_s = grace_s
        self.options = options
        self._title = engine_name(engine.name)
        self._asking = Asking(engine, self._tell, self._title)
        self._folder = Folder(run)
        self._endings = Endings(queue, run, self._tell, HealthBook(queue))
        self._following = Following(
            queue,
            run,
            self._tell,
            self._asking,
            self._folder,
            Collecting(run, self._asking, self._folder, grace_s + PATIENCE_S),
            self._endings,
            self._note_change,
        )
        self._disk = DiskGuard((run.root, run.logs), options.min_disk)
        self._sending = Sending(queue, self._tell, options, self._asking, self._endings, self._disk, grace_s)
        self._obeying = Obeying(queue, run, self, settings, load_settings)
        self.asked = Ask.GO_ON
        self._leaves = False
        self._standing = StandingFile(run.standing)
        self._held_until = 0.0
        self._show_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._sending.refuse_if_none_can_be_had(jobs)

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Runs until nothing is left to run, or somebody ends it.

        Raises QueueBusy when another gpuherd has the queue, CannotWrite when a full disk keeps it from ending.
        """
        with nullcontext() if self._lock is not None else closing(DispatcherLock(self._run.lock)):
            began_at = clock.wall()
            run_id = self._queue.begin_run(began_at, clock.mono(), self._asking.engine.name)
            handing = Handing(
                self._queue,
                self._run,
                self._asking,
                self._folder,
                self._tell,
                self.options,
                run_id=run_id,
                began_at=began_at,
                grace_s=self._grace_s,
            )
            with StopSignals() as signals, closing(self._obeying), closing(self._asking), self._selector:
                self._selector.register(signals, selectors.EVENT_READ)
                aside = self._asking.listen()
                self._selector.register(aside, selectors.EVENT_READ, aside.drain)
                self._obeying.listen()
                if self._obeying.bell is not None:
                    self._selector.register(self._obeying.bell, selectors.EVENT_READ)
                self._following.adopt(Supervisor(self._run, self._queue.tag, self.options, self._grace_s))
                self._obeying.begin()
                self._on_ready()
                self._loop(handing, signals)
                outcome = self._outcome(signals)
            self._run.remove_stray_attempt_files(self._following.open)
            self._standing.remove()
            self._end_run(run_id)
            return outcome

    def _end_run(self, run_id: int) -> None:
        try:
            self._queue.end_run(run_id, clock.wall())
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            logger.warning("can't write the end of the run into the queue: %s", problem)

    def _loop(self, handing: Handing, signals: StopSignals) -> None:
        while True:
            try:
                self._obey(signals)
                self._keep_time()
                if self.asked is Ask.GO_ON and clock.mono() >= self._held_until:
                    self._sending.send_what_can(handing, self._following)
                if self._is_over():
                    return
            except sqlite3.OperationalError as problem:
                if not may_pass(problem):
                    raise
                # As on a full disk: nothing is done for a moment, and what is out goes on.
                logger.warning("can't use the queue now, trying again in %g s: %s", AGAIN_S, problem)
                self._held_until = clock.mono() + AGAIN_S
                self.decide_soon(self._held_until)
            for key, _ in self._selector.select(self._time_to_next(handing)):
                if key.fileobj is signals:
                    signals.drain_wakeups()
                elif key.fileobj is self._obeying.bell:
                    self._obeying.hear()
                else:
                    key.data()

    def _is_over(self) -> bool:
        out = bool(self._following.open)
        if self._endings.again_at is not None:
            if self._leaves or (not out and self.asked >= Ask.STOP):
                text = f"{self._endings.trouble}; put that right and start again"
                raise CannotWrite(f"can't write {self._run.queue}: {text}")
            return False
        if self._leaves or out:
            return self._leaves
        return not (self.asked is Ask.GO_ON and (self._serve or self._is_work_left(clock.wall())))

    def _is_work_left(self, wall: float) -> bool:
        queue = self._queue
        if self._sending.waits:
            # Asked of the queue only when the last decision, which comes after every change, has left nobody waiting.
            return True
        return bool(queue.head(1, wall)) or queue.next_not_before(wall) is not None or queue.held() > 0

    def _keep_time(self) -> None:
        now = clock.mono()
        if now >= self._held_until:
            self._following.keep_time(now)
        if self._disk.due_at is not None and now >= self._disk.due_at and self._disk.look(now):
            low = self._disk.low
            self._tell.notice(f"{low}; nothing is handed over" if low else "there is space on the disk again")
            self.decide_soon(now)
        self._obeying.keep_time(now)
        self._standing.keep_time(now, self._stands)
        if self._tell.every_s is not None and now >= self._show_at:
            self._show_at = now + self._tell.every_s
            running, out = self._following.running, self._following.open
            sentences = [in_line_sentence(out.values(), self._title), self._sending.waiting_for]
            waiting_for = "; ".join(each for each in sentences if each) or None
            self._tell.show(running, waiting_for, max(1, len(running)), len(out) - len(running))

    def _time_to_next(self, handing: Handing) -> float | None:
        times = [self._obeying.due_at, self._standing.due_at, self._disk.due_at]
        busy = [self._endings.again_at, self._following.due_at]
        if self.asked is Ask.GO_ON and self._sending.due_at is not None:
            # Else nothing is decided any more, and a decision that is due would keep the loop spinning.
            busy.append(max(self._sending.due_at, handing.again_at or 0.0))
        times += [None if time is None else max(time, self._held_until) for time in busy]
        if self._tell.every_s is not None:
            times.append(self._show_at)
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - clock.mono()) if known else None

    def decide_soon(self, when: float) -> None:
        """A decision may come out otherwise at this time (by ``clock.mono``)."""
        self._sending.soon(when)

    def _note_change(self) -> None:
        self._standing.touch()
        self.decide_soon(clock.mono())

    # --- being told -------------------------------------------------------------------------------------------

    def _obey(self, signals: StopSignals) -> None:
        """Does what a signal asked for since the last time."""
        if signals.reload:
            signals.reload = False
            self._tell.notice(self._obeying.reload())
        if signals.asked <= self.asked:
            return
        if signals.asked is Ask.STOP_NOW or (signals.terminated and self.asked < Ask.STOP):
            self._leave(signals.asked)
        else:
            self.end(signals.asked, "Ctrl-C: " if signals.asked is Ask.DRAIN else "")

    def _leave(self, asked: Ask) -> None:
        """Ends at once. Unlike a job of this machine's, what an engine has needs nobody here: who shuts this machine
        down must not lose a cluster's work of days."""
        self.asked, self._leaves = asked, True
        if self._following.open:
            self._tell.notice(
                f"leaving {len(self._following.open)} jobs in the hands of {self._title}; the same command follows"
                " them again"
            )

    def end(self, asked: Ask, why: str) -> str:
        """Hands nothing more over from now on, and with STOP takes back what is out; returns a sentence about it."""
        self.asked = asked
        self._standing.touch()
        out = len(self._following.open)
        if asked is Ask.DRAIN:
            text = f"{why}nothing more is handed over; what {self._title} has goes on to its end ({out} jobs)"
            hint = " (Ctrl-C again cancels them there and puts them back in the queue)" if why else ""
            self._tell.notice(text + hint)
        else:
            text = f"{why}cancelling what {self._title} has and putting it back in the queue ({out} jobs)"
            self._tell.notice(text)
            self._following.take_back_all()
        return text

    def retune(self, options: DispatchOptions, settings: Settings) -> None:  # noqa: ARG002 - GPUs of this machine
        """Other options from now on; those of this machine's GPUs say nothing here."""
        self.options = options
        self._sending.options = options
        self._disk.change(options.min_disk)
        self.decide_soon(clock.mono())

    def enforce_marks(self) -> None:
        """Does with what is out what the queue says of it by now."""
        self._following.enforce_marks()
        self._note_change()

    def _outcome(self, signals: StopSignals) -> Outcome:
        counts = self._queue.counts()
        left = counts.waiting + counts.running
        return Outcome(
            done=counts.done,
            failed=counts.failed,
            waiting=left,
            cancelled=counts.cancelled,
            failures=tuple(self._tell.failures),
            # Asked to stop when nothing was left to do: that is a run that ended by itself.
            stopped_by=signals.exit_code if left else None,
        )

    def _stands(self) -> Standing:
        """What those are told who look on."""
        reasons = ((number, each.in_line) for number, each in self._following.open.items())
        return Standing(
            pid=os.getpid(),
            mode=self.asked.mode,
            closed=None if self._asking.away is not None else self._sending.closed(clock.mono()),
            waits={wait.job: clean(wait.reason) for wait in self._sending.waits},
            at_once=max(1, len(self._following.running)),
            settings={name: getattr(self.options, name) for name in SETTABLE},
            handed={number: clean(reason) for number, reason in reasons if reason is not None},
            away=self._asking.away,
        )
