"""Puts the summary of a run folder together from the queue and the stats files.

A model counts only when both agree: its job is done and its file is there. The summary is built anew each time, so
that it can never be behind or ahead of them.
"""

from __future__ import annotations

import csv
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.atomic import atomic_write
from gpuherd.errors import BadModel
from gpuherd.esd.conventions import as_text, differing, recorded, told
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.plan import PlannedModel, job_name, result_file
from gpuherd.esd.schema import LINEAGE_COLUMNS
from gpuherd.esd.selection import stored_share
from gpuherd.esd.views import (
    ModelSummary,
    read_table,
    summarise,
    table_text,
)
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptState
from gpuherd.runs.files import raising_cannot_write

logger = logging.getLogger(__name__)


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
    """A model that is done but whose file can't stand beside the others, and why as a sentence: it was made by another
    convention, or can't be read."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a folder holds: the models that are done, and those whose figures must not stand beside them."""

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


def gather(directory: ESDDirectory, models: Sequence[tuple[Job, PlannedModel]]) -> Gathered:
    """The models that are done, in the order of ``models``."""
    done = done_jobs(directory)
    with Queue(directory.queue) as queue:
        made = {row.job: row for row in queue.attempts() if row.state is AttemptState.DONE}
    results, others = [], []
    for job, planned in models:
        if job.name not in done:
            continue
        if not is_done(job, done):
            reason = "a worker of an earlier run, with other options, was still at work; the same command makes it anew"
            others.append(OtherResult(planned.row.model_id, reason))
            continue
        try:
            summary = _summary_of(directory, planned.row.model_id, planned.row.extra)
        except BadModel as problem:
            others.append(OtherResult(planned.row.model_id, f"{problem}; remove it to make it anew"))
            continue
        attempt = made.get(job.name)
        seconds, gpus = (None, ()) if attempt is None else (attempt.run_s, attempt.gpus)
        results.append(ModelResult(summary, result_file(directory, planned.row), seconds, gpus))
    found = _of_one_convention(results, recorded(directory))
    return Gathered(found.results, (*found.others, *others))


def _of_one_convention(results: Sequence[ModelResult], ours: Mapping[str, str] | None) -> Gathered:
    """The results of one convention, and the others: a worker run by hand can have replaced a file.

    The convention is the run's own; where no result has that (the workers were given other words), the commonest.
    """
    conventions = Counter(_convention_of(result.summary) for result in results)
    if len(conventions) < 2:
        return Gathered(tuple(results), ())
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
        reason = f"{result.stats} was replaced by a file made with {told(theirs, names)}; remove it to make it anew"
        others.append(OtherResult(result.summary.lineage["model_id"], reason))
    return Gathered(tuple(kept), tuple(others))


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
    rows = []
    for old in _read_or_nothing(directory.summary):
        model_id = old.get("model_id", "")
        if model_id in present or job_name(model_id) not in done:
            continue
        try:
            summary = _summary_of(directory, model_id, {})
        except BadModel as problem:
            logger.warning("left out of the summary: %s", problem)
            continue
        if dict(_convention_of(summary)) == convention:
            own = summary.columns()
            extra = {name: text for name, text in old.items() if name not in own}
            rows.append({name: own[name] for name in LINEAGE_COLUMNS} | extra | own)
    return rows


def _convention_of(summary: ModelSummary) -> tuple[tuple[str, str], ...]:
    """What two rows must share to stand in one table; another version of gpuherd may."""
    return tuple(as_text(summary.convention).items())


def _summary_of(directory: ESDDirectory, model_id: str, extra: Mapping[str, str]) -> ModelSummary:
    """The summary of a model's stats file. Raises BadModel when that is not there, or is no such file."""
    stats = directory.stats_file(model_id)
    try:
        rows = read_table(stats)
        if not rows:
            raise BadModel(f"{stats} has no rows")
        return summarise(rows, extra, stored_share(directory.coverage_file(model_id)))
    except KeyError as missing:
        raise BadModel(f"{stats} is no stats file of this gpuherd: it has no column {missing}") from None
    except (OSError, ValueError, csv.Error) as problem:
        raise BadModel(f"{stats} can't be read as a stats file of this gpuherd: {problem}") from None


def _read_or_nothing(path: Path) -> list[dict[str, str]]:
    try:
        return read_table(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as problem:
        logger.warning("%s can't be read and is left out: %s", path, problem)
        return []
