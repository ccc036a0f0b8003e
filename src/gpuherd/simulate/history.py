"""What happened in a simulated run: plain data, from which the figures, the timeline and the picture are made."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from gpuherd.jobs.failures import FailureClass


class Ending(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    GAVE_WAY = "gave way"


@dataclass(frozen=True, slots=True)
class Ran:
    """An attempt: job by number (from 0), GPUs by number over all machines (() on the CPU), seconds from the start.

    ``wait_s``: how long the job could have run before it, and did not.
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
    """A stranger's use of a GPU."""

    gpu: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class History:
    """A whole run.

    Attributes:
        machines: how many GPUs each machine has.
        attempts: every attempt, by its end.
        visits: what strangers did, up to the end of the run.
        done, failed, cancelled: jobs by how they ended; failed are also those that could never run.
        never: for each job that was refused, why it could never run.
        stuck: jobs that still waited when nothing more could come of it, and why.
        decisions: how often the policy was asked.
    """

    machines: tuple[int, ...]
    attempts: tuple[Ran, ...]
    visits: tuple[Visit, ...]
    done: int
    failed: int
    cancelled: int
    never: dict[int, str]
    stuck: int = 0
    decisions: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of all machines together."""
        return sum(self.machines)

    @property
    def makespan_s(self) -> float:
        """When the last attempt ended; 0 when nothing ran."""
        return max((ran.end for ran in self.attempts), default=0.0)


def busy_spans(history: History) -> dict[int, list[tuple[float, float]]]:
    """When jobs of ours were on each GPU (by number): begins and ends, in order and without overlaps, also where
    several shared it.
    """
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for ran in sorted(history.attempts, key=lambda ran: ran.start):
        for gpu in ran.gpus:
            known = spans[gpu]
            if known and ran.start <= known[-1][1] and ran.shared:
                known[-1] = (known[-1][0], max(known[-1][1], ran.end))
            else:
                known.append((ran.start, ran.end))
    return spans
