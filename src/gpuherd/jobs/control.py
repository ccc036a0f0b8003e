"""Asking something of a queue while it is worked off: cancel, retry, pause, resume, drain, stop, set, reload, priority.

``send`` writes the wish into the queue and rings the dispatcher's bell; the dispatcher does it and writes the answer
beside it. A dispatcher that is killed in between leaves the wish standing, and its successor does it, once. Where no
dispatcher is at work, ``send`` takes the queue's lock and does it here by the same code.
"""

from __future__ import annotations

import difflib
import getpass
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum

from gpuherd.errors import QueueBusy, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.doorbell import ring
from gpuherd.jobs.failures import clean
from gpuherd.jobs.fulldisk import cannot_write
from gpuherd.jobs.lock import DispatcherLock, Role
from gpuherd.jobs.mailbox import Letter
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.retuning import retuned
from gpuherd.jobs.rundir import RunDirectory

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.05
_NAMES_LOOKED_AT = 5000


class ControlKind(StrEnum):
    """What can be asked."""

    CANCEL = "cancel"  # jobs end for good
    RETRY = "retry"  # failed and cancelled jobs wait again
    PAUSE = "pause"  # waiting jobs are held; running ones stand still, and so do their time limits
    RESUME = "resume"  # the reverse
    PRIORITY = "priority"  # settings: {"priority": "5"}
    DRAIN = "drain"  # the dispatcher starts nothing new and ends when what runs has ended
    STOP = "stop"  # it stops what runs, puts it back into the queue, and ends
    SET = "set"  # other options; settings as on the command line
    RELOAD = "reload"  # the settings files are read again


OF_JOBS = frozenset(
    {ControlKind.CANCEL, ControlKind.RETRY, ControlKind.PAUSE, ControlKind.RESUME, ControlKind.PRIORITY}
)


@dataclass(frozen=True, slots=True)
class Control:
    """A wish. ``jobs`` are names; () means all that it can be done to. ``settings`` are words, for SET and PRIORITY."""

    kind: ControlKind
    jobs: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it.

    Attributes:
        ok: all of it was done.
        text: one sentence for people.
        applied_by: "dispatcher", "here" (by this process), or None when nobody has done it yet; it stays asked.
        changed: names of the jobs that it changed.
    """

    ok: bool
    text: str
    applied_by: str | None = None
    changed: tuple[str, ...] = ()


def send(run: RunDirectory, control: Control, *, wait_s: float = 10.0) -> Answer:
    """Asks for something and waits for the answer, at most ``wait_s`` seconds for a dispatcher that does not react.

    Raises:
        UsageError: no queue in this folder, no such job (with the nearest name), option or priority. Nothing was asked
            then.
        QueueUnreadable: its queue is damaged or of another version. CannotWrite: the disk is full.
    """
    check(control)
    if not run.queue.exists():
        raise UsageError(f"{run.root} holds no queue of gpuherd's; name the run folder")
    with closing(Queue(run.queue, check=False)) as queue:
        _refuse_unknown(queue, control)
        by = _user()
        try:
            number = queue.post(Letter(0, clock.wall(), control.kind, by, control.jobs, control.settings))
        except sqlite3.OperationalError as problem:
            raise cannot_write(run.queue, problem, "ask again; nothing was asked") from problem
        deadline, pause = time.monotonic() + wait_s, _FIRST_LOOK_S
        while True:
            ring(run.control_fifo)
            answer = _answer(queue, number) or _do_here(queue, run, number)
            if answer is not None:
                return answer
            if time.monotonic() >= deadline:
                pid = DispatcherLock.holder(run.lock)
                return Answer(False, f"gpuherd (pid {pid or 'unknown'}) has not answered yet; it stays asked")
            time.sleep(pause)
            pause = min(_LONGEST_LOOK_S, 2 * pause)


def poke(run: RunDirectory) -> bool:
    """Tells the dispatcher to look at its queue, after ``Queue.add``; False when none is at work."""
    return ring(run.control_fifo)


def check(control: Control) -> None:
    """Raises UsageError for settings that could never be."""
    if control.kind is ControlKind.SET:
        if not control.settings:
            raise UsageError("set: say what to set, max_gpus=2 for example")
        retuned(DispatchOptions(), control.settings)
    elif control.kind is ControlKind.PRIORITY:
        priority_of(control.settings)
    elif control.settings:
        raise UsageError(f"{control.kind} takes no settings")
    if control.jobs and control.kind not in OF_JOBS:
        raise UsageError(f"{control.kind} is for the run as a whole; it takes no jobs")


def priority_of(settings: Mapping[str, str]) -> int:
    """The new priority. Raises UsageError."""
    word = settings.get("priority", "")
    try:
        value = int(word)
    except ValueError:
        raise UsageError(f"priority={word!r}; it must be a whole number") from None
    if not -(2**31) <= value < 2**31 or settings.keys() != {"priority"}:
        raise UsageError(f"priority: {dict(settings)!r}; it must be one whole number of at most 31 bits")
    return value


def _refuse_unknown(queue: Queue, control: Control) -> None:
    unknown = queue.unknown(control.jobs)
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], queue.names(_NAMES_LOOKED_AT), n=1)
        hint = f"; did you mean {clean(nearest[0])}?" if nearest else ""
        raise UsageError(f"there is no job {clean(unknown[0])!r} in this queue{hint}")


def _answer(queue: Queue, number: int) -> Answer | None:
    reply = queue.reply_to(number)
    return None if reply is None else Answer(reply.ok, reply.text, reply.applied_by, reply.changed)


def _do_here(queue: Queue, run: RunDirectory, number: int) -> Answer | None:
    """Does it, if no dispatcher is at work, and all else that is asked."""
    try:
        lock = DispatcherLock(run.lock, Role.CONTROL)
    except QueueBusy:
        return None
    with closing(lock):
        # Only now: this brings in what starts and ends processes.
        from gpuherd.jobs.caretaker import take_care

        take_care(queue, run)
        return _answer(queue, number)


def _user() -> str:
    try:
        return clean(getpass.getuser())
    except (KeyError, OSError):
        return "someone"
