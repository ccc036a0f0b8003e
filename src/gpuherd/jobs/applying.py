"""Does what was asked of a queue, and writes the answer beside it in the same transaction.

Changes of jobs are changes of rows (``interventions``); what they mean for processes is carried out afterwards, by
whoever has those in hand, from the marks in the rows. What concerns a dispatcher alone is done by its ``Hands``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.failures import clean
from gpuherd.jobs.interventions import Changed
from gpuherd.jobs.mailbox import Letter, Reply
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.wishes import OF_JOBS, ControlKind, priority_of

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
