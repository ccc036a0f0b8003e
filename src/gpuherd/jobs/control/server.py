"""Carries out requests to a queue in its dispatcher, answers them, and keeps the settings."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Protocol

from gpuherd.engines.options import EngineOptions
from gpuherd.errors import GpuherdError, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.control.messages import OF_JOBS, Ask, ControlKind, Doorbell, priority_of
from gpuherd.jobs.options import DispatchOptions, foreign, retuned
from gpuherd.jobs.queue.errors import may_pass
from gpuherd.jobs.queue.interventions import Changed, Letter, Reply
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.settings import Settings

# Does what was asked of a queue, and writes the answer beside it in the same transaction.
#
# Changes of jobs are changes of rows (``interventions``); what they mean for processes is carried out afterwards, by
# whoever has those in hand, from the marks in the rows. What concerns a dispatcher alone is done by its ``Hands``.

_DONE = {
    ControlKind.CANCEL: "cancelled",
    ControlKind.RETRY: "to be tried again:",
    ControlKind.PAUSE: "paused",
    ControlKind.RESUME: "resumed",
    ControlKind.PRIORITY: "with another priority:",
}
_NAMED = 5


class Hands(Protocol):
    """Who applies it. Each method returns a sentence about what it did, or raises GpuherdError with why it can't."""

    name: str

    def set(self, settings: Mapping[str, str]) -> str:
        """Other options from now on."""
        ...

    def reload(self) -> str:
        """The settings files are read again."""
        ...

    def drain(self) -> str:
        """Nothing new is started."""
        ...

    def stop(self) -> str:
        """What runs is stopped and put back."""
        ...


def apply(queue: Queue, letter: Letter, hands: Hands) -> Reply:
    """Does it and answers; the marks that it leaves on running jobs are the caller's to carry out."""
    with queue.transaction():
        try:
            reply = _apply(queue, letter, hands)
        except GpuherdError as problem:
            reply = Reply(False, clean(str(problem)), hands.name)
        queue.answer(letter.id, reply, clock.wall())
    return reply


def _apply(queue: Queue, letter: Letter, hands: Hands) -> Reply:
    try:
        kind = ControlKind(letter.kind)
    except ValueError:
        raise UsageError(f"the gpuherd that works here is an older one and can't {clean(letter.kind)}") from None
    if kind in OF_JOBS:
        changed = _change_jobs(queue, kind, letter)
        ok = not changed.refused
        return Reply(ok, _sentence(kind, changed), hands.name, (*changed.jobs, *changed.along))
    match kind:
        case ControlKind.SET:
            text = hands.set(letter.settings)
        case ControlKind.RELOAD:
            text = hands.reload()
        case ControlKind.DRAIN:
            text = hands.drain()
        case _:
            text = hands.stop()
    return Reply(True, text, hands.name)


def _change_jobs(queue: Queue, kind: ControlKind, letter: Letter) -> Changed:
    match kind:
        case ControlKind.CANCEL:
            return queue.cancel(letter.jobs, letter.by)
        case ControlKind.RETRY:
            return queue.retry(letter.jobs, clock.wall())
        case ControlKind.PAUSE:
            return queue.pause(letter.jobs, letter.by, clock.mono())
        case ControlKind.RESUME:
            return queue.resume(letter.jobs, clock.mono(), clock.wall())
        case _:
            return queue.set_priority(letter.jobs, priority_of(letter.settings))


def _sentence(kind: ControlKind, changed: Changed) -> str:
    parts = [f"{_DONE[kind]} {_named(changed.jobs)}"] if changed.jobs else []
    if changed.along:
        parts.append(f"and with that {_named(changed.along)}")
    parts += [clean(reason) for reason in changed.refused[:_NAMED]]
    if len(changed.refused) > _NAMED:
        parts.append(f"and {len(changed.refused) - _NAMED} more that it can't be done to")
    parts += [clean(remark) for remark in changed.remarks[:_NAMED]]
    if len(changed.remarks) > _NAMED:
        parts.append(f"and so are {len(changed.remarks) - _NAMED} more")
    return "; ".join(parts) or "there was no job to do it to"


def _named(jobs: tuple[str, ...]) -> str:
    if len(jobs) > _NAMED:
        return f"{len(jobs)} jobs"
    return ", ".join(clean(job) for job in jobs)


# What people ask of a dispatcher at work: hears the bell, does what is asked, answers; and keeps their settings.
#
# Changes of jobs are made in the queue (``control.server``); the dispatcher then does with its processes what the queue
# says.

logger = logging.getLogger(__name__)

# Where the file system has no FIFOs, the queue is looked at so often.
_LOOK_S = 1.0


# Who brings notices out, and who answers Prometheus, is set up once; so is what runs the jobs, and by which words.
_FIXED = frozenset({"notify_command", "webhook", "prometheus"}) | (
    {each.name for each in fields(EngineOptions)} - {"at_most"}
)


class Working(Protocol):
    """The dispatcher as it is seen from here."""

    options: DispatchOptions
    asked: Ask

    def retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Other options and settings from now on."""
        ...

    def end(self, asked: Ask, why: str) -> str:
        """Ends in this way."""
        ...

    def enforce_marks(self) -> None:
        """Does what the queue says of running jobs."""
        ...

    def decide_soon(self, when: float) -> None:
        """A decision may come out otherwise."""
        ...


class Obeying:
    """Applies what lies in the queue's mailbox.

    Attributes:
        bell: rings when something was put there; None where there can't be one.
        due_at: when ``keep_time`` wants to be called (by ``clock.mono``), None for not at all.
    """

    name = "dispatcher"

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        working: Working,
        settings: Settings,
        load_settings: Callable[[], Settings],
    ):
        self._queue = queue
        self._run = run
        self._working = working
        self._settings = settings
        self._load_settings = load_settings
        self.bell: Doorbell | None = None
        self._listens_since = clock.wall()
        self.due_at: float | None = None

    def begin(self) -> None:
        """Does what was asked while nobody was there; what was asked of a dispatcher that has ended is past."""
        for letter in self._queue.letters():
            # Requests that came after the doorbell was opened were sent to this dispatcher.
            if letter.kind not in OF_JOBS and letter.at < self._listens_since:
                past = Reply(False, "the gpuherd that it was asked of had ended", self.name)
                self._queue.answer(letter.id, past, clock.wall())
        self._read()

    def listen(self) -> None:
        """Hangs the bell up."""
        self._listens_since = clock.wall()
        try:
            self.bell = Doorbell(self._run.control_fifo)
        except OSError as problem:
            logger.info("no bell in %s (%s); looking every %g s", self._run.root, problem, _LOOK_S)
            self.due_at = clock.mono() + _LOOK_S

    def close(self) -> None:
        """Listens no more."""
        if self.bell is not None:
            self.bell.close()

    def hear(self) -> None:
        """The bell has rung."""
        if self.bell is not None:
            self.bell.hush()
        self._read()

    def keep_time(self, now: float) -> None:
        """Looks, if it is time: where there is no bell, and where the disk was full."""
        if self.due_at is not None and now >= self.due_at:
            self.due_at = None if self.bell is not None else now + _LOOK_S
            self._read()

    def _read(self) -> None:
        # Jobs may have been added, too.
        self._working.decide_soon(clock.mono())
        try:
            letters = self._queue.letters()
            try:
                for letter in letters:
                    self._apply(letter)
            finally:
                if letters:
                    self._working.enforce_marks()
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            self.due_at = clock.mono() + _LOOK_S

    def _apply(self, letter: Letter) -> None:
        reply = apply(self._queue, letter, self)
        logger.info("%s asked by %s: %s", letter.kind, letter.by, reply.text)

    # --- what concerns the dispatcher itself ------------------------------------------------------------------

    def set(self, settings: Mapping[str, str]) -> str:
        """Other options from now on. Raises UsageError, or NoSuchGpu."""
        self._working.retune(retuned(self._working.options, settings), self._settings)
        return "set " + ", ".join(f"{clean(name)}={clean(value)}" for name, value in settings.items())

    def reload(self) -> str:
        """Reads the settings files again; one that is wrong is left, and the old settings hold. Never raises."""
        try:
            settings = self._load_settings()
            options = self._working.options
            new = changed_defaults(options, self._settings.defaults, settings.defaults)
            new = {name: value for name, value in new.items() if name not in foreign(options.engine)}
            later = {name for name in new if name in _FIXED}
            self._working.retune(replace(options, **{name: new[name] for name in new.keys() - later}), settings)
        except GpuherdError as problem:
            return f"the settings stay as they were: {clean(str(problem))}"
        self._settings = settings
        text = "read the settings again"
        if new.keys() - later:
            text += f"; new: {', '.join(sorted(new.keys() - later))}"
        if later:
            text += f"; only from the next start on: {', '.join(sorted(later))}"
        return "; ".join((text, *(clean(warning) for warning in settings.warnings)))

    def drain(self) -> str:
        """Starts nothing new and ends when all that runs has ended."""
        if self._working.asked >= Ask.DRAIN:
            return "it is ending already"
        return self._working.end(Ask.DRAIN, "")

    def stop(self) -> str:
        """Stops what runs and ends."""
        if self._working.asked >= Ask.STOP:
            return "it is stopping already"
        return self._working.end(Ask.STOP, "")


def changed_defaults(known: DispatchOptions, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose default the settings file has changed, with their new values; one that it names no more is as
    without a file. What was given on the command line or by ``set`` stays: it differs from what the file said before.
    """
    plain = vars(DispatchOptions())
    new = {}
    for name in (before.keys() | after.keys()) & plain.keys():
        value = after.get(name, plain[name])
        if getattr(known, name) == before.get(name, plain[name]) != value:
            new[name] = value
    return new
