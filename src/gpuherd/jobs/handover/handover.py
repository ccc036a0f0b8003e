"""Works a queue off by way of an engine beyond this machine: hands jobs over, follows them, and collects their ends.

A ``loop`` on the same queue as the dispatcher's, with the same signals, bell, records and displays. What it can't be
told it looks for: the files of nodes a few times a second while something is out, the engine as often as it bears. When
it is killed, jobs go on in the engine, and the next one follows them from the queue's file, the nodes' files and the
engine's word.

What goes over is ``sending``'s part, how it goes ``handing``'s, what is out ``following``'s, what is told of it means
``meaning``'s, and how it ends ``collecting``'s; here is when.
"""

from __future__ import annotations

import logging
import selectors
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Unpack

from gpuherd.engines.cluster import Engine
from gpuherd.jobs import clock
from gpuherd.jobs.decision import Wait
from gpuherd.jobs.diskguard import DiskGuard
from gpuherd.jobs.failures import clean
from gpuherd.jobs.handover.asking import Asking
from gpuherd.jobs.handover.collecting import Collecting
from gpuherd.jobs.handover.folder import Folder
from gpuherd.jobs.handover.following import Following
from gpuherd.jobs.handover.handing import Handing
from gpuherd.jobs.handover.picture import in_line_sentence
from gpuherd.jobs.handover.sending import AGAIN_S, Sending
from gpuherd.jobs.job import Job
from gpuherd.jobs.loop import Loop, Terms
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settings import Settings
from gpuherd.jobs.standing import Standing
from gpuherd.jobs.stopping import Ask, StopSignals
from gpuherd.jobs.supervisor import Supervisor
from gpuherd.jobs.whereabouts import engine_name

logger = logging.getLogger(__name__)

# So long a report may be on its way when the engine calls its attempt ended; after the grace, in which a leader's
# guardian may still be ending it.
PATIENCE_S = 15.0


class Handover(Loop):
    """Works a queue off by way of an engine. One use: ``run`` once.

    Args:
        queue, run, options, reporter, and by name serve, lock, settings, load_settings, on_ready, grace_s: as for
            ``Loop``; the grace is that on the nodes.
        engine: what takes the jobs; the caller closes it.
        jobs: what was submitted, to see before the start that it can be had there at all.

    Raises JobCannotFit when none of the jobs could ever run there, and what ``Engine.check`` raises.
    """

    _handing: Handing

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
        self._asking = Asking(engine, self._tell, self._title)
        self._folder = Folder(run)
        self._following = Following(
            queue,
            run,
            self._tell,
            self._asking,
            self._folder,
            Collecting(run, self._asking, self._folder, self._grace_s + PATIENCE_S),
            self._endings,
            self._note_change,
        )
        self._disk = DiskGuard((run.root, run.logs), options.min_disk)
        self._sending = Sending(queue, self._tell, options, self._asking, self._endings, self._disk, self._grace_s)
        self._leaves = False
        self._held_until = 0.0
        self._sending.refuse_if_none_can_be_had(jobs)

    def _begin(self, run_id: int, began_at: float, held: ExitStack) -> None:
        self._selector.register(held.enter_context(closing(self._asking)).listen(), selectors.EVENT_READ)
        self._handing = Handing(
            self._queue,
            self._run,
            self._asking,
            self._folder,
            self._tell,
            self.options,
            run_id=run_id,
            began_at=began_at,
            grace_s=self._grace_s,
            delay_s=PATIENCE_S,
        )

    def _adopt(self) -> None:
        self._following.adopt(Supervisor(self._run, self._queue.tag, self.options, self._grace_s))

    def _readable(self, descriptors: Sequence[int]) -> None:  # noqa: ARG002 - there is one only
        self._asking.wake()

    def _left_at_work(self) -> Collection[int]:
        return self._following.open

    def _hold(self, problem: sqlite3.OperationalError) -> None:
        logger.warning("can't use the queue now, trying again in %g s: %s", AGAIN_S, problem)
        self._held_until = clock.mono() + AGAIN_S
        self.decide_soon(self._held_until)

    def _is_over(self) -> bool:
        out = bool(self._following.open)
        if self._endings.again_at is not None:
            if self._leaves or (not out and self.asked >= Ask.STOP):
                raise self._cannot_end()
            return False
        if self._leaves or out:
            return self._leaves
        return not self._is_work_left()

    def _look_after(self, now: float) -> None:
        if now >= self._held_until:
            self._following.keep_time(now)
        if self._disk.due_at is not None and now >= self._disk.due_at and self._disk.look(now):
            low = self._disk.low
            self._tell.notice(f"{low}; nothing is handed over" if low else "there is space on the disk again")
            self.decide_soon(now)

    def _due(self) -> Sequence[float | None]:
        busy = [self._endings.again_at, self._following.due_at]
        if self.asked is Ask.GO_ON:
            # Else nothing is decided any more, and a decision that is due would keep the loop spinning.
            busy.append(self._sending.due_at)
        return [self._disk.due_at, *(None if time is None else max(time, self._held_until) for time in busy)]

    # --- deciding ---------------------------------------------------------------------------------------------

    def decide_soon(self, when: float) -> None:
        """A decision may come out otherwise at this time (by ``clock.mono``)."""
        self._sending.soon(when)

    def _start_what_can(self) -> None:
        if self.asked is Ask.GO_ON and clock.mono() >= self._held_until:
            self._sending.send_what_can(self._handing, self._following)

    def _note_change(self) -> None:
        self._standing.touch()
        self.decide_soon(clock.mono())

    # --- being told -------------------------------------------------------------------------------------------

    def _signalled(self, signals: StopSignals) -> None:
        if signals.asked is Ask.STOP_NOW or (signals.terminated and self.asked < Ask.STOP):
            self._leave(signals.asked)
        else:
            super()._signalled(signals)

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
        self._sending.options = self._handing.options = options
        self._disk.change(options.min_disk)
        self.decide_soon(clock.mono())

    def enforce_marks(self) -> None:
        """Does with what is out what the queue says of it by now."""
        self._following.enforce_marks()
        self._note_change()

    # --- telling ----------------------------------------------------------------------------------------------

    def _waits(self) -> Sequence[Wait]:
        return self._sending.waits

    def _show(self) -> None:
        running, out = self._following.running, self._following.open
        sentences = [in_line_sentence(out.values(), self._title), self._sending.waiting_for]
        waiting_for = "; ".join(each for each in sentences if each) or None
        self._tell.show(running, waiting_for, max(1, len(running)), len(out) - len(running))

    def _stands(self) -> Standing:
        reasons = ((number, each.in_line) for number, each in self._following.open.items())
        return replace(
            super()._stands(),
            closed=None if self._asking.away is not None else self._sending.closed(clock.mono()),
            at_once=max(1, len(self._following.running)),
            handed={number: clean(reason) for number, reason in reasons if reason is not None},
            away=self._asking.away,
        )
