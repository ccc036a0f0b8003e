"""The time limits of one attempt: for the whole, for each stage that it reports, and for its heartbeat.

A heartbeat is a change of the progress file. It counts from when we saw it, by the machine's own clock and not by the
file's time, so that setting a clock can't end a job. Each limit is checked for heartbeats eight times.
Time in which we had stopped the job's processes counts for none of the limits.

``Timer`` is pure. ``Supervised`` ends a process that has passed a limit; it is the same for jobs of this machine
(``attempts.supervise``) and for the part of an attempt on a cluster's node (``remote.node_job``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from gpuherd.engines import progress
from gpuherd.jobs.attempts import KILL_AGAIN_S, LONGEST_LOOK_S, SHORTEST_LOOK_S

if TYPE_CHECKING:
    from pathlib import Path

    from gpuherd.engines.local.process import LocalProcess
    from gpuherd.jobs.job import Job
    from gpuherd.jobs.options import DispatchOptions

_LOOKS_A_LIMIT = 8


class LimitKind(Enum):
    """Which limit."""

    WHOLE = "timeout"
    STAGE = "stage_timeout"
    HEARTBEAT = "heartbeat"
    IDLE = "idle_after"  # of GPUs that are not used: ``gpu.idle_jobs`` decides


@dataclass(frozen=True, slots=True)
class Passed:
    """A limit that an attempt has passed; ``stage`` is the stage that it reported last."""

    kind: LimitKind
    limit_s: float
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds; None for no limit."""

    whole_s: float | None = None
    stage_s: float | None = None
    heartbeat_s: float | None = None

    @staticmethod
    def of(job: Job, options: DispatchOptions) -> TimeLimits:
        """The job's own limits, else those of the run."""
        return TimeLimits(
            job.timeout_s or options.timeout,
            job.stage_timeout_s or options.stage_timeout,
            job.heartbeat_s or options.heartbeat,
        )

    @property
    def look_s(self) -> float | None:
        """How often to read the progress file, None for never."""
        known = [limit for limit in (self.stage_s, self.heartbeat_s) if limit is not None]
        return min(LONGEST_LOOK_S, max(SHORTEST_LOOK_S, min(known) / _LOOKS_A_LIMIT)) if known else None


@dataclass(slots=True)
class Timer:
    """The times of one attempt, in seconds of ``clock.mono``.

    Attributes:
        started: when it began; ``seen_at`` when we began to supervise it.
        idle_s: how long we have paused it so far; ``idle_since`` while it is paused.
    """

    started: float
    limits: TimeLimits
    seen_at: float
    idle_s: float = 0.0
    idle_since: float | None = None
    _told: float = field(init=False)
    _stage_began: float = field(init=False)
    _look_at: float | None = field(init=False)
    _mark: object = None
    _stage: str | None = None

    def __post_init__(self) -> None:
        # For an attempt that is taken over, stage and heartbeat count from now: its earlier reports are unknown.
        self._told = self._stage_began = self.seen_at - self.idle_s
        self.follow(self.seen_at)

    def follow(self, now: float) -> None:
        """The progress is read from now on (again)."""
        every = self.limits.look_s
        self._look_at = None if every is None else now + every

    def pause(self, now: float) -> None:
        """Its processes are paused from now on."""
        if self.idle_since is None:
            self.idle_since = now

    def resume(self, now: float) -> None:
        """They are resumed."""
        if self.idle_since is not None:
            self.idle_s += max(0.0, now - self.idle_since)
            self.idle_since = None
            self.follow(now)

    def paused_s(self, now: float) -> float:
        """How long we have paused it until now."""
        return self.idle_s + (0.0 if self.idle_since is None else max(0.0, now - self.idle_since))

    def wants_look(self, now: float) -> bool:
        """Whether ``look`` is due."""
        return self.idle_since is None and self._look_at is not None and now >= self._look_at

    def look(self, now: float, mark: object, stage: str | None) -> None:
        """The progress at this moment: ``mark`` changes with each report, and is None while there was none."""
        work = now - self.idle_s
        if mark != self._mark:
            self._mark, self._told = mark, work
            if stage != self._stage:
                self._stage, self._stage_began = stage, work
        self.follow(now)

    def passed(self, now: float) -> Passed | None:
        """The limit that it has passed, None for none."""
        if self.idle_since is not None:
            return None
        work = now - self.idle_s
        for kind, began, limit in self._all():
            if limit is not None and work >= began + limit:
                return Passed(kind, limit, self._stage)
        return None

    def next_at(self) -> float | None:
        """When ``look`` or ``passed`` is to be called next, None for never (while it is paused)."""
        if self.idle_since is not None:
            return None
        ends = [began + limit + self.idle_s for _, began, limit in self._all() if limit is not None]
        if self._look_at is not None:
            ends.append(self._look_at)
        return min(ends, default=None)

    def over_at(self) -> float | None:
        """When the limit for the whole attempt ends it at the latest; None without one, and while it is paused."""
        if self.limits.whole_s is None or self.idle_since is not None:
            return None
        return self.started + self.limits.whole_s + self.idle_s

    def _all(self) -> tuple[tuple[LimitKind, float, float | None], ...]:
        # Starts by a clock that stands still while the job is paused: ``mono`` less ``idle_s``.
        return (
            (LimitKind.WHOLE, self.started, self.limits.whole_s),
            (LimitKind.STAGE, self._stage_began, self.limits.stage_s),
            (LimitKind.HEARTBEAT, self._told, self.limits.heartbeat_s),
        )


@dataclass(eq=False, kw_only=True)
class Supervised:
    """A running process whose time limits are enforced.

    Attributes:
        kill_at: set (by ``clock.mono``) while it is being ended: SIGTERM was sent, SIGKILL follows then.
        passed: the limit for which it is being ended.
    """

    process: LocalProcess
    progress_file: Path
    timer: Timer
    kill_at: float | None = None
    passed: Passed | None = None

    def keep_time(self, now: float, grace_s: float) -> None:
        """Ends it once it has passed a limit, and kills it once it has passed its grace."""
        if self.kill_at is not None:
            if now >= self.kill_at:
                self.kill_at = now + KILL_AGAIN_S
                self.kill()
            return
        if self.timer.wants_look(now):
            try:
                mark = self.progress_file.stat().st_mtime_ns
            except OSError:
                mark = None
            found = None if mark is None else progress.read(self.progress_file)
            self.timer.look(now, mark, None if found is None else found.stage)
        self.passed = self.timer.passed(now)
        if self.passed is not None:
            self.end(now, grace_s)

    def next_at(self) -> float | None:
        """When ``keep_time`` has something to do, None for never."""
        return self.timer.next_at() if self.kill_at is None else self.kill_at

    def end(self, now: float, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after the grace; called again, it can only shorten the grace."""
        if self.kill_at is None:
            self.kill_at = now + grace_s
            self.terminate()
        self.kill_at = min(self.kill_at, now + grace_s)

    def terminate(self) -> None:
        """SIGTERM to all that belongs to it."""
        self.process.terminate()

    def kill(self) -> None:
        """SIGKILL to all that belongs to it."""
        self.process.kill()
