"""Carries out the requests to a queue: in its dispatcher, or in the client where no dispatcher runs.

A verb that changes jobs changes rows in the queue (``queue.interventions``); running jobs only get a mark there. After
the requests the dispatcher, or the client, does with its processes what the marks say. A verb for the dispatcher itself
(set, reload, drain, stop) goes to the dispatcher's event loop. Each request is carried out and answered in one
transaction, so that a kill at any instant leaves it open or done, and never done twice.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from gpuherd.engines.options import EngineOptions
from gpuherd.errors import GpuherdError, UsageError, clean
from gpuherd.jobs import clock
from gpuherd.jobs.control.messages import (
    OF_JOBS,
    ControlKind,
    Request,
    Response,
    StopLevel,
    WakeupFifo,
    priority_of,
)
from gpuherd.jobs.options import DispatchOptions, foreign, retuned
from gpuherd.jobs.queue.interventions import Changed
from gpuherd.jobs.queue.schema import may_pass
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.run_dir import RunDirectory

if TYPE_CHECKING:
    from gpuherd.jobs.event_loop import Loop

logger = logging.getLogger(__name__)

# Seconds between two looks at the queue where the file system has no FIFOs, and after a full disk.
_POLL_S = 1.0
_NAMED = 5
_DONE = {
    ControlKind.CANCEL: "cancelled",
    ControlKind.RETRY: "to be tried again:",
    ControlKind.PAUSE: "paused",
    ControlKind.RESUME: "resumed",
    ControlKind.PRIORITY: "with another priority:",
}
# Notifications, the metrics server and the engine are set up once, at the start of a run.
_FIXED = frozenset({"notify_command", "webhook", "prometheus"}) | (
    {each.name for each in fields(EngineOptions)} - {"at_most"}
)


class ControlServer:
    """Carries out requests to one queue.

    Args:
        dispatcher: the event loop that works on the queue; None in a client that carries out a request because no
            dispatcher runs.

    Attributes:
        fifo: becomes readable when a request was written; None where it can't be made.
        due_at: when ``keep_time`` is to be called next (by ``clock.mono``), None for never.
    """

    def __init__(self, queue: Queue, run: RunDirectory, dispatcher: Loop | None = None):
        self._queue = queue
        self._run = run
        self._dispatcher = dispatcher
        self._name = "here" if dispatcher is None else "dispatcher"
        self.fifo: WakeupFifo | None = None
        self._listens_since = clock.wall()
        self.due_at: float | None = None

    # --- hearing ----------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Makes the FIFO; where that fails, the queue is polled."""
        self._listens_since = clock.wall()
        try:
            self.fifo = WakeupFifo(self._run.control_fifo)
        except OSError as problem:
            logger.info("no FIFO in %s (%s); polling every %g s", self._run.root, problem, _POLL_S)
            self.due_at = clock.mono() + _POLL_S

    def close(self) -> None:
        """Stops listening."""
        if self.fifo is not None:
            self.fifo.close()

    def begin(self) -> None:
        """Carries out the requests that were written while no dispatcher ran. Requests to an earlier dispatcher itself
        (drain, set …) are refused: it has ended."""
        for request in self._queue.requests():
            # A request written after ``listen`` was sent to this dispatcher.
            if request.kind not in OF_JOBS and request.at < self._listens_since:
                past = Response(False, "the gpuherd that it was sent to had ended", self._name)
                self._queue.answer(request.id, past, clock.wall())
        self.carry_out_all()

    def hear(self) -> None:
        """Carries out the requests after the FIFO became readable."""
        if self.fifo is not None:
            self.fifo.clear()
        self.carry_out_all()

    def keep_time(self, now: float) -> None:
        """Looks at the queue if that is due: where there is no FIFO, and after a full disk."""
        if self.due_at is not None and now >= self.due_at:
            self.due_at = None if self.fifo is not None else now + _POLL_S
            self.carry_out_all()

    # --- carrying out -----------------------------------------------------------------------------------------

    def carry_out_all(self) -> None:
        """Carries out every open request, then has the dispatcher enforce the marks on running jobs."""
        if self._dispatcher is not None:
            self._dispatcher.decide_soon(clock.mono())  # the wake-up may also mean that jobs were added
        try:
            requests = self._queue.requests()
            try:
                for request in requests:
                    response = self._carry_out(request)
                    logger.info("%s requested by %s: %s", request.kind, request.by, response.text)
            finally:
                if requests and self._dispatcher is not None:
                    self._dispatcher.enforce_marks()
        except sqlite3.OperationalError as problem:
            if self._dispatcher is None or not may_pass(problem):
                raise
            self.due_at = clock.mono() + _POLL_S

    def _carry_out(self, request: Request) -> Response:
        with self._queue.transaction():
            try:
                response = self._response(request)
            except GpuherdError as problem:
                response = Response(False, clean(str(problem)), self._name)
            self._queue.answer(request.id, response, clock.wall())
        return response

    def _response(self, request: Request) -> Response:
        try:
            kind = ControlKind(request.kind)
        except ValueError:
            raise UsageError(f"the gpuherd that works here is an older one and can't {clean(request.kind)}") from None
        if kind in OF_JOBS:
            changed = self._change_jobs(kind, request)
            return Response(not changed.refused, _sentence(kind, changed), self._name, (*changed.jobs, *changed.along))
        return Response(True, self._change_run(kind, request), self._name)

    def _change_run(self, kind: ControlKind, request: Request) -> str:
        """A verb for the dispatcher itself; returns a sentence about it."""
        dispatcher = self._dispatcher
        match kind:
            case ControlKind.RELOAD:
                return self.reload()
            case ControlKind.SET if dispatcher is None:
                raise UsageError(f"{self._nobody()}; give {', '.join(request.settings)} when you start one")
            case _ if dispatcher is None:
                return self._nobody()
            case ControlKind.SET:
                dispatcher.retune(retuned(dispatcher.options, request.settings), dispatcher.settings)
                return "set " + ", ".join(f"{clean(name)}={clean(value)}" for name, value in request.settings.items())
        level = StopLevel.DRAIN if kind is ControlKind.DRAIN else StopLevel.STOP
        if dispatcher.stop_level >= level:
            return "it is ending already" if level is StopLevel.DRAIN else "it is stopping already"
        return dispatcher.end(level, "")

    def _change_jobs(self, kind: ControlKind, request: Request) -> Changed:
        queue, jobs = self._queue, request.jobs
        match kind:
            case ControlKind.CANCEL:
                return queue.cancel(jobs, request.by)
            case ControlKind.RETRY:
                return queue.retry(jobs, clock.wall())
            case ControlKind.PAUSE:
                return queue.pause(jobs, request.by, clock.mono())
            case ControlKind.RESUME:
                return queue.resume(jobs, clock.mono(), clock.wall())
            case _:
                return queue.set_priority(jobs, priority_of(request.settings))

    def _nobody(self) -> str:
        return f"no gpuherd works on {self._run.root}"

    def reload(self) -> str:
        """Reads the settings files again, and returns a sentence about it. Where a file is wrong, the old settings stay
        in force; never raises."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return f"{self._nobody()}; the next one reads the settings when it starts"
        try:
            settings = dispatcher.load_settings()
            options = dispatcher.options
            new = changed_defaults(options, dispatcher.settings.defaults, settings.defaults)
            new = {name: value for name, value in new.items() if name not in foreign(options.engine)}
            later = {name for name in new if name in _FIXED}
            dispatcher.retune(replace(options, **{name: new[name] for name in new.keys() - later}), settings)
        except GpuherdError as problem:
            return f"the settings stay as they were: {clean(str(problem))}"
        text = "read the settings again"
        if new.keys() - later:
            text += f"; new: {', '.join(sorted(new.keys() - later))}"
        if later:
            text += f"; only from the next start on: {', '.join(sorted(later))}"
        return "; ".join((text, *(clean(warning) for warning in settings.warnings)))


def _sentence(kind: ControlKind, changed: Changed) -> str:
    parts = [f"{_DONE[kind]} {_named(changed.jobs)}"] if changed.jobs else []
    if changed.along:
        parts.append(f"and with that {_named(changed.along)}")
    parts += _first(changed.refused, "and {} more jobs that can't be changed so")
    parts += _first(changed.remarks, "and so are {} more")
    return "; ".join(parts) or "it applies to no job"


def _first(sentences: Sequence[str], more: str) -> list[str]:
    """The first few of them, and how many ``more`` there are."""
    rest = len(sentences) - _NAMED
    return [clean(sentence) for sentence in sentences[:_NAMED]] + ([more.format(rest)] if rest > 0 else [])


def _named(jobs: tuple[str, ...]) -> str:
    if len(jobs) > _NAMED:
        return f"{len(jobs)} jobs"
    return ", ".join(clean(job) for job in jobs)


def changed_defaults(known: DispatchOptions, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose default the settings files have changed, with their new values; an option that they name no
    more gets its built-in default. An option given on the command line or by ``set`` stays: it differs from what the
    files had before.
    """
    plain = vars(DispatchOptions())
    new = {}
    for name in (before.keys() | after.keys()) & plain.keys():
        value = after.get(name, plain[name])
        if getattr(known, name) == before.get(name, plain[name]) != value:
            new[name] = value
    return new
