"""What happened in a simulated run, and its figures. Pure. Times are seconds, shares are from 0 to 1."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.scheduler.memory import could_share
from gpuherd.simulate.options import Variant
from gpuherd.simulate.workload import Work

if TYPE_CHECKING:
    from gpuherd.simulate.people import UserFigures


class Ending(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    GAVE_WAY = "gave way"


@dataclass(frozen=True, slots=True)
class FinishedAttempt:
    """An attempt: job by number (from 0), GPUs by number over all machines (() on the CPU), seconds from the start.

    ``wait_s``: time before it in which the job could have run, and did not.
    """

    job: int
    gpus: tuple[int, ...]
    start: float
    end: float
    wait_s: float
    ending: Ending
    failure: FailureClass | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Visit:
    """An external user's use of a GPU."""

    gpu: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class UserHistory:
    """A user of a machine that several share.

    Attributes:
        name, weight: as given.
        waiting: from when until when jobs of theirs waited for GPUs.
        predicted_s: when they would get their first GPU, as predicted when they began to wait; None without a
            prediction.
    """

    name: str
    weight: float
    waiting: tuple[tuple[float, float], ...]
    predicted_s: float | None = None


@dataclass(frozen=True, slots=True)
class History:
    """A whole run.

    Attributes:
        machines: how many GPUs each machine has.
        attempts: every attempt, by its end.
        visits: those of external users, up to the end of the run.
        done, failed, cancelled: jobs by how they ended; ``failed`` includes those that could never run.
        refused: for each job that could never run, the reason.
        stuck: jobs that still waited when no event could start them any more.
        decisions: how often the policy was called.
        users: those who share the machine; () for one user alone.
    """

    machines: tuple[int, ...]
    attempts: tuple[FinishedAttempt, ...]
    visits: tuple[Visit, ...]
    done: int
    failed: int
    cancelled: int
    refused: dict[int, str]
    stuck: int = 0
    decisions: int = 0
    users: tuple[UserHistory, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of all machines together."""
        return sum(self.machines)

    @property
    def makespan_s(self) -> float:
        """When the last attempt ended; 0 when nothing ran."""
        return max((attempt.end for attempt in self.attempts), default=0.0)


def busy_spans(history: History) -> dict[int, list[tuple[float, float]]]:
    """When jobs of ours were on each GPU (by number): starts and ends, in order and without overlaps, also where
    several shared it.
    """
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for attempt in sorted(history.attempts, key=lambda attempt: attempt.start):
        for gpu in attempt.gpus:
            known = spans[gpu]
            if known and attempt.start <= known[-1][1] and attempt.shared:
                known[-1] = (known[-1][0], max(known[-1][1], attempt.end))
            else:
                known.append((attempt.start, attempt.end))
    return spans


@dataclass(frozen=True, slots=True)
class Waits:
    """Time that jobs could have run and did not: over all their attempts together, for each job that started."""

    mean_s: float
    p50_s: float
    p95_s: float
    max_s: float

    def to_dict(self) -> dict[str, float]:
        """Ready for JSON: seconds by the figure's name."""
        return {name.removesuffix("_s"): round(value, 3) for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The figures of a run.

    Attributes:
        jobs, done, failed, cancelled, stuck: numbers of jobs; stuck are those that still waited at the end.
        attempts, gave_way: starts, and those of them that were requeued for an external user.
        failures: attempts that failed, by class.
        makespan_s: from the start to the last end.
        least_s: lower bound of the makespan for any scheduler (``least_possible_s``).
        gpu_hours: hours that our jobs held GPUs; a shared GPU counts once.
        lost_gpu_hours: those of attempts that did not succeed.
        utilisation: share of all GPU time up to the makespan in which jobs of ours ran.
        used_until_last_start: the same share up to the last start of a job: the utilisation without the end of the run,
            in which fewer jobs are left than GPUs.
        external_share: share of all GPU time in which external users were there.
        waits: None when nothing started.
        decisions: how often the policy was called; 0 without a policy of ours.
    """

    jobs: int
    done: int
    failed: int
    cancelled: int
    stuck: int
    attempts: int
    gave_way: int
    failures: Mapping[str, int]
    makespan_s: float
    least_s: float
    gpu_hours: float
    lost_gpu_hours: float
    utilisation: float | None
    used_until_last_start: float | None
    external_share: float | None
    waits: Waits | None
    decisions: int

    @property
    def over_least(self) -> float | None:
        """The makespan as a multiple of its lower bound; None when nothing ran."""
        return self.makespan_s / self.least_s if self.least_s > 0 and self.attempts else None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; docs/what-if.md describes it."""
        return {
            **{name: getattr(self, name) for name in ("jobs", "done", "failed", "cancelled", "stuck")},
            "attempts": self.attempts,
            "gave_way": self.gave_way,
            "failed_attempts_by_class": dict(self.failures),
            "makespan_seconds": round(self.makespan_s, 3),
            "least_possible_seconds": round(self.least_s, 3),
            "over_least_possible": _rounded(self.over_least),
            "gpu_hours": round(self.gpu_hours, 6),
            "lost_gpu_hours": round(self.lost_gpu_hours, 6),
            "utilisation": _rounded(self.utilisation),
            "utilisation_until_last_start": _rounded(self.used_until_last_start),
            "strangers_share": _rounded(self.external_share),
            "wait_seconds": None if self.waits is None else self.waits.to_dict(),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclass(frozen=True, slots=True)
class Result:
    """A variant, what happened, and its figures; those of each user where several share the machine."""

    variant: Variant
    history: History
    figures: Figures
    users: tuple[UserFigures, ...] = ()


def figures(history: History, works: Sequence[Work]) -> Figures:
    """The figures of a run of these works."""
    makespan_s = history.makespan_s
    waits: dict[int, float] = defaultdict(float)
    lost_s = 0.0
    for attempt in history.attempts:
        waits[attempt.job] += attempt.wait_s
        if attempt.ending is not Ending.DONE:
            lost_s += (attempt.end - attempt.start) * len(attempt.gpus)
    spans = [span for each in busy_spans(history).values() for span in each]
    busy_s = sum(end - start for start, end in spans)
    last_s = max((attempt.start for attempt in history.attempts), default=0.0)
    until_last_s = sum(max(0.0, min(end, last_s) - start) for start, end in spans)
    all_s = makespan_s * history.gpus
    external_s = sum(max(0.0, min(visit.end, makespan_s) - visit.start) for visit in history.visits)
    return Figures(
        jobs=len(works),
        done=history.done,
        failed=history.failed,
        cancelled=history.cancelled,
        stuck=history.stuck,
        attempts=len(history.attempts),
        gave_way=sum(attempt.ending is Ending.GAVE_WAY for attempt in history.attempts),
        failures=dict(Counter(each.failure.value for each in history.attempts if each.failure is not None)),
        makespan_s=makespan_s,
        least_s=least_possible_s(history.gpus, works),
        gpu_hours=busy_s / 3600,
        lost_gpu_hours=lost_s / 3600,
        utilisation=busy_s / all_s if all_s > 0 else None,
        used_until_last_start=until_last_s / (last_s * history.gpus) if last_s > 0 and history.gpus else None,
        external_share=external_s / all_s if all_s > 0 else None,
        waits=waits_of(list(waits.values())),
        decisions=history.decisions,
    )


def least_possible_s(gpus: int, works: Sequence[Work]) -> float:
    """Lower bound of the makespan for any scheduler, external users and memory not counted.

    The larger of two bounds: the GPU seconds of all successful attempts over the GPUs (without jobs that may share,
    which count only in part when they share), and the longest chain of needs, from the arrival of its jobs on.
    """
    # Seconds of the attempt that succeeds; 0 for a job that never does.
    seconds = [next((trial.seconds for trial in work.trials if trial.failure is None), 0.0) for work in works]
    area = sum(
        length * work.job.gpus * work.job.nodes
        for length, work in zip(seconds, works, strict=True)
        if not could_share(work.job) and work.job.gpus * work.job.nodes <= gpus
    )
    return max(area / gpus, _longest_chain_s(works, seconds))


def _longest_chain_s(works: Sequence[Work], seconds: Sequence[float]) -> float:
    """The end of the last job if each could start as soon as those it needs are done. Needs are no circle."""
    by_name = {(work.user, work.job.name): number for number, work in enumerate(works)}
    ends: list[float | None] = [None] * len(works)
    for root in range(len(works)):
        stack = [root]
        while stack:
            number = stack[-1]
            needed = [by_name[works[number].user, name] for name in works[number].job.needs]
            missing = [each for each in needed if ends[each] is None]
            if missing and ends[number] is None:
                stack += missing
                continue
            stack.pop()
            start = max((ends[each] or 0.0 for each in needed), default=0.0)
            ends[number] = max(start, works[number].arrives_s) + seconds[number]
    return max((end or 0.0 for end in ends), default=0.0)


def waits_of(seconds: list[float]) -> Waits | None:
    """The figures of the times that jobs waited, None without any. Sorts the list."""
    if not seconds:
        return None
    seconds.sort()
    return Waits(sum(seconds) / len(seconds), quantile(seconds, 0.5), quantile(seconds, 0.95), seconds[-1])


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed (nearest rank).

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.0
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
