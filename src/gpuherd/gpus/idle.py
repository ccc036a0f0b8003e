"""When is a GPU free? The whole rule, on one page.

A check finds a GPU free when
1. it works, and is not split into MIG instances (work then runs on those);
2. less than ``memory_threshold_mb`` is in use, by whatever process. Memory comes first because a container hides the
   pids of other users, but never their memory;
3. no process computes on it. Display servers, which the driver lists as graphics only, don't count while they stay
   under the threshold. Processes of our own job (``own_pids``) count neither here nor, with the memory they are known
   to hold, above.

A GPU is taken after a quiet time in which every look found it free: so a stranger's job that is between two phases is
not mistaken for a finished one. Users set it as ``max_checks`` checks, ``check_interval_s`` apart; a caller may look
more often than that, never much less often. The default is ten checks, and two while no other user is on the machine
(``others_use``): no stranger's job could then be between two phases. A GPU that our own job has just left
needs a single clean look, for as long as the quiet time, since our job's memory may still be draining; not any more
once a stranger's process was seen on it.

Pure: the caller passes the state of the GPU, and the time of the look in seconds of a monotonic clock.

>>> from gpuherd.gpus.state import Gpu
>>> rule = IdleRule(max_checks=2)
>>> gpu = Gpu(index=0, uuid="GPU-a", name="A100", total_mb=40_000, used_mb=1_234, free_mb=38_766)
>>> check(gpu, rule).reason
'1234 MB used (threshold 500)'
>>> streaks = Streaks()
>>> for now in (100.0, 101.0):
...     streaks = observe(streaks, {"GPU-a": Check(free=True, reason="")}, rule, now)
>>> is_free(streaks, "GPU-a", rule)
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gpuherd.gpus.state import Gpu, GpuProcess

# Shortest time between two looks, whatever the options say: other programs use the driver too.
SHORTEST_INTERVAL_S = 0.01
# The default number of checks in a row: in general, and while no other user is on any GPU of the machine.
MAX_CHECKS, CHECKS_ALONE = 10, 2
# Longest gap between two looks that still count as a row, or five intervals if that is more.
_LONGEST_HOLE_S = 5.0
# Timers are not exact.
_EXACT_S = 0.001

_SHORTEST_LOOK_S = 0.125
_LOOKS_IN_QUIET_TIME = 12


@dataclass(frozen=True, slots=True)
class IdleRule:
    """Megabytes in use from which a GPU is busy, clean checks in a row until it is taken, and seconds between them."""

    memory_threshold_mb: int = 500
    max_checks: int = MAX_CHECKS
    check_interval_s: float = 1.0

    @property
    def interval_s(self) -> float:
        """Seconds between two checks as they are really made."""
        return max(self.check_interval_s, SHORTEST_INTERVAL_S)

    @property
    def quiet_s(self) -> float:
        """Seconds in which every look must find the GPU free: from the first to the last of ``max_checks`` checks."""
        return (self.max_checks - 1) * self.interval_s

    @property
    def hole_s(self) -> float:
        """Seconds without a look after which a quiet time begins anew."""
        return max(_LONGEST_HOLE_S, 5 * self.interval_s)

    @property
    def look_s(self) -> float:
        """Seconds between two cheap looks at GPUs that others use: a twelfth of the quiet time, but not so short that
        looking costs more than a few thousandths of a core."""
        return min(self.interval_s, max(_SHORTEST_LOOK_S, self.quiet_s / _LOOKS_IN_QUIET_TIME))


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one look. ``reason``: why the GPU is not free, "" when it is; ``stranger``: another user computes
    on it."""

    free: bool
    reason: str
    stranger: bool = False


@dataclass(frozen=True, slots=True)
class CleanStreak:
    """Clean looks in a row: the times of the first and the last one."""

    since: float
    last: float


@dataclass(frozen=True, slots=True)
class Streaks:
    """The times since which each GPU (by UUID) was found free, and the GPUs that our own job has just left.

    ``left`` has, for each of those, the time until which one clean look is enough.
    """

    clean: Mapping[str, CleanStreak] = field(default_factory=dict)
    left: Mapping[str, float] = field(default_factory=dict)


def check(gpu: Gpu, rule: IdleRule, *, own_pids: AbstractSet[int] = frozenset()) -> Check:
    """One look at a GPU by the rule above."""
    if gpu.problem is not None:
        return Check(False, f"has a problem: {gpu.problem}")
    if gpu.mig_instances:
        return Check(False, "split into MIG instances")
    own_mb = sum(process.memory_mb or 0 for process in gpu.processes if process.pid in own_pids)
    strangers = [process for process in gpu.processes if process.compute and process.pid not in own_pids]
    used_mb = max(0, gpu.used_mb - own_mb)
    if used_mb >= rule.memory_threshold_mb:
        return Check(False, f"{used_mb} MB used (threshold {rule.memory_threshold_mb})", stranger=bool(strangers))
    if strangers:
        return Check(False, describe(max(strangers, key=lambda process: process.memory_mb or 0)), stranger=True)
    return Check(True, "")


def others_use(gpus: Iterable[Gpu], rule: IdleRule, user: str) -> bool:
    """Whether another user is on one of these GPUs: a process of another or an unknown user, or memory that no listed
    process holds."""
    for gpu in gpus:
        if any(process.compute and process.user != user for process in gpu.processes):
            return True
        if gpu.mig_instances or any(process.memory_mb is None for process in gpu.processes):
            continue  # its memory is that of its instances; or the owners of its memory are unknown
        if gpu.used_mb - sum(process.memory_mb or 0 for process in gpu.processes) >= rule.memory_threshold_mb:
            return True
    return False


def describe(process: GpuProcess) -> str:
    """A sentence about a process on a GPU: ``alice runs python (pid 4711, 900 MB)``."""
    memory = "" if process.memory_mb is None else f", {process.memory_mb} MB"
    return f"{process.user or 'someone'} runs {process.command or 'a process'} (pid {process.pid}{memory})"


def observe(streaks: Streaks, checks: Mapping[str, Check], rule: IdleRule, now: float) -> Streaks:
    """The streaks after this look, with a check for each GPU looked at (by UUID); a GPU not looked at keeps its own."""
    clean, left = dict(streaks.clean), dict(streaks.left)
    for uuid, found in checks.items():
        if left.get(uuid, now) < now:
            del left[uuid]
        if not found.free:
            clean.pop(uuid, None)
            if found.stranger:
                left.pop(uuid, None)
            continue
        row = clean.get(uuid)
        since = now if row is None or now - row.last > rule.hole_s else row.since
        if left.pop(uuid, None) is not None:
            since = min(since, now - rule.quiet_s)
        clean[uuid] = CleanStreak(since, now)
    return Streaks(clean, left)


def is_free(streaks: Streaks, uuid: str, rule: IdleRule) -> bool:
    """Whether the GPU has been found free for long enough to be taken."""
    row = streaks.clean.get(uuid)
    return row is not None and row.last - row.since >= rule.quiet_s - _EXACT_S


def clean_checks(streaks: Streaks, uuid: str, rule: IdleRule) -> int:
    """The number of checks in a row that the looks so far amount to, 0 to ``max_checks``; for people."""
    row = streaks.clean.get(uuid)
    if row is None:
        return 0
    return min(rule.max_checks, 1 + int((row.last - row.since + _EXACT_S) / rule.interval_s))


def released(streaks: Streaks, uuid: str, rule: IdleRule, now: float) -> Streaks:
    """The streaks when a job of ours has just left this GPU: its row is dropped, and one clean look is enough."""
    clean = {other: row for other, row in streaks.clean.items() if other != uuid}
    return Streaks(clean, {**streaks.left, uuid: now + max(rule.quiet_s, rule.hole_s)})


def forgotten(streaks: Streaks, rule: IdleRule, now: float) -> Streaks:
    """The streaks without rows whose last look is too long ago to count."""
    clean = {uuid: row for uuid, row in streaks.clean.items() if now - row.last <= rule.hole_s}
    return Streaks(clean, {uuid: until for uuid, until in streaks.left.items() if now <= until})
