"""The summary of a folder, a row a model: from the queue and the results, built anew each time.

A model counts only where both agree: its job is done and its stats file is there. So the summary can never be behind
or ahead of them.
"""

from __future__ import annotations

import csv
import logging
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.errors import BadModelList, UsageError
from gpuherd.esd.folder import ESDDirectory, as_text, differing, earlier_run, format_convention, recorded
from gpuherd.esd.model_list import read_model_list
from gpuherd.esd.plan import PlannedModel, job_name, result_file
from gpuherd.esd.results import ModelTable, Unreadable, read_tables
from gpuherd.esd.schema import CONVENTION_COLUMNS, LINEAGE_COLUMNS, kind_of_column
from gpuherd.esd.selection import stored_share
from gpuherd.esd.views import FIT_OK, SKIPPED, read_table, table_text
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptState
from gpuherd.runs.files import raising_cannot_write

logger = logging.getLogger(__name__)

# Alphas below and above these are read as signs of too much and too little training (Martin & Mahoney).
OVERTRAINED, UNDERTRAINED = 2.0, 6.0


# ---- the row of a model


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model's row in the summary.

    Attributes:
        lineage: the model's own columns (LINEAGE_COLUMNS), then the extra columns of the list.
        layers: matrices with a fit; only these count in ``metrics``.
        without_fit: matrices that were analysed but have no valid fit.
        skipped: matrices that are not analysed, as embeddings are by default.
        params: weights in all analysed matrices.
        params_share: of the model's weights (biases and norms too, tied ones once) those in matrices with a fit, 0 to
            1; None where there is no coverage table.
        overtrained: layers whose alpha is below 2.
        undertrained: layers whose alpha is above 6.
        metrics: ``alpha_median``, then of each metric ``<metric>_mean``, ``_std`` (of a sample; None for a single
            layer), ``_min``, ``_max``.
        convention: CONVENTION_COLUMNS.
    """

    lineage: Mapping[str, str]
    layers: int
    without_fit: int
    skipped: int
    params: int
    params_share: float | None
    overtrained: int
    undertrained: int
    metrics: Mapping[str, float | None]
    convention: Mapping[str, str]
    extra: Mapping[str, str] = field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        """All cells, in order. An extra column with the name of one of ours is called ``list_<name>``."""
        counts = {"layers": self.layers, "layers_without_fit": self.without_fit, "layers_skipped": self.skipped}
        trained = {"layers_alpha_below_2": self.overtrained, "layers_alpha_above_6": self.undertrained}
        weights = {"params": self.params, "params_share": self.params_share}
        own = counts | trained | weights | dict(self.metrics) | dict(self.convention)
        taken = own.keys() | self.lineage.keys()
        extra = {f"list_{name}" if name in taken else name: text for name, text in self.extra.items()}
        return dict(self.lineage) | extra | own


def summarise(model: ModelTable, extra: Mapping[str, str], params_share: float | None = None) -> ModelSummary:
    """A model's summary from its results. Raises ValueError where they lack a column, or a valid fit its alpha."""
    import numpy as np

    missing = next((name for name in CONVENTION_COLUMNS if name not in model.convention), None)
    if missing is not None:
        raise ValueError(f"it has no column {missing!r}")
    fitted = np.array([status == FIT_OK for status in model.status], np.bool_)
    analysed = [not status.startswith(SKIPPED) for status in model.status]
    alphas: list[float] = model.alpha[fitted].tolist()
    if any(map(math.isnan, alphas)):
        raise ValueError("a matrix has no alpha although its fit_status is ok")
    metrics: dict[str, float | None] = {"alpha_median": statistics.median(alphas) if alphas else None}
    for name, values in model.figures.items():
        found: list[float] = values[fitted & ~np.isnan(values)].tolist()
        metrics |= _statistics(name, list(map(int, found)) if kind_of_column(name) == "int" else found)
    return ModelSummary(
        lineage={name: model.about[name] for name in LINEAGE_COLUMNS},
        layers=len(alphas),
        without_fit=sum(analysed) - len(alphas),
        skipped=len(analysed) - sum(analysed),
        params=sum(params for params, is_one in zip(model.params, analysed, strict=True) if is_one),
        params_share=params_share,
        overtrained=sum(alpha < OVERTRAINED for alpha in alphas),
        undertrained=sum(alpha > UNDERTRAINED for alpha in alphas),
        metrics=metrics,
        convention={name: model.convention[name] for name in CONVENTION_COLUMNS},
        extra=extra,
    )


def _statistics(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Mean, sample standard deviation, least and largest of one metric; None where there is no such value."""
    if not values:
        return {f"{name}_{kind}": None for kind in ("mean", "std", "min", "max")}
    count = len(values)
    mean = math.fsum([value / count for value in values])
    std = _sample_deviation([value - mean for value in values])
    return {f"{name}_mean": mean, f"{name}_std": std, f"{name}_min": min(values), f"{name}_max": max(values)}


def _sample_deviation(differences: Sequence[float]) -> float | None:
    """Root of the sum of squares over n - 1; the largest is taken out first, so that no square overflows."""
    if len(differences) < 2:
        return None
    scale = max(map(abs, differences))
    if scale == 0 or not math.isfinite(scale):
        return scale
    return scale * math.sqrt(math.fsum([(d / scale) ** 2 for d in differences]) / (len(differences) - 1))


def summaries_of(directory: ESDDirectory, models: Iterable[ModelTable | Unreadable]) -> dict[Path, ModelSummary | str]:
    """The summary of each model, without extra columns, by its stats file; what is wrong with it in its place."""
    found: dict[Path, ModelSummary | str] = {}
    for model in models:
        if isinstance(model, Unreadable):
            found[model.path] = model.problem
            continue
        path = directory.stats / f"{model.stem}.csv"
        try:
            found[path] = summarise(model, {}, stored_share(directory.coverage / f"{model.stem}.csv"))
        except ValueError as problem:
            found[path] = f"{path} is no stats file of this gpuherd: {problem}"
    return found


# ---- of a run


@dataclass(frozen=True, slots=True)
class ModelResult:
    """A model that is done: its summary, its file, and the seconds and GPUs of the attempt that made it.

    ``gpus`` is empty for the CPU; ``seconds`` is None when the machine was restarted meanwhile.
    """

    summary: ModelSummary
    stats: Path
    seconds: float | None
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OtherResult:
    """A model that is done but whose file can't be in one table with the others, and why as a sentence: it was made by
    another convention, or can't be read."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class GatheredModels:
    """What a folder holds: the models that are done, and those whose figures must not be in one table with them."""

    results: tuple[ModelResult, ...]
    others: tuple[OtherResult, ...]


def done_jobs(directory: ESDDirectory) -> dict[str, str | None]:
    """The jobs of the folder's queue that have succeeded: name to identity, by which they were last submitted."""
    with Queue(directory.queue) as queue:
        states = queue.states()
        return {job.name: job.identity for job in queue.jobs() if states[job.name] is JobState.DONE}


def is_done(job: Job, done: Mapping[str, str | None]) -> bool:
    """Whether this very analysis is among the ``done_jobs``; one of the same model by other options is not it."""
    return job.name in done and done[job.name] == job.identity


def gather(directory: ESDDirectory, models: Sequence[tuple[Job, PlannedModel]]) -> GatheredModels:
    """The models that are done, in the order of ``models``."""
    done = done_jobs(directory)
    with Queue(directory.queue) as queue:
        made = {row.job: row for row in queue.attempts() if row.state is AttemptState.DONE}
    ours = [(job, planned.row, result_file(directory, planned.row)) for job, planned in models if job.name in done]
    good = [stats for job, _, stats in ours if is_done(job, done)]
    summaries = summaries_of(directory, read_tables(directory, good))
    results, others = [], []
    for job, row, stats in ours:
        if not is_done(job, done):
            reason = "a worker of an earlier run, with other options, was still at work; the same command makes it anew"
            others.append(OtherResult(row.model_id, reason))
            continue
        summary = summaries[stats]
        if isinstance(summary, str):
            others.append(OtherResult(row.model_id, f"{summary}; remove it to make it anew"))
            continue
        attempt = made.get(job.name)
        seconds, gpus = (None, ()) if attempt is None else (attempt.run_s, attempt.gpus)
        results.append(ModelResult(replace(summary, extra=row.extra), stats, seconds, gpus))
    found = _of_one_convention(results, recorded(directory))
    return GatheredModels(found.results, (*found.others, *others))


def _of_one_convention(results: Sequence[ModelResult], ours: Mapping[str, str] | None) -> GatheredModels:
    """The results of one convention, and the others: a worker run by hand can have replaced a file.

    The convention is the run's own; where no result has that (the workers were given other words), the commonest.
    """
    conventions = Counter(_convention_of(result.summary) for result in results)
    if len(conventions) < 2:
        return GatheredModels(tuple(results), ())
    common = dict(conventions.most_common(1)[0][0])
    if ours is not None and any(dict(each) == ours for each in conventions):
        common = dict(ours)
    kept, others = [], []
    for result in results:
        theirs = dict(_convention_of(result.summary))
        names = differing(theirs, common)
        if not names:
            kept.append(result)
            continue
        made_with = format_convention(theirs, names)
        reason = f"{result.stats} was replaced by a file made with {made_with}; remove it to make it anew"
        others.append(OtherResult(result.summary.lineage["model_id"], reason))
    return GatheredModels(tuple(kept), tuple(others))


def write_summary(directory: ESDDirectory, results: Sequence[ModelResult]) -> None:
    """Writes ``esd_results_summary.csv``: ``results``, and the models of earlier lists that were done in this folder.

    Without any model the file is removed, so that it never shows what is not there. Raises CannotWrite.
    """
    rows = [result.summary.columns() for result in results] + _earlier_rows(directory, results)
    with raising_cannot_write(directory.summary):
        if rows:
            atomic_write(directory.summary, table_text(rows).encode("utf-8"))
        else:
            directory.summary.unlink(missing_ok=True)


def _earlier_rows(directory: ESDDirectory, results: Sequence[ModelResult]) -> list[dict[str, object]]:
    """Rows of the present summary whose models are not in this list but are done here by the same convention (that of
    the folder's record, where nothing of this list is done).

    Their figures come from their stats files; only the extra columns of their list come from the old summary.
    """
    convention = dict(_convention_of(results[0].summary)) if results else recorded(directory)
    present = {result.summary.lineage["model_id"] for result in results}
    done = done_jobs(directory)
    earlier = {
        directory.stats_file(model_id): old
        for old in rows_of_summary(directory)
        if (model_id := old.get("model_id", "")) not in present and job_name(model_id) in done
    }
    summaries = summaries_of(directory, read_tables(directory, earlier))
    rows = []
    for stats, old in earlier.items():
        summary = summaries[stats]
        if isinstance(summary, str):
            logger.warning("left out of the summary: %s", summary)
        elif dict(_convention_of(summary)) == convention:
            rows.append(with_extra_of(summary, old))
    return rows


def with_extra_of(summary: ModelSummary, old: Mapping[str, str]) -> dict[str, object]:
    """The cells of a model's row; the extra columns of its list come from its row in an older summary."""
    own = summary.columns()
    extra = {name: text for name, text in old.items() if name not in own}
    return {name: own[name] for name in LINEAGE_COLUMNS} | extra | own


def rows_of_all(directory: ESDDirectory, summaries: Mapping[Path, ModelSummary]) -> list[dict[str, object]]:
    """The rows of a summary that is made again from all results of a folder, by their stats files: of the models of the
    folder's convention and, where it has a queue, whose jobs are done.

    They come in the order of the present summary, then in that of the queue, then by id. Extra columns are those of the
    present summary; of a model that is not in it, those of the run's list, as far as that can still be read.
    """
    old = {row.get("model_id", ""): row for row in rows_of_summary(directory)}
    done = list(done_jobs(directory)) if directory.queue.exists() else None
    found = {summary.lineage["model_id"]: (path, summary) for path, summary in summaries.items()}
    if done is not None:
        by_job = {job_name(model_id): model_id for model_id in found}
        found = {by_job[name]: found[by_job[name]] for name in done if name in by_job}
    results = [
        ModelResult(found[model_id][1], found[model_id][0], None, ())
        for model_id in dict.fromkeys((*old, *found))
        if model_id in found
    ]
    extra = {} if all(result.summary.lineage["model_id"] in old for result in results) else _extra_of_list(directory)
    rows = []
    for result in _of_one_convention(results, recorded(directory)).results:
        model_id = result.summary.lineage["model_id"]
        if model_id in old:
            rows.append(with_extra_of(result.summary, old[model_id]))
        else:
            rows.append(replace(result.summary, extra=extra.get(model_id, {})).columns())
    return rows


def _extra_of_list(directory: ESDDirectory) -> dict[str, Mapping[str, str]]:
    """The extra columns of the list that the folder's run was started with, by model; none where there is no such list
    any more."""
    try:
        earlier = earlier_run(directory)
        path = earlier.options.get("model_list")
        rows = () if path is None else read_model_list(earlier.cwd / path).rows
    except (UsageError, BadModelList):
        return {}
    return {row.model_id: row.extra for row in rows}


def _convention_of(summary: ModelSummary) -> tuple[tuple[str, str], ...]:
    """What two rows must share to stand in one table; another version of gpuherd may."""
    return tuple(as_text(summary.convention).items())


def rows_of_summary(directory: ESDDirectory) -> list[dict[str, str]]:
    """The rows of the summary that is there; none where it can't be read, with a warning in the log."""
    path = directory.summary
    try:
        return read_table(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as problem:
        logger.warning("%s can't be read and is left out: %s", path, problem)
        return []
