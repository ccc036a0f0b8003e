"""What the page of a run shows: everything that was read of it. Plain frozen data; ``reading`` fills it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuherd.posttrain.evaluation.answered import AnsweredProblem
from gpuherd.posttrain.evaluation.gathering import Gathered, Row

Points = Sequence[tuple[float, float]]  # (step, value), by step


@dataclass(frozen=True, slots=True)
class Training:
    """The figures of one training by step.

    Attributes:
        name: its folder, as people call it.
        steps: how many were logged.
        series: by name of the figure; long ones thinned to means of neighbours.
    """

    name: str
    steps: int
    series: Mapping[str, Points]


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt of a job in time.

    Attributes:
        job: its name.
        phase: "collect", "train", "evaluate", or "" where its name says none.
        lanes: labels of its GPUs; ("CPU",) where it had none.
        start, end: seconds since the first start; ``end`` is None while it runs.
        state: "running", "done", "failed" or "requeued".
        gpus: how many.
    """

    job: str
    phase: str
    lanes: tuple[str, ...]
    start: float
    end: float | None
    state: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that has no result, or an attempt that was made again: of what kind, and why in one sentence."""

    job: str
    kind: str
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """The jobs of a run.

    Attributes:
        bars: in the order of their starts.
        counts: jobs by state.
        failures: final ones first.
        gpu_hours: of all attempts that have ended, by phase; None for a run on CPUs.
        hours: of all attempts that have ended, by algorithm and phase: of GPUs, or on CPUs of jobs.
        left_out: later attempts that have no bar, though they count in all else.
    """

    bars: Sequence[Bar] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[Failure] = ()
    gpu_hours: Mapping[str, float] | None = None
    hours: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Samples:
    """The first problems of a policy's evaluation with their completions."""

    row: Row
    seed: int
    answered: Sequence[AnsweredProblem]


@dataclass(frozen=True, slots=True)
class Shown:
    """A run as its page shows it.

    Attributes:
        title: the run's name.
        facts: what stands at the head: (what, value, the view that tells more or nothing).
        settings: what was asked for: (key, value), in order.
        gathered: all results in tables.
        trainings: in the order of their names.
        timeline: None of a run without a queue.
        samples: a policy at an eta each.
        notes: what a reader must know first.
    """

    title: str
    facts: Sequence[tuple[str, str, str]]
    settings: Sequence[tuple[str, str]]
    gathered: Gathered
    trainings: Sequence[Training] = ()
    timeline: Timeline | None = None
    samples: Sequence[Samples] = ()
    notes: Sequence[str] = ()
