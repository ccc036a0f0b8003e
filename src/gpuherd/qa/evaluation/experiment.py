"""One evaluation from a run's name to its result: opens, reads, calculates. Writes nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuherd.jobs.run_dir import safe_name
from gpuherd.qa.evaluation.config import EvaluateOptions
from gpuherd.qa.evaluation.evaluating import evaluate
from gpuherd.qa.evaluation.reading import Read, read
from gpuherd.qa.evaluation.result import Evaluation
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.measures.registry import measures
from gpuherd.qa.runs import Run, open_run
from gpuherd.runs.spec import versions


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A result, and the folder of the run that it is of."""

    folder: QADirectory
    run: Run
    result: Evaluation


def evaluated(run_id: str, options: EvaluateOptions) -> Evaluated:
    """Evaluates a run. Shows a bar on standard error when that takes long. Raises as ``open_run`` and ``read``."""
    from rich.console import Console

    from gpuherd.runs.console import track

    console = Console(stderr=True)

    def tracked(names: Sequence[str], title: str) -> Iterable[str]:
        return track(console, names, title)

    run = open_run(run_id, options.runs_dir)
    found = read(run, options, console)
    result = Evaluation(
        name=safe_name(options.name or found.identity[:8]),
        run_id=run.run_id,
        scoring=found.scoring.name,
        eos=found.scoring.eos,
        answers_sha256=run.answers_sha256,
        settings=found.settings,
        judges=evaluate(found.asked, found.settings, tracked),
        measured=_measured(found),
        versions=versions("numpy", "scipy"),
        identity=found.identity,
    )
    return Evaluated(run.folder, run, result)


def _measured(found: Read) -> dict[str, dict[str, str]]:
    summaries = {each.name: each.summary for each in measures()}
    return {
        each.name: {"source": each.source, "summary": summaries.get(each.name, "")}
        for each in found.scoring.measures
        if each.name in found.asked.scored.columns
    }
