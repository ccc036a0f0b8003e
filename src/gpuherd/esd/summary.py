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
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuherd.atomic import atomic_write
from gpuherd.errors import BadModelList, UsageError
from gpuherd.esd.folder import ESDDirectory, as_text, differing, earlier_run, format_convention, recorded
from gpuherd.esd.model_list import read_model_list
from gpuherd.esd.plan import PlannedModel, job_name
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
    """A model's row in the summary, and of a run that made it how.

    Attributes:
        stats: its stats file.
        lineage: LINEAGE_COLUMNS.
        figures: the columns ``layers`` (matrices with a fit; only these count below), ``layers_without_fit`` (analysed,
            but without a valid fit), ``layers_skipped`` (not analysed, as embeddings are by default),
            ``layers_alpha_below_2`` and ``_above_6``, ``params`` (weights in all analysed matrices), ``params_share``
            (of the model's weights, biases and norms too, tied ones once, those in matrices with a fit, 0 to 1; None
            where there is no coverage table), ``alpha_median``, then of each metric ``<metric>_mean``, ``_std`` (of a
            sample; None for a single layer), ``_min``, ``_max``.
        convention: CONVENTION_COLUMNS.
        extra: the further columns of the list. One with the name of one of ours is called ``list_<name>``.
        seconds: of the attempt that made it; None where that is not known, or the machine was restarted meanwhile.
        gpus: of that attempt; empty for the CPU.
    """

    stats: Path
    lineage: Mapping[str, str]
    figures: Mapping[str, Any]
    convention: Mapping[str, str]
    extra: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    gpus: tuple[str, ...] = ()

    @property
    def model_id(self) -> str:
        """As the model list has it."""
        return self.lineage["model_id"]

    def columns(self) -> dict[str, Any]:
        """All cells, in order."""
        own = {**self.figures, **self.convention}
        taken = own.keys() | self.lineage.keys()
        extra = {f"list_{name}" if name in taken else name: text for name, text in self.extra.items()}
        return dict(self.lineage) | extra | own


def summarise(model: ModelTable, stats: Path, params_share: float | None = None) -> ModelSummary:
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
    figures: dict[str, Any] = {
        "layers": len(alphas),
        "layers_without_fit": sum(analysed) - len(alphas),
        "layers_skipped": len(analysed) - sum(analysed),
        "layers_alpha_below_2": sum(alpha < OVERTRAINED for alpha in alphas),
        "layers_alpha_above_6": sum(alpha > UNDERTRAINED for alpha in alphas),
        "params": sum(params for params, is_one in zip(model.params, analysed, strict=True) if is_one),
        "params_share": params_share,
        "alpha_median": statistics.median(alphas) if alphas else None,
    }
    for name, values in model.figures.items():
        found: list[float] = values[fitted & ~np.isnan(values)].tolist()
        figures |= _statistics(name, list(map(int, found)) if kind_of_column(name) == "int" else found)
    lineage = {name: model.about[name] for name in LINEAGE_COLUMNS}
    return ModelSummary(stats, lineage, figures, {name: model.convention[name] for name in CONVENTION_COLUMNS})


def _statistics(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Mean, sample standard deviation, least and largest of one metric; None where there is no such value."""
    if not values:
        return {f"{name}_{kind}": None for kind in ("mean", "std", "min", "max")}
    count = len(values)
    # Divided first, so that no sum overflows; the quotients of the smallest numbers are 0, which is no mean of theirs.
    mean = min(max(math.fsum([value / count for value in values]), min(values)), max(values))
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
            found[path] = summarise(model, path, stored_share(directory.coverage / f"{model.stem}.csv"))
        except ValueError as problem:
            found[path] = f"{path} is no stats file of this gpuherd: {problem}"
    return found


# ---- of a run


@dataclass(frozen=True, slots=True)
class FailureLine:
    """A model that is not done, or is but can't be in one table with the others: its name, or the row of a list; why in
    one sentence; and whether it was refused before anything was started."""

    model: str
    reason: str
    refused: bool = False


class GatheredModels(NamedTuple):
    """What a folder holds: the models that are done, and those whose figures must not be in one table with them."""

    results: tuple[ModelSummary, ...] = ()
    others: tuple[FailureLine, ...] = ()


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
    ours = [
        (job, planned.row, directory.stats_file(planned.row.model_id)) for job, planned in models if job.name in done
    ]
    good = [stats for job, _, stats in ours if is_done(job, done)]
    summaries = summaries_of(directory, read_tables(directory, good))
    results, others = [], []
    for job, row, stats in ours:
        if not is_done(job, done):
            reason = "a worker of an earlier run, with other options, was still at work; the same command makes it anew"
            others.append(FailureLine(row.model_id, reason))
        elif isinstance(summary := summaries[stats], str):
            others.append(FailureLine(row.model_id, f"{summary}; remove it to make it anew"))
        else:
            attempt = made.get(job.name)
            seconds, gpus = (None, ()) if attempt is None else (attempt.run_s, attempt.gpus)
            results.append(replace(summary, extra=row.extra, seconds=seconds, gpus=gpus))
    found = _of_one_convention(results, recorded(directory))
    return GatheredModels(found.results, (*found.others, *others))


def _of_one_convention(results: Sequence[ModelSummary], ours: Mapping[str, str] | None) -> GatheredModels:
    """The results of one convention, and the others: a worker run by hand can have replaced a file.

    The convention is the run's own; where no result has that (the workers were given other words), the commonest.
    """
    conventions = Counter(tuple(as_text(result.convention).items()) for result in results)
    common = dict(conventions.most_common(1)[0][0]) if conventions else {}
    if ours is not None and any(dict(each) == ours for each in conventions):
        common = dict(ours)
    kept, others = [], []
    for result in results:
        theirs = as_text(result.convention)
        if names := differing(theirs, common):
            made_with = format_convention(theirs, names)
            reason = f"{result.stats} was replaced by a file made with {made_with}; remove it to make it anew"
            others.append(FailureLine(result.model_id, reason))
        else:
            kept.append(result)
    return GatheredModels(tuple(kept), tuple(others))


def write_summary(directory: ESDDirectory, results: Sequence[ModelSummary]) -> None:
    """Writes ``esd_results_summary.csv``: ``results``, and the models of earlier lists that were done in this folder.

    Without any model the file is removed, so that it never shows what is not there. Raises CannotWrite.
    """
    rows = [result.columns() for result in results] + _earlier_rows(directory, results)
    with raising_cannot_write(directory.summary):
        if rows:
            atomic_write(directory.summary, table_text(rows).encode("utf-8"))
        else:
            directory.summary.unlink(missing_ok=True)


def _earlier_rows(directory: ESDDirectory, results: Sequence[ModelSummary]) -> list[dict[str, object]]:
    """Rows of the present summary whose models are not in this list but are done here by the same convention (that of
    the folder's record, where nothing of this list is done).

    Their figures come from their stats files; only the extra columns of their list come from the old summary.
    """
    convention = as_text(results[0].convention) if results else recorded(directory)
    present = {result.model_id for result in results}
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
        elif as_text(summary.convention) == convention:
            rows.append(with_extra_of(summary, old))
    return rows


def with_extra_of(summary: ModelSummary, old: Mapping[str, str]) -> dict[str, object]:
    """The cells of a model's row; the extra columns of its list come from its row in an older summary."""
    own = summary.columns()
    extra = {name: text for name, text in old.items() if name not in own}
    return {name: own[name] for name in LINEAGE_COLUMNS} | extra | own


def rows_of_all(directory: ESDDirectory, summaries: Iterable[ModelSummary]) -> list[dict[str, object]]:
    """The rows of a summary that is made again from all results of a folder: of the models of the folder's convention
    and, where it has a queue, whose jobs are done.

    They come in the order of the present summary, then in that of the queue, then by id. Extra columns are those of the
    present summary; of a model that is not in it, those of the run's list, as far as that can still be read.
    """
    old = {row.get("model_id", ""): row for row in rows_of_summary(directory)}
    found = {summary.model_id: summary for summary in summaries}
    if directory.queue.exists():
        by_job = {job_name(model_id): model_id for model_id in found}
        found = {by_job[name]: found[by_job[name]] for name in done_jobs(directory) if name in by_job}
    results = [found[model_id] for model_id in dict.fromkeys((*old, *found)) if model_id in found]
    extra = {} if found.keys() <= old.keys() else _extra_of_list(directory)
    return [
        with_extra_of(result, old[result.model_id])
        if result.model_id in old
        else replace(result, extra=extra.get(result.model_id, {})).columns()
        for result in _of_one_convention(results, recorded(directory)).results
    ]


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


# ---- as a table at the end of a run, in 80 columns

MOST_FAILURES = 20
MOST_MODELS = 60


def print_summary(
    console: Console,
    done: Sequence[ModelSummary],
    failures: Sequence[FailureLine],
    places: Sequence[tuple[str, str]],
    headline: str,
) -> None:
    """Prints the table, then ``headline`` (the counts), the failures and ``places`` (what is where).

    Lists longer than fits a screen or two are cut with a note; the files have all of it.
    """
    if done:
        console.print(models_table(done[:MOST_MODELS]))
    if len(done) > MOST_MODELS:
        console.print(Text(f"… and {len(done) - MOST_MODELS} more models"))
    console.print(Text(headline))
    for failure in failures[:MOST_FAILURES]:
        word = "refused" if failure.refused else "failed"
        console.print(Text.assemble((f"  {word:<7}  ", "red"), f"{failure.model}: {failure.reason}"))
    if len(failures) > MOST_FAILURES:
        console.print(Text(f"  … and {len(failures) - MOST_FAILURES} more"))
    width = max((len(what) for what, _ in places), default=0)
    for what, where in places:
        # One path a line, never broken: it is there to be copied.
        console.print(Text(f"{what:<{width}}  {where}"), soft_wrap=True)


def models_table(done: Sequence[ModelSummary]) -> Table:
    """The table of models that are done: ``alpha`` is its mean over the layers, ``min`` and ``max`` are its range."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold", ratio=1)
    for name in ("layers", "alpha", "min", "max", "time", "GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in done:
        layers, without = each.figures["layers"], each.figures["layers_without_fit"]
        alphas = [format_figure(each.figures.get(f"alpha_{kind}")) for kind in ("mean", "min", "max")]
        counts = f"{layers} of {layers + without}" if without else f"{layers}"
        table.add_row(
            Text(each.model_id), counts, *alphas, format_duration(each.seconds), Text(", ".join(each.gpus) or "CPU")
        )
    return table


def format_figure(value: float | None) -> str:
    """Three decimals, ``-`` for no value."""
    return "-" if value is None else f"{value:.3f}"


def format_duration(seconds: float | None) -> str:
    """Seconds as people say them: ``0.8 s``, ``41 s``, ``3:20 min``, ``2:05 h``; ``-`` for no value."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
