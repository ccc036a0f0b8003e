"""An experiment from Python, under the names of a guide: ``ParallelJobExecutor`` runs all of it,
``ParallelDataGenerator`` collects the first round's data alone. Both are the command's own way in a few lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from gpuherd.engines.options import read_block
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.posttrain.config.composing import compose, said
from gpuherd.posttrain.runs.experiment import RoundsExperiment, RoundsOutcome
from gpuherd.posttrain.runs.folder import RoundsDirectory
from gpuherd.posttrain.runs.options import RoundsOptions
from gpuherd.posttrain.runs.plan import Phase, Step
from gpuherd.posttrain.runs.resuming import resumed
from gpuherd.posttrain.runs.rows import read_round
from gpuherd.posttrain.runs.settings import Settings, settings_of
from gpuherd.posttrain.runs.settling import settled
from gpuherd.posttrain.types import Row
from gpuherd.runs.stage import failure_lines


class NotCollected(GpuherdError):
    """A job that was to collect data has failed."""


def experiment_of(
    words: Sequence[str],
    options: RoundsOptions,
    *,
    console: Console | None = None,
    simulate: bool = False,
    engine_is_said: bool = False,
) -> RoundsExperiment:
    """The experiment that words ask for: a run that goes on (``options.resume``, ``resume_from=DIR``), or a composed
    configuration (``options.config`` and the words over what is shipped).

    ``engine_is_said``: the options have the engine already, whatever the configuration says; else that counts where
    they name none. Raises UsageError, BadRun.
    """
    if options.resume is not None or any(word.startswith("resume_from=") for word in words):
        given = said(words)
        place = options.resume or str(given["resume_from"])
        if str(given.get("resume_from", place)) != place:
            raise UsageError(f"--resume {place} and resume_from={given['resume_from']} name two runs; name one")
        if options.config is not None:
            raise UsageError("resume_from goes on with the configuration of its run; leave --config out")
        folder = RoundsDirectory(place)
        settings = resumed(folder, given).settings
        if not engine_is_said:
            options = _with_engine(options, settings)
        return RoundsExperiment(settings, options, console=console, simulate=simulate, going_on=folder)
    settings = settled(settings_of(compose(words, options.config)))
    if settings.resume_from is not None:
        raise UsageError(f"resume_from={settings.resume_from}: it is a word of its own on the command line")
    if not engine_is_said:
        options = _with_engine(options, settings)
    return RoundsExperiment(settings, options, console=console, simulate=simulate)


def _with_engine(options: RoundsOptions, settings: Settings) -> RoundsOptions:
    return replace(options, **read_block(settings.engine)) if options.engine == LOCAL else options


class ParallelJobExecutor:
    """An experiment from Python.

    Args:
        overrides: the words of the command line: ``experiment.name=first``, ``models=gpt2``, ``resume_from=DIR``.
        options: those of the command line, a file of one's own (``config``) and how jobs run.
        simulate: the GPUs are pretended: all is computed on the CPU.

    Raises UsageError; BadRun for a run to go on with that is none.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        *,
        options: RoundsOptions | None = None,
        console: Console | None = None,
        simulate: bool = False,
    ):
        told = options if options is not None else RoundsOptions()
        self.experiment = experiment_of(overrides, told, console=console, simulate=simulate)

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
        if experiment.options.dry_run or (experiment.goes_on and experiment.folder.done.exists()):
            raise UsageError("there is nothing to collect: with dry_run nothing is started, and a complete run has all")
        experiment.only = _of_the_first_round
        outcome = experiment.run()
        if outcome.exit_code is not ExitCode.OK or (outcome.jobs is not None and not outcome.jobs.complete):
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
