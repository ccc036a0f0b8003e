"""Supervises an attempt on its node: time limits, the request to make room, and the guardian that reports its end when
the leader has died.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gpuherd.engines import progress
from gpuherd.engines.host import finding_us
from gpuherd.engines.local.process import LocalProcess, adopt, read_exit
from gpuherd.engines.process_tree import (
    ATTEMPT_VARIABLE,
    ProcessId,
    Seen,
    Traces,
    ask_to_end,
    boot_id,
    everyone,
    kill,
    members,
)
from gpuherd.engines.world import Failure, Others, Stop
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.time_limits import Passed, Timer
from gpuherd.jobs.remote.protocol import EndReport, Order, has_result, order_of, read_ended, say, tell

# An attempt on its node, from its go-ahead to its end: its time limits, the wish that it make room, its other nodes,
# and what it leaves behind. One attempt only; what its end means is told by others.

_KILL_AGAIN_S = 5.0
# What the main process leaves behind gets so long to obey a SIGTERM.
_PATIENCE_S = 1.0
_LOOK_S = 0.05
_LAST_S = 5.0  # of the notice are ours, to end what is left and to tell of it
_OTHERS_LOOK_S = 0.5
_OTHERS_END_S = 30.0  # beyond their grace; an engine that can't end them will not be waited for


@dataclass
class Course:
    """One attempt that runs.

    Attributes:
        grace_s, notice_s: what it has to end: when it is asked to, and when its time is nearly up.
        others: its other nodes, where the engine starts them one by one.
        ask_all: sends SIGTERM to all of it on all of its nodes, where the main process would not hand it on; False
            where that failed.
        passed: the limit for which it is being ended.
        interrupted: it is being ended to make room.
        failure: another node that failed, for which it is being ended.
    """

    process: LocalProcess
    progress: Path
    timer: Timer
    grace_s: float
    notice_s: float | None = None
    others: Others | None = None
    ask_all: Callable[[], bool] | None = None
    passed: Passed | None = None
    interrupted: bool = False
    failure: Failure | None = None
    _kill_at: float | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)
    _others_end_at: float | None = field(default=None, init=False)

    def follow(self, stop: Stop) -> None:
        """Returns when the main process has ended, and the other nodes too."""
        poll = select.poll()
        if not self._ended:
            poll.register(self.process.pidfd, select.POLLIN)
        poll.register(stop.fileno(), select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(self._wait_ms())}
            if self.process.pidfd in ready:
                poll.unregister(self.process.pidfd)
                self._ended = True
                if _failed(self.process.pidfd):
                    self._end_others(self.grace_s)
            if stop.fileno() in ready:
                stop.heard()
                self.make_room(soon=stop.soon)
            if self._all_ended():
                # Who asks for room may have ended the job as well, and that be heard first: so does Ray's job server.
                self.interrupted = self.interrupted or stop.asked
                return
            self._keep_time(clock.mono())

    def make_room(self, *, soon: bool = True) -> None:
        """SIGTERM to all that belongs to it, and SIGKILL after the grace, or when the notice of its end is over."""
        self.interrupted = True
        self._end(clock.mono(), self.grace_s if soon else max(self.grace_s, (self.notice_s or 0.0) - _LAST_S))

    def _all_ended(self) -> bool:
        if self.others is None:
            return self._ended
        if self.failure is None and self._others_end_at is None:
            self.failure = self.others.failure()
            if self.failure is not None:
                self._end(clock.mono(), self.grace_s)
        given_up = self._others_end_at is not None and clock.mono() > self._others_end_at
        return self._ended and (self.others.over() or given_up)

    def _wait_ms(self) -> float | None:
        times = [self.timer.next_at() if self._kill_at is None else self._kill_at]
        now = clock.mono()
        if self.others is not None:
            times.append(now + _OTHERS_LOOK_S)
        at = min((at for at in times if at is not None), default=math.inf)
        return None if at == math.inf else math.ceil(1000 * max(0.0, at - now))

    def _keep_time(self, now: float) -> None:
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill_at = now + _KILL_AGAIN_S
                self._end_others(self.grace_s)
                self.process.kill()
            return
        if self.timer.wants_look(now):
            self._look(now)
        self.passed = self.timer.passed(now)
        if self.passed is not None:
            self._end(now, self.grace_s)

    def _look(self, now: float) -> None:
        try:
            mark = self.progress.stat().st_mtime_ns
        except OSError:
            mark = None
        told = None if mark is None else progress.read(self.progress)
        self.timer.look(now, mark, None if told is None else told.stage)

    def _end(self, now: float, grace_s: float) -> None:
        if self._kill_at is None:
            self._kill_at = now + grace_s
            self._end_others(grace_s)
            if self.ask_all is None or not self.ask_all():
                self.process.terminate()
        self._kill_at = min(self._kill_at, now + grace_s)

    def _end_others(self, grace_s: float) -> None:
        if self.others is not None:
            self.others.end()
            if self._others_end_at is None:
                self._others_end_at = clock.mono() + grace_s + _OTHERS_END_S


def _failed(pidfd: int) -> bool:
    """Whether the child has not ended with 0; it can still be waited for."""
    found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    return found is None or found.si_code != os.CLD_EXITED or found.si_status != 0


def end_rest(traces: Traces, patience_s: float = _PATIENCE_S) -> bool:
    """Ends what an attempt whose main process has ended has left behind, wherever it hides: SIGTERM, then SIGKILL.
    Returns whether there was anything."""

    def rest() -> tuple[Seen, ...]:
        return members(everyone(traces.leader.start_ticks), traces.tag.__eq__, (traces,))

    until = time.monotonic() + patience_s
    told = set()
    while found := rest():
        for each in found:
            if each.process not in told:
                ask_to_end(each.process)
                told.add(each.process)
        if time.monotonic() >= until:
            kill(rest)
            break
        time.sleep(_LOOK_S)
    return bool(told)


# Sees to it that no attempt goes on unnoticed when its leader has died (SIGKILL, a worker of Ray that is ended).
#
# A shell waits on a pipe whose other end only the leader has. It ends when the leader says that all is done. When the
# pipe ends without that word, it becomes ``python -m gpuherd.jobs.remote.guardian``, which ends the attempt's tree
# (SIGTERM, the grace, SIGKILL) and tells in the leader's place how it ended. So it costs a thousandth of a second and
# no memory worth the name while all goes well.

# It outlives what an engine sends to all of a job's processes, but SIGKILL; and it is no child of the leader, for a
# worker of Ray kills its children when it ends. A shell's background reads nothing unless it is told what.
_SCRIPT = """\
trap '' HUP INT QUIT TERM USR1 USR2 ALRM
exec 3<&0
{ read -r word; [ "$word" = done ] || exec "$@"; } <&3 3<&- &
"""
_GUARDIAN_PATIENCE_S = 60.0


class Guardian:
    """A guardian that watches over this process. Leaving the block without ``dismiss`` hands the attempt to it.

    Args:
        order: what runs here; ``manifest`` and ``index`` say where it stands, ``rank`` this node's place.
        process: the attempt's main process here.
    """

    def __init__(self, manifest: str, index: int, rank: int, order: Order, process: ProcessId):
        words = [sys.executable, "-m", "gpuherd.jobs.remote.guardian", str(Path(manifest).absolute())]
        words += [str(index), str(rank), str(process.pid), str(process.start_ticks)]
        # To end it no file is needed: by then the manifest may be gone, or the network that it lies behind.
        words += [order.tag, str(order.status), str(order.grace_s)]
        # It is to find us wherever it is started; and it is no part of a job that we may be a part of.
        environment = finding_us(os.environ)
        environment.pop(ATTEMPT_VARIABLE, None)
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "gpuherd-guardian", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._child.wait()  # from here on it is nobody's child

    def dismiss(self) -> None:
        """The attempt has ended and all is told."""
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.write(b"done\n")
                self._child.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
        if self._child.stdout is not None:
            self._child.stdout.read()  # until it has ended
            self._child.stdout.close()


def main(words: Sequence[str]) -> int:
    """The command: manifest, index, rank, the pid and start time of the attempt's main process; tag, status, grace."""
    manifest, index, rank, pid, ticks, tag, status, grace = words
    identity, grace_s = ProcessId(int(pid), int(ticks), boot_id()), float(grace)
    process = adopt(identity, Path(status), tag)
    if process is not None:
        _end(process, grace_s)
        process.release()
    left = end_rest(Traces(tag, identity), grace_s)
    try:
        _, order = order_of(Path(manifest), int(index))
    except OSError as problem:
        say(f"nobody waits for the end of attempt {tag} any more: {problem}")
        return 0
    if int(rank) > 0:
        order = order.on_node(int(rank))
    if read_ended(Path(order.ended)) is not None:
        return 0
    found = read_exit(order.status, order.tag)
    # Where its shell was killed with its leader, nobody knows how the job would have ended: we have ended it.
    cut = left and found.code is None and found.signal is None
    ended = EndReport(
        at=clock.wall(),
        ran_s=found.ran_s or 0.0,
        started=found.started,
        problem="the process that led it was killed",
        code=found.code,
        signal=found.signal,
        has_result=has_result(order),
        interrupted=process is not None or not found.started or cut,
    )
    tell(order, ended, _GUARDIAN_PATIENCE_S)
    return 0


def _end(process: LocalProcess, grace_s: float) -> None:
    ended = select.poll()
    ended.register(process.pidfd, select.POLLIN)
    process.terminate()
    if not ended.poll(1000 * grace_s):
        process.kill()
        ended.poll()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
