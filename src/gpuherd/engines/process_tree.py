"""All processes of an attempt, as /proc shows them: found, paused, and ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Processes as the kernel shows them in /proc: identity, session, and the locks that they hold. Linux only.
#
# A pid alone identifies a process for a short time only, since pids are used again. ``ProcessId`` therefore has the
# start time and the boot id as well.

ATTEMPT_VARIABLE = "GPUHERD_ATTEMPT"
# In the environment of what belongs to a session (``gpuherd session``): which one.
SESSION_VARIABLE = "GPUHERD_SESSION"

_PROC = Path("/proc")
_STATE, _GROUP, _SESSION, _START_TIME = 0, 2, 3, 19  # positions in /proc/<pid>/stat after the command's name
_ENDED = frozenset({"Z", "X"})
_HELD = frozenset({"T", "t"})
_MOST_AT_ONCE = 65_536
# So often it is looked for processes that were born during a look; then too much forks on this machine.
_MOST_CHASES = 50
_MARK = f"{ATTEMPT_VARIABLE}=".encode()


@cache
def boot_id() -> str:
    """The kernel's name for this boot: a record with another one is from before a restart of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True, slots=True)
class ProcessId:
    """The unique identity of a process: pid, start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot: str

    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        if self.boot != boot_id():
            return False
        fields = _stat(self.pid)
        return fields is not None and int(fields[_START_TIME]) == self.start_ticks and fields[_STATE] not in _ENDED


def identify(pid: int) -> ProcessId | None:
    """The full identity of the process that has this pid now, or None when there is none."""
    fields = _stat(pid)
    return None if fields is None else ProcessId(pid, int(fields[_START_TIME]), boot_id())


@dataclass(frozen=True, slots=True)
class Seen:
    """A live process as one look at /proc showed it.

    Attributes:
        group, session: process group and session, by number.
        held: stopped by a signal (or a debugger), until SIGCONT.
        attempt: the tag in its environment; None when it has none, or when we may not read it.
    """

    process: ProcessId
    group: int
    session: int
    held: bool
    attempt: str | None


def everyone(since_ticks: int = 0) -> tuple[Seen, ...]:
    """Every live process of the machine that began at or after ``since_ticks``, the oldest first; and the leaders of
    their sessions, where these are older. About 15 us for an older one and 30 us for each of the others.
    """
    # A process that forks and ends in a loop is gone a moment after the folder was read, and only its child is there.
    # Therefore the youngest are looked at first, and then those that were born meanwhile, until none was: what is alive
    # at that moment has been seen, however short it lives.
    last = _last_pid()
    pids = {int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()}
    seen = [found for pid in sorted(pids, reverse=True) if (found := _look(pid, since_ticks)) is not None]
    for _ in range(_MOST_CHASES):
        before, last = last, _last_pid()
        if before in (0, last):
            break
        born = [pid for pid in range(last, before, -1) if pid not in pids]  # none where numbers have begun anew
        seen += [found for pid in born if (found := _look(pid, since_ticks)) is not None and _is_process(pid)]
    leaders = {each.session for each in seen} - {each.process.pid for each in seen}
    seen += [found for pid in leaders if (found := _look(pid, 0)) is not None]
    return tuple(sorted(seen, key=lambda each: (each.process.start_ticks, each.process.pid)))


def _last_pid() -> int:
    """The number that the kernel has given to a process or thread last, in our namespace; 0 where it does not say."""
    return int((_read(f"{_PROC}/loadavg") or b"0").split()[-1])


def _is_process(pid: int) -> bool:
    """Whether this is the number of a process, and not of one of its further threads: /proc answers for both."""
    return b"\nTgid:\t%d\n" % pid in (_read(f"/proc/{pid}/status") or b"")


def _look(pid: int, since_ticks: int) -> Seen | None:
    fields = _stat(pid)
    if fields is None or fields[_STATE] in _ENDED or int(fields[_START_TIME]) < since_ticks:
        return None
    identity = ProcessId(pid, int(fields[_START_TIME]), boot_id())
    return Seen(identity, int(fields[_GROUP]), int(fields[_SESSION]), fields[_STATE] in _HELD, _attempt(pid))


def _attempt(pid: int) -> str | None:
    return _value(pid, _MARK)


def variable_of(pid: int, name: str) -> str | None:
    """The value of a variable in the environment that a process was started with; None when it has none, or when we may
    not read it."""
    return _value(pid, name.encode() + b"=")


def _value(pid: int, mark: bytes) -> str | None:
    environment = b"\0" + (_read(f"/proc/{pid}/environ") or b"")
    _, found, rest = environment.partition(b"\0" + mark)
    return rest.partition(b"\0")[0].decode("utf-8", "replace") if found else None


@dataclass(frozen=True, slots=True)
class Tagged:
    """A live process that carries an attempt's tag in its environment."""

    process: ProcessId
    attempt: str


def tagged(prefix: str) -> Iterator[Tagged]:
    """Every live process of ours whose GPUHERD_ATTEMPT begins with ``prefix``.

    The environment is inherited by everything that a job starts, also by what forks twice or opens a session of its
    own. Other users' processes can't be read and are passed over.
    """
    for seen in everyone():
        if seen.attempt is not None and seen.attempt.startswith(prefix):
            yield Tagged(seen.process, seen.attempt)


@dataclass(frozen=True, slots=True)
class Lock:
    """A held lock (``flock``) as the kernel reports it: the file, and the pid of the process that took it.

    The lock belongs to the open file, which children inherit: they then hold it too, and ``taker`` stays the same.
    """

    path: str
    taker: int


def locks_held(pid: int, among: Collection[str] | None = None) -> frozenset[Lock]:
    """The locks that a process holds, on the files ``among`` or on any; none where we lack the permission to look."""
    found = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = str(Path(entry.path).readlink())
                if path.startswith("/") and (among is None or path in among):
                    found |= {Lock(path, taker) for taker in _takers(f"/proc/{pid}/fdinfo/{entry.name}")}
    return frozenset(found)


def any_held(locks: Iterable[Lock]) -> bool:
    """Whether any process still holds one of these locks, by the kernel's list; also a process that we may not read."""
    from gpuherd.gpus.lease_files import is_locked  # here: every command knows processes, few know locks

    sought = set()
    for lock in locks:
        with suppress(OSError):
            inode = Path(lock.path).stat().st_ino
            # The kernel waits some milliseconds until it can list its locks: only where this one is held.
            if is_locked(Path(lock.path)) or not os.access(lock.path, os.R_OK):
                sought.add((b"%d" % lock.taker, b"%d" % inode))
    # 4: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF
    for line in (_read(str(_PROC / "locks")) or b"").splitlines() if sought else ():
        words = line.split()
        if words[1:2] == [b"FLOCK"] and (words[4], words[5].rpartition(b":")[2]) in sought:
            return True
    return False


def path_of(descriptor: int) -> str:
    """The file behind a descriptor of ours, as others see it in /proc. Raises OSError when it is not open."""
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - for every start


def _takers(info: str) -> Iterator[int]:
    # lock:	1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF
    for line in (_read(info) or b"").splitlines():
        words = line.split()
        if words[:1] == [b"lock:"] and words[2:3] == [b"FLOCK"] and len(words) > 5 and words[5].isdigit():
            yield int(words[5])


def send(process: ProcessId, number: int) -> None:
    """Sends a signal to exactly this process: through a pidfd, so that a pid used again meanwhile is not hit."""
    with suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if process.is_alive():
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the command's name, which may itself hold spaces and brackets."""
    text = _read(f"/proc/{pid}/stat")
    return None if not text else text[text.rindex(b")") + 2 :].decode("ascii").split()


def _read(path: str) -> bytes | None:
    """A file of /proc; None when the process is gone or we may not read it. Plain calls: this is done very often."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, _MOST_AT_ONCE):
            parts.append(part)
            if len(part) < _MOST_AT_ONCE:
                break
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(descriptor)


# Which processes belong to an attempt.
#
# A job may fork twice, open sessions of its own, ignore SIGTERM, fork in a loop, and empty its environment. A process
# belongs to an attempt when one of these is so, each of which is inherited by everything that the job starts:
#
# * its environment carries the attempt's tag;
# * its session is that of the attempt's main process, or one in which a process carries the tag;
# * it holds the lock (lease) on a GPU of the attempt, taken by the dispatcher that started it.
#
# A process escapes that has emptied its environment, opened a session in which no process carries the tag, and closed
# every file that it inherited. It holds no lease then; if it uses a GPU, the GPU manager sees that.

# A process that forks and ends at once may be gone before the signal: then the next look finds its child.
_MOST_ROUNDS = 40
_LOOKS_TO_BE_SURE = 2


@dataclass(frozen=True, slots=True)
class Traces:
    """How the processes of an attempt are recognised.

    Attributes:
        tag: the value of GPUHERD_ATTEMPT.
        leader: the main process, whose pid is the number of its session.
        locks: the leases that it was given.
    """

    tag: str
    leader: ProcessId
    locks: frozenset[Lock] = frozenset()

    def members(self) -> tuple[Seen, ...]:
        """The live processes of the attempt, the oldest first: looked up anew at each call."""
        return members(everyone(self.leader.start_ticks), self.tag.__eq__, (self,))


def members(
    seen: Sequence[Seen],
    ours: Callable[[str], bool],
    traces: Collection[Traces],
    spare: Collection[Traces] = (),
) -> tuple[Seen, ...]:
    """Which of the processes ``seen`` belong to some attempts.

    Args:
        seen: the result of ``everyone``.
        ours: whether a tag is that of one of these attempts.
        traces: their leaders and locks.
        spare: attempts that go on: none of their processes is returned, and a lock that they hold is no trace.
    """
    theirs = _sessions(seen, {each.tag for each in spare}.__contains__) | {each.leader.pid for each in spare}
    sessions = _sessions(seen, ours) | {each.leader.pid for each in traces if not _used_again(each.leader, seen)}
    # Our own session is older than every job: no job has put a process there.
    sessions -= theirs | {os.getsid(0)}
    held = {lock for each in spare for lock in each.locks}
    locks = {lock for each in traces for lock in each.locks} - held
    # No process inherits from a later one. This spares a look at the files of all older processes.
    oldest = min((each.leader.start_ticks for each in traces), default=0)
    found = []
    for process in seen:
        if process.process.pid == os.getpid() or process.session in theirs:
            continue
        by_tag = process.attempt is not None and ours(process.attempt)
        # One with another tag may belong to another gpuherd that took the GPU just now: its lock is its own.
        by_lock = process.attempt is None and process.process.start_ticks >= oldest and _holds(process, locks)
        if by_tag or process.session in sessions or by_lock:
            found.append(process)
    return tuple(found)


def _sessions(seen: Sequence[Seen], ours: Callable[[str], bool]) -> set[int]:
    """The sessions with a process of such a tag, except those whose own leader lives and has none: a user may have
    copied a job's environment into a shell, to look for a fault.
    """
    mine = {process.process.pid: process.session for process in seen if process.attempt and ours(process.attempt)}
    return set(mine.values()) - ({process.process.pid for process in seen} - mine.keys())


def _used_again(leader: ProcessId, seen: Sequence[Seen]) -> bool:
    """Whether the main process has ended and its pid is that of another process, and so of another session."""
    return any(p.process.pid == leader.pid and p.process.start_ticks != leader.start_ticks for p in seen)


def _holds(process: Seen, locks: Collection[Lock]) -> bool:
    if not locks:
        return False
    return not locks_held(process.process.pid, {lock.path for lock in locks}).isdisjoint(locks)


def ask_to_end(process: ProcessId) -> None:
    """SIGTERM; and SIGCONT, since a stopped process can't handle it."""
    send(process, signal.SIGTERM)
    send(process, signal.SIGCONT)


def kill(find: Callable[[], Sequence[Seen]]) -> None:
    """SIGKILL to all that ``find`` finds, until it finds none; some looks only, since a process may be stuck in
    the kernel."""
    until_none(find, signal.SIGKILL)


def until_none(find: Callable[[], Sequence[Seen]], number: int) -> None:
    signalled: set[ProcessId] = set()
    nothing_new = 0
    for _ in range(_MOST_ROUNDS):
        found = [process for process in find() if process.process not in signalled]
        nothing_new = 0 if found else nothing_new + 1
        if nothing_new == _LOOKS_TO_BE_SURE:
            return
        for process in found:
            send(process.process, number)
            signalled.add(process.process)
        # The whole group as well: that reaches also processes that were born since the look, all in one instant.
        for group in {process.group for process in found}:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)


# On a cluster's node: from SIGTERM to SIGKILL for what an attempt leaves behind, and between two looks.
_REST_PATIENCE_S = 1.0
_REST_LOOK_S = 0.05


def end_rest(traces: Traces, patience_s: float = _REST_PATIENCE_S) -> bool:
    """Ends what one attempt whose main process has ended has left behind, wherever it hides: SIGTERM, then SIGKILL.
    Returns whether there was anything."""

    until = time.monotonic() + patience_s
    asked = set()
    while found := traces.members():
        for each in found:
            if each.process not in asked:
                ask_to_end(each.process)
                asked.add(each.process)
        if time.monotonic() >= until:
            kill(traces.members)
            break
        time.sleep(_REST_LOOK_S)
    return bool(asked)
