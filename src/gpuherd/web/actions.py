"""What the buttons of the pages do: requests to the user's own queues, and the start of their dispatchers.

Each is what a command does, carried out as the user who runs the page: ``gpuherd cancel``, ``pause``, ``resume``,
``retry``, ``priority``, ``drain``, ``down --now`` and ``up``. The queue of a stranger, or one in which others may
write, is not touched: without a dispatcher a request is carried out by this process, which then believes the queue.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from gpuherd.errors import GpuherdError, UsageError, clean
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import OF_JOBS, ControlKind, Request
from gpuherd.web.places import Place
from gpuherd.web.queue_views import names_of

# A browser waits longer than this.
_ANSWER_S = 15.0
_START_S = 75.0
MOST_JOBS = 100
# Of the verbs for the run as a whole those that need no settings.
_OF_RUN = frozenset({ControlKind.DRAIN, ControlKind.STOP})
UP = "up"


class Forbidden(GpuherdError):
    """The run is not the user's own, or can't be relied on."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a form asks for.

    Attributes:
        verb: a ``ControlKind``, or ``up``.
        jobs: numbers of jobs; () with ``all_jobs`` for all to which the verb applies.
        priority: for PRIORITY.
    """

    verb: str
    jobs: tuple[int, ...] = ()
    all_jobs: bool = False
    priority: str = ""

    @staticmethod
    def of(form: Mapping[str, str]) -> Action:
        """From a form: ``do`` is a verb, with a job's number behind a colon, or ``:all``; without either it is for the
        jobs that are ticked (``job-12``). Raises UsageError.

        >>> Action.of({"do": "cancel:12"}), Action.of({"do": "pause", "job-3": "on", "job-1": "on"}).jobs
        (Action(verb='cancel', jobs=(12,), all_jobs=False, priority=''), (1, 3))
        """
        verb, _, which = form.get("do", "").partition(":")
        if which == "all":
            return Action(verb, all_jobs=True, priority=form.get("priority", ""))
        if which:
            return Action(verb, (_number(which),), priority=form.get("priority", ""))
        ticked = sorted(_number(name.removeprefix("job-")) for name in form if name.startswith("job-"))
        return Action(verb, tuple(ticked), priority=form.get("priority", ""))


def _number(word: str) -> int:
    if not (word.isascii() and word.isdigit() and len(word) < 16):
        raise UsageError(f"{clean(word)!r} is no number of a job")
    return int(word)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it: a sentence for people. ``ok``: all of it was carried out."""

    ok: bool
    text: str


def carry_out(place: Place, action: Action) -> Outcome:
    """Carries the action out; takes up to some seconds, or as long as jobs take to end.

    Raises:
        Forbidden: it is not the user's own run.
        UsageError: no such verb, job or priority, or no job was chosen. NotThere: no such job (any more).
        QueueUnreadable, CannotWrite: the queue can't be used.
    """
    if not place.trusted:
        raise Forbidden(place.why_not_trusted)
    if action.verb == UP:
        return _up(place)
    if action.verb not in OF_JOBS | _OF_RUN:
        raise UsageError(f"{clean(action.verb)!r} is nothing that can be done here")
    kind = ControlKind(action.verb)
    settings = {"priority": action.priority.strip()} if kind is ControlKind.PRIORITY else {}
    if kind not in OF_JOBS:
        request = Request(kind)
    elif action.all_jobs:
        request = Request(kind, settings=settings)
    elif not action.jobs:
        raise UsageError(f"{kind.value}: no job was chosen; tick some, or use the button of a job")
    elif len(action.jobs) > MOST_JOBS:
        raise UsageError(f"{kind.value}: at most {MOST_JOBS} jobs at once; for more of them use the command line")
    else:
        request = Request(kind, names_of(place, action.jobs), settings)
    response = send(place.run, request, wait_s=_ANSWER_S)
    return Outcome(response.ok, clean(response.text))


def _up(place: Place) -> Outcome:
    """Starts a dispatcher for one of the user's own queues, with the options of their settings: ``gpuherd up``, in a
    process of its own, so that its options are read as ever."""
    if place.engine is None:
        raise UsageError("this run is none of your own queues; the command that began it, given again, goes on with it")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpuherd", "up", "--json", "--engine", place.engine],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_START_S,
            env={**os.environ, "NO_COLOR": "1"},
        )
    except subprocess.TimeoutExpired:
        return Outcome(False, f"gpuherd up has not begun after {_START_S:g} s")
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return Outcome(False, clean(last[0] if last else f"gpuherd up ended with exit code {done.returncode}"))
    try:
        pid = json.loads(done.stdout)["pid"]
    except (ValueError, KeyError, TypeError):
        pid = "unknown"
    return Outcome(True, f"gpuherd (pid {pid}) works off the queue now")
