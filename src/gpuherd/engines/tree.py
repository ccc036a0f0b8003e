"""All processes of an attempt, wherever they hide: found, stopped for a while, and ended.

A job may fork twice, open sessions of its own, ignore SIGTERM, fork in a loop, and empty its environment. A process
belongs to an attempt when one of these is so, each of which is inherited by everything that the job starts:

* its environment carries the attempt's tag;
* its session is that of the attempt's main process, or one in which a process carries the tag;
* it holds the lock (lease) on a GPU of the attempt, taken by the dispatcher that started it.

What escapes: a process that has emptied its environment, opened a session in which nobody carries the tag, and closed
every file that it was given. It holds no GPU of ours then, except by using one; that is for those who watch the GPUs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpuherd.engines.processes import Lock, ProcessId, Seen, everyone, locks_held, send

# A process that forks and ends at once is a moving target: it may take several looks until one meets it. Each is short.
_MOST_ROUNDS = 40
_LOOKS_TO_BE_SURE = 2


@dataclass(frozen=True, slots=True)
class Traces:
    """What the processes of an attempt are known by.

    Attributes:
        tag: the value of GPUHERD_ATTEMPT.
        leader: the main process, whose pid is the number of its session.
        locks: the leases that it was given.
    """

    tag: str
    leader: ProcessId
    locks: frozenset[Lock] = frozenset()


def members(
    seen: Sequence[Seen],
    ours: Callable[[str], bool],
    traces: Collection[Traces],
    spare: Collection[Traces] = (),
) -> tuple[Seen, ...]:
    """Which of the processes ``seen`` belong to some attempts.

    Args:
        seen: what ``processes.everyone`` has just answered.
        ours: whether a tag is that of one of these attempts.
        traces: what else is known of them.
        spare: attempts that go on: no process of theirs is among the answer, and a lock that they hold is no trace.
    """
    theirs = _sessions(seen, {each.tag for each in spare}.__contains__) | {each.leader.pid for each in spare}
    sessions = _sessions(seen, ours) | {each.leader.pid for each in traces if not _used_again(each.leader, seen)}
    # Nobody of the session in which we live was put there by a job: it is older than each of them.
    sessions -= theirs | {os.getsid(0)}
    held = {lock for each in spare for lock in each.locks}
    locks = {lock for each in traces for lock in each.locks} - held
    # Nobody inherited anything from one who came later. This spares a look at the files of all who live here for long.
    oldest = min((each.leader.start_ticks for each in traces), default=0)
    found = []
    for process in seen:
        if process.process.pid == os.getpid() or process.session in theirs:
            continue
        by_tag = process.attempt is not None and ours(process.attempt)
        # A tag of another's: of a gpuherd, say, that took the GPU just now. Its lock is its own.
        by_lock = process.attempt is None and process.process.start_ticks >= oldest and _holds(process, locks)
        if by_tag or process.session in sessions or by_lock:
            found.append(process)
    return tuple(found)


def _sessions(seen: Sequence[Seen], ours: Callable[[str], bool]) -> set[int]:
    """The sessions that a process with such a tag is in, but those whose own leader lives and has none.

    (Somebody may have copied a job's environment into a shell of their own, to look for a fault.)
    """
    mine = {process.process.pid: process.session for process in seen if process.attempt and ours(process.attempt)}
    return set(mine.values()) - ({process.process.pid for process in seen} - mine.keys())


def _used_again(leader: ProcessId, seen: Sequence[Seen]) -> bool:
    """Whether the main process has ended and its pid names another by now, and so another session."""
    return any(p.process.pid == leader.pid and p.process.start_ticks != leader.start_ticks for p in seen)


def _holds(process: Seen, locks: Collection[Lock]) -> bool:
    if not locks:
        return False
    return not locks_held(process.process.pid, {lock.path for lock in locks}).isdisjoint(locks)


@dataclass(frozen=True, slots=True)
class Tree:
    """The processes of one attempt, looked up anew at each call."""

    traces: Traces

    def members(self) -> tuple[Seen, ...]:
        """Its live processes, the youngest first."""
        return members(everyone(self.traces.leader.start_ticks), self.traces.tag.__eq__, (self.traces,))

    def terminate(self) -> None:
        """SIGTERM to all; those that were stopped go on, or they could not obey."""
        for process in self.members():
            ask_to_end(process.process)

    def pause(self) -> None:
        """SIGSTOP to all, until a look finds none that runs."""
        _until_none(lambda: tuple(p for p in self.members() if not p.held), signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to all, also to those that have yet to hear that they are to stop."""
        for process in self.members():
            send(process.process, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all, until a look finds none."""
        kill(self.members)


def ask_to_end(process: ProcessId) -> None:
    """SIGTERM; and SIGCONT, since what is stopped, or is about to be, could not obey."""
    send(process, signal.SIGTERM)
    send(process, signal.SIGCONT)


def kill(find: Callable[[], Sequence[Seen]]) -> None:
    """SIGKILL to all that ``find`` finds, until it finds none; some looks only, for one may be stuck in the kernel."""
    _until_none(find, signal.SIGKILL)


def _until_none(find: Callable[[], Sequence[Seen]], number: int) -> None:
    told: set[ProcessId] = set()
    nothing_new = 0
    for _ in range(_MOST_ROUNDS):
        found = [process for process in find() if process.process not in told]
        nothing_new = 0 if found else nothing_new + 1
        if nothing_new == _LOOKS_TO_BE_SURE:
            return
        for process in found:
            send(process.process, number)
            told.add(process.process)
        # The group as a whole as well: that reaches also those who were born since the look, all in one instant.
        for group in {process.group for process in found}:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
