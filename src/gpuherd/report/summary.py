"""The table that a run ends with: a line a model, the failures with their reasons, and where the results are.

Built from plain rows; knows neither experiments nor the queue. It fits in 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MOST_FAILURES = 20
MOST_MODELS = 60


@dataclass(frozen=True, slots=True)
class SummaryLine:
    """A model that is done: layers with a fit, layers without one, alpha over the former, seconds and GPUs of its
    last attempt (None and "" where they are not known; "CPU" for a job without a GPU)."""

    model: str
    layers: int
    without_fit: int
    alpha_mean: float | None
    alpha_min: float | None
    alpha_max: float | None
    seconds: float | None
    gpus: str


@dataclass(frozen=True, slots=True)
class FailureLine:
    """A model that is not done: its name, or the row of a list, and why in one sentence."""

    model: str
    reason: str


def print_summary(
    console: Console,
    done: Sequence[SummaryLine],
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
        console.print(Text.assemble(("  failed  ", "red"), f"{failure.model}: {failure.reason}"))
    if len(failures) > MOST_FAILURES:
        console.print(Text(f"  … and {len(failures) - MOST_FAILURES} more"))
    width = max((len(what) for what, _ in places), default=0)
    for what, where in places:
        # One path a line, never broken: it is there to be copied.
        console.print(Text(f"{what:<{width}}  {where}"), soft_wrap=True)


def models_table(done: Sequence[SummaryLine]) -> Table:
    """The table of models that are done: ``alpha`` is its mean over the layers, ``min`` and ``max`` are its range."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold", ratio=1)
    for name in ("layers", "alpha", "min", "max", "time", "GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in done:
        layers = f"{line.layers}" if not line.without_fit else f"{line.layers} of {line.layers + line.without_fit}"
        alphas = (line.alpha_mean, line.alpha_min, line.alpha_max)
        table.add_row(
            Text(line.model), layers, *(figure(alpha) for alpha in alphas), duration(line.seconds), Text(line.gpus)
        )
    return table


def figure(value: float | None) -> str:
    """Three decimals, ``-`` for no value."""
    return "-" if value is None else f"{value:.3f}"


def duration(seconds: float | None) -> str:
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
