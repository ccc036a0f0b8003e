"""An experiment from Python, under the names of a guide: ``ParallelJobExecutor`` runs all of it,
``ParallelDataGenerator`` collects the first round's data alone. Both are the command's own way in a few lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.posttrain.algos.interface import Row
from gpuherd.posttrain.config.composing import compose
from gpuherd.posttrain.rounds.experiment import RoundsExperiment, RoundsOutcome
from gpuherd.posttrain.rounds.options import RoundsOptions
from gpuherd.posttrain.rounds.plan import Phase, Step
from gpuherd.posttrain.rounds.rows import read_round
from gpuherd.posttrain.rounds.settings import settings_of
from gpuherd.posttrain.rounds.settling import settled
from gpuherd.qa.working.running import failure_lines


class NotCollected(GpuherdError):
    """A job that was to collect data has failed."""


class ParallelJobExecutor:
    """An experiment of overrides (``experiment.name=first``, ``models=gpt2``) and perhaps a file.

    Args:
        overrides, file: as on the command line.
        options: how jobs run.
        simulate: the GPUs are pretended: all is computed on the CPU.

    Raises UsageError.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        file: str | Path | None = None,
        *,
        options: RoundsOptions | None = None,
        console: Console | None = None,
        simulate: bool = False,
    ):
        settings = settled(settings_of(compose(overrides, file)))
        told = options if options is not None else RoundsOptions()
        self.experiment = RoundsExperiment(settings, told, console=console, simulate=simulate)

    def run(self) -> RoundsOutcome:
        """Runs it to the end, or goes on with a run that was stopped. Raises what ``RoundsExperiment.run`` raises."""
        return self.experiment.run()


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected.

    Attributes:
        rows: of each combination (algorithm, data set, family), in the order of the problems.
        figures: of each job by name: what it took.
    """

    rows: Mapping[tuple[str, str, str], tuple[Row, ...]]
    figures: Mapping[str, Mapping[str, Any]]


class ParallelDataGenerator(ParallelJobExecutor):
    """Collects the first round's data, each GPU a part of the problems. The arguments are those of
    ``ParallelJobExecutor``; run later, that goes on with what was collected here."""

    def generate(self) -> Collected:
        """Collects, or goes on where it was stopped. Raises NotCollected; what ``RoundsExperiment.run`` raises."""
        experiment = self.experiment
        experiment.only = _of_the_first_round
        outcome = experiment.run()
        if outcome.exit_code is not ExitCode.OK:
            told = [] if outcome.jobs is None else failure_lines(outcome.jobs)
            raise NotCollected("; ".join(f"{job}: {reason}" for job, reason in told) or "stopped before all was done")
        return _read(experiment)


def _of_the_first_round(step: Step) -> bool:
    return step.phase is Phase.COLLECT and step.round == 0


def _read(experiment: RoundsExperiment) -> Collected:
    folder = experiment.folder
    steps = [each.step for each in experiment.plan]
    assert experiment.prepared is not None  # noqa: S101 - it has run
    rows = {}
    for step in steps:
        data = folder.data(step.algorithm, step.dataset, step.family, 0)
        paths = [folder.rows(data, shard) for shard in range(step.shards)]
        key = (step.algorithm, step.dataset, step.family)
        if key not in rows:
            rows[key] = read_round(paths, experiment.prepared.problems[step.dataset])
    figures = {
        step.name: json.loads(
            folder.rows_done(folder.data(step.algorithm, step.dataset, step.family, 0), step.shard).read_bytes()
        )
        for step in steps
    }
    return Collected(rows, figures)
