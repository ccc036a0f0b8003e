"""Asking something of a queue while it is worked off: cancel, retry, pause, resume, drain, stop, set, reload, priority.

``send`` writes the wish into the queue and rings the dispatcher's bell; the dispatcher does it and writes the answer
beside it. A dispatcher that is killed in between leaves the wish standing, and its successor does it, once. Where no
dispatcher is at work, ``send`` takes the queue's lock and does it here by the same code.
"""

from __future__ import annotations

import time
from contextlib import closing

from gpuherd.errors import QueueBusy, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.doorbell import ring
from gpuherd.jobs.failures import clean
from gpuherd.jobs.fulldisk import raising_cannot_write
from gpuherd.jobs.lock import DispatcherLock, Role
from gpuherd.jobs.mailbox import Letter
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.reader import is_there
from gpuherd.jobs.retuning import changes
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.wishes import OF_JOBS, Answer, Control, ControlKind, priority_of

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.05
_NAMES_LOOKED_AT = 5000


def send(run: RunDirectory, control: Control, *, wait_s: float = 10.0) -> Answer:
    """Asks for something and waits for the answer, at most ``wait_s`` seconds for a dispatcher that does not react.

    Raises:
        UsageError: no queue in this folder, no such job (with the nearest name), option or priority. Nothing was asked
            then.
        QueueUnreadable: its queue is damaged or of another version. CannotWrite: the disk is full.
    """
    check(control)
    if not is_there(run.queue):
        raise UsageError(f"{run.root} holds no queue of gpuherd's; name the run folder")
    # A dispatcher at work has looked through the file; without one, this process works on the queue itself.
    with Queue(run.queue, check=DispatcherLock.holder(run.lock) is None) as queue:
        _refuse_unknown(queue, control)
        by = _user()
        with raising_cannot_write(run.queue, "ask again; nothing was asked"):
            number = queue.post(Letter(0, clock.wall(), control.kind, by, control.jobs, control.settings))
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
        changes(control.settings)
    elif control.kind is ControlKind.PRIORITY:
        priority_of(control.settings)
    elif control.settings:
        raise UsageError(f"{control.kind} takes no settings")
    if control.jobs and control.kind not in OF_JOBS:
        raise UsageError(f"{control.kind} is for the run as a whole; it takes no jobs")


def _refuse_unknown(queue: Queue, control: Control) -> None:
    unknown = queue.unknown(control.jobs)
    if unknown:
        import difflib  # slow to import, and seldom needed

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
    import getpass  # slow to import, and seldom needed

    try:
        return clean(getpass.getuser())
    except (KeyError, OSError):
        return "someone"
