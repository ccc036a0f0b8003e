"""How a scoring is told on a terminal: what would be measured, the table of measures, and what was left out. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.columns import Column, fitted, window
from gpuherd.qa.folder import DEFAULT_RUNS_DIR
from gpuherd.qa.measures.evidence import Need

if TYPE_CHECKING:
    from rich.console import Console

    from gpuherd.jobs.feasibility import Outlook
    from gpuherd.qa.runs import Run
    from gpuherd.qa.scoring.measuring import Measuring
    from gpuherd.qa.scoring.options import Choice
    from gpuherd.qa.scoring.score import ScoreOutcome

_COLUMNS = (
    Column("measure", 0),
    Column("questions", 1, right=True),
    Column("lowest", 4, right=True),
    Column("median", 3, right=True),
    Column("highest", 5, right=True),
    Column("undefined", 2, least=12),
)


def plan_lines(choice: Choice, missing: Sequence[Measuring], outlook: Outlook) -> list[str]:
    """What would be computed, and what would be measured first."""
    families = Counter(each.name.partition(":")[0] for each in choice.measures)
    names = [name if number == 1 else f"{name} ({number})" for name, number in families.items()]
    count = "1 measure" if len(choice.measures) == 1 else f"{len(choice.measures)} measures"
    lines = [f"{count}: {', '.join(names)}"]
    lines += [
        f"{need}: {source.said}"
        for need, source in sorted(choice.sources.items())
        if need not in (Need.GREEDY, Need.SAMPLES)
    ]
    for work in missing:
        jobs = "1 job" if len(work.shards) == 1 else f"{len(work.shards)} jobs"
        lines.append(f"to measure: {work.spec.name} by {work.model}: {jobs}, each {work.asks.sentence}")
    return [*lines, *outlook.lines, "nothing was started"]


def score_lines(console: Console, run: Run, outcome: ScoreOutcome) -> list[str]:
    """The measures with their ranges; remarks; where the table is."""
    meta, table = outcome.meta, outcome.scores
    if meta is None or table is None:
        return []
    rows = []
    for each in meta.measures:
        values = sorted(value for value in table.columns[each.name] if value is not None)
        undefined = "; ".join(f"{number}: {why}" for why, number in each.undefined.items())
        rows.append((each.name, str(each.defined), *map(_figure, _range(values)), undefined))
    lines = list(fitted(_COLUMNS, rows, window(console)).lines)
    lines += [f"{need}: {said}" for need, said in meta.statistics.items() if said != "answers"]
    if meta.span != "both":
        lines.append(f"span: {meta.span}, of texts and tokens")
    lines.append(f"end token: {'counted' if meta.eos == 'include' else 'left out'}")
    lines += [f"note: {remark}" for remark in outcome.remarks]
    lines.append(f"scoring {meta.name}: {run.folder.scoring(meta.name, '.csv')}")
    return [*lines, f"next: gpuherd evaluate {run.run_id} --judge J --scores {meta.name}{_where(run)}"]


def left_out_lines(left_out: Sequence[tuple[str, str]]) -> list[str]:
    """The measures that can't be computed, those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in left_out:
        by_reason.setdefault(why, []).append(name)
    return [f"left out: {_some(names)}: {why}" for why, names in by_reason.items()]


def _where(run: Run) -> str:
    """The option that says where the run is, where it is not in the usual place."""
    place = run.folder.root.parent
    return "" if place == Path(DEFAULT_RUNS_DIR).absolute() else f" --runs-dir {shlex.quote(str(place))}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _range(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Lowest, median, highest; None of no values."""
    if not values:
        return None, None, None
    middle = len(values) // 2
    median = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
    return values[0], median, values[-1]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
