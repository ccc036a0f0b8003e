"""A run of the trained model on a few facts, made once; and statistics measured in the test's own process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.qa import small_models
from tests.qa.generate.conftest import begin_run

from gpuherd.errors import ExitCode
from gpuherd.qa.generate.config import GenerateConfig
from gpuherd.qa.grading.verdicts import Judgment
from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.runs import Run, run_of_path
from gpuherd.qa.scoring import worker
from gpuherd.qa.scoring.options import ScoreOptions, costly_needs, planned_specs
from gpuherd.qa.scoring.score import StatisticStage
from gpuherd.qa.statistics.files import StatisticMeta, StatisticSpec, rows, statistic_named
from gpuherd.qa.statistics.registry import Planning

QUESTIONS, SAMPLES = 12, 4


def make_run(place: Path, model: Path) -> None:
    """Greedy answers and a few samples of the trained model, in ``place/facts``."""
    data = small_models.write_questions(place / "facts.jsonl", QUESTIONS)
    config = GenerateConfig(
        model=str(model), dataset=str(data), runs_dir=str(place), run_id="facts", greedy=True, samples=SAMPLES,
        max_new_tokens=12,
    )  # fmt: skip
    begun = begin_run(config)
    begun.answer()
    begun.finish()


def copy_of(run: Path, place: Path) -> Run:
    """The same run in another folder, for a test that adds to it."""
    return run_of_path(shutil.copytree(run, place / "runs" / run.name))


def specs_of(
    options: ScoreOptions,
    run: Run,
    *,
    needs: frozenset[str] = frozenset(EvidenceNeed),
    labels: Mapping[str, Judgment] | None = None,
) -> dict[str, StatisticSpec]:
    """The statistics that a scoring would measure for these needs, by their names among those planned."""
    requested = needs if options.measures else needs - costly_needs()
    return planned_specs(options, Planning(requested, run, labels))


def begin(run: Run, spec: StatisticSpec, **options: Any) -> tuple[StatisticStage, list[list[str]]]:
    """Everything before the jobs of a statistic, and the words of each of their workers."""
    work = StatisticStage(spec, ScoreOptions(**options), run, list(run.answers()), Console(quiet=True))
    work.begin()
    words = [job.argv for job in work.jobs()]
    assert len(words) == len(work.shards)
    return work, [list(each[each.index(worker.MODULE) + 1 :]) for each in words]


def measured(run: Run, spec: StatisticSpec, **options: Any) -> tuple[StatisticMeta, list[dict[str, Any]]]:
    """The statistic, measured by its workers one after the other in this process."""
    work, words = begin(run, spec, **options)
    for each in words:
        assert worker.main(each) == ExitCode.OK
    work.finish(None)
    meta = statistic_named(run.folder, spec.name, run.answers_sha256)
    return meta, list(rows(run.folder, meta))
