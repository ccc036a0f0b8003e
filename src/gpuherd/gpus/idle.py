"""When is a GPU free? The whole rule, on one page.

A check finds a GPU free when
1. it works, and is not split into MIG instances (work then runs on those);
2. less than ``memory_threshold_mb`` is in use, whoever uses it. Memory comes first because a container hides the pids
   of others, but never their memory;
3. no process computes on it. Display servers, which the driver lists as graphics only, don't count while they stay
   under the threshold. Processes of our own job (``own_pids``) count neither here nor, with the memory they are known
   to hold, above.

A GPU is taken after ``max_checks`` such checks in a row, ``check_interval_s`` apart, so that a stranger's job which is
between two phases is not mistaken for a finished one. One that our own job has just left needs a single clean check:
until one comes, its job's memory may still be draining. It loses that right when a stranger's process is seen on it, or
when it is not clean for ``max_checks`` checks.

Pure: the caller brings the state of the GPU, and keeps the time.

>>> from gpuherd.gpus.state import Gpu
>>> rule = IdleRule(max_checks=2)
>>> gpu = Gpu(index=0, uuid="GPU-a", name="A100", total_mb=40_000, used_mb=1_234, free_mb=38_766)
>>> check(gpu, rule).reason
'1234 MB used (threshold 500)'
>>> streaks = Streaks()
>>> for _ in range(2):
...     streaks = observe(streaks, {"GPU-a": Check(free=True, reason="")}, rule)
>>> is_free(streaks, "GPU-a", rule)
True
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from gpuherd.gpus.state import Gpu, GpuProcess


@dataclass(frozen=True, slots=True)
class IdleRule:
    """Megabytes in use from which a GPU is busy, clean checks in a row until it is taken, and seconds between them."""

    memory_threshold_mb: int = 500
    max_checks: int = 10
    check_interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """What one look found. ``reason`` says why it is not free, "" when it is; ``stranger``: someone else computes."""

    free: bool
    reason: str
    stranger: bool = False


@dataclass(frozen=True, slots=True)
class Streaks:
    """How often in a row each GPU (by UUID) was found free, and which GPUs our own job has just left.

    ``left`` holds, for each of those, how many unclean checks it may still have before it is like any other.
    """

    clean: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)


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


def describe(process: GpuProcess) -> str:
    """A sentence about a process on a GPU: ``alice runs python (pid 4711, 900 MB)``."""
    memory = "" if process.memory_mb is None else f", {process.memory_mb} MB"
    return f"{process.user or 'someone'} runs {process.command or 'a process'} (pid {process.pid}{memory})"


def observe(streaks: Streaks, checks: Mapping[str, Check], rule: IdleRule) -> Streaks:
    """The streaks after these checks, one for each GPU looked at (by UUID); a GPU not looked at keeps its own."""
    clean, left = dict(streaks.clean), dict(streaks.left)
    for uuid, found in checks.items():
        if found.free:
            # After our own job one clean check is enough, so it counts as the last one that was missing.
            clean[uuid] = rule.max_checks if left.pop(uuid, None) else min(clean.get(uuid, 0) + 1, rule.max_checks)
            continue
        clean[uuid] = 0
        chances = left.pop(uuid, 0) - 1
        if chances > 0 and not found.stranger:
            left[uuid] = chances
    return Streaks(clean, left)


def is_free(streaks: Streaks, uuid: str, rule: IdleRule) -> bool:
    """Whether the GPU has been found free often enough in a row to be taken."""
    return streaks.clean.get(uuid, 0) >= rule.max_checks


def released(streaks: Streaks, uuid: str, rule: IdleRule) -> Streaks:
    """The streaks when a job of ours has just left this GPU: nothing is known of it now; one clean check will do."""
    clean = {other: count for other, count in streaks.clean.items() if other != uuid}
    return replace(streaks, clean=clean, left={**streaks.left, uuid: rule.max_checks})
