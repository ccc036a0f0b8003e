"""An attempt on its node, from its go-ahead to its end: its time limits, the wish that it make room, its other nodes,
and what it leaves behind. One attempt only; what its end means is told by others.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.engines import progress
from gpuherd.engines.local import LocalProcess
from gpuherd.engines.processes import Seen, everyone
from gpuherd.engines.stop import Stop
from gpuherd.engines.tree import Traces, ask_to_end, kill, members
from gpuherd.engines.world import Failure, Others
from gpuherd.jobs import clock
from gpuherd.jobs.timelimits import Passed, Timer

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
