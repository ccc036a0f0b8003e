"""An attempt on its node, from its go-ahead to its end: its time limits, the wish that it make room, and what it leaves
behind. One attempt only; what its end means is told to others.
"""

from __future__ import annotations

import math
import select
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.engines import progress
from gpuherd.engines.local import LocalProcess
from gpuherd.engines.processes import Seen, everyone
from gpuherd.engines.tree import Traces, ask_to_end, kill, members
from gpuherd.jobs import clock
from gpuherd.engines.stop import Stop
from gpuherd.jobs.timelimits import Passed, Timer

_KILL_AGAIN_S = 5.0
# What the main process leaves behind gets so long to obey a SIGTERM.
_PATIENCE_S = 1.0
_LOOK_S = 0.05


@dataclass
class Course:
    """One attempt that runs.

    Attributes:
        passed: the limit for which it is being ended.
        interrupted: it is being ended to make room.
    """

    process: LocalProcess
    progress: Path
    timer: Timer
    grace_s: float
    passed: Passed | None = None
    interrupted: bool = False
    _kill_at: float | None = field(default=None, init=False)

    def follow(self, stop: Stop) -> None:
        """Returns when the main process has ended."""
        poll = select.poll()
        poll.register(self.process.pidfd, select.POLLIN)
        poll.register(stop.fileno(), select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(self._wait_ms())}
            if self.process.pidfd in ready:
                return
            if stop.fileno() in ready:
                poll.unregister(stop.fileno())
                self.make_room()
            self._keep_time(clock.mono())

    def make_room(self) -> None:
        """SIGTERM to all that belongs to it, and SIGKILL after the grace."""
        self.interrupted = True
        self._end(clock.mono())

    def _wait_ms(self) -> float | None:
        at = self.timer.next_at() if self._kill_at is None else self._kill_at
        return None if at is None else math.ceil(1000 * max(0.0, at - clock.mono()))

    def _keep_time(self, now: float) -> None:
        if self._kill_at is not None:
            if now >= self._kill_at:
                self.process.kill()
                self._kill_at = now + _KILL_AGAIN_S
            return
        if self.timer.wants_look(now):
            self._look(now)
        self.passed = self.timer.passed(now)
        if self.passed is not None:
            self._end(now)

    def _look(self, now: float) -> None:
        try:
            mark = self.progress.stat().st_mtime_ns
        except OSError:
            mark = None
        told = None if mark is None else progress.read(self.progress)
        self.timer.look(now, mark, None if told is None else told.stage)

    def _end(self, now: float) -> None:
        if self._kill_at is None:
            self.process.terminate()
            self._kill_at = now + self.grace_s


def end_rest(traces: Traces) -> None:
    """Ends what an attempt whose main process has ended has left behind, wherever it hides: SIGTERM, then SIGKILL."""

    def rest() -> tuple[Seen, ...]:
        return members(everyone(traces.leader.start_ticks), traces.tag.__eq__, (traces,))

    until = time.monotonic() + _PATIENCE_S
    told = set()
    while found := rest():
        for each in found:
            if each.process not in told:
                ask_to_end(each.process)
                told.add(each.process)
        if time.monotonic() >= until:
            kill(rest)
            return
        time.sleep(_LOOK_S)
