"""Tables of a run of models: what a dry run would do, and what a run ends with. Built from plain rows.

Knows neither experiments nor the queue. Each table fits in 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuherd.columns import Column, fitted, window
from gpuherd.errors import printable

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
    """A model that is not done: its name, or the row of a list; why in one sentence; and whether it was refused before
    anything was started."""

    model: str
    reason: str
    refused: bool = False


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
        word = "refused" if failure.refused else "failed"
        console.print(Text.assemble((f"  {word:<7}  ", "red"), f"{failure.model}: {failure.reason}"))
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


# ---- before a run


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A model of the list. ``size_bytes``, ``matrices`` (how many are analysed) and ``share`` (of all weights, 0 to 1)
    are None where they are not known before a download; ``state`` is "to do" or "done"; ``asks``: for what its job
    would ask a cluster, None on this machine."""

    model: str
    relation: str
    base: str | None
    size_bytes: int | None
    matrices: int | None
    share: float | None
    gpus: int
    state: str
    asks: str | None = None


_COLUMNS = (
    Column("model", 0, middle=True),
    Column("relation", 3, least=9),
    Column("size", 4, right=True),
    Column("matrices", 5, right=True),
    Column("of weights", 6, right=True),
    Column("GPUs", 7, right=True),
    Column("state", 1),
    Column("base", 2, least=16, middle=True),
)


def print_plan(console: Console, lines: Sequence[PlanLine], refused: Sequence[str], headline: str) -> None:
    """Prints a line a model, a line for each refused row, and the headline."""
    if lines:
        table = fitted(_COLUMNS, [_plan_cells(line) for line in lines], window(console))
        table.show(console)
        console.print()
        table.show_left_out(console)
    for sentence in refused:
        console.print(Text.assemble(("refused  ", "red"), sentence), soft_wrap=True)
    console.print(Text(headline), soft_wrap=True)


def _plan_cells(line: PlanLine) -> tuple[str, ...]:
    base = "-" if line.base is None else printable(line.base)
    relation = printable(line.relation) or "-"
    matrices = "-" if line.matrices is None else str(line.matrices)
    share = "-" if line.share is None else f"{line.share:.1%}"
    return (printable(line.model), relation, size(line.size_bytes), matrices, share, str(line.gpus), line.state, base)


def size(nbytes: int | None) -> str:
    """Bytes as people read them, in powers of 1024; ``-`` where it is not known."""
    if nbytes is None:
        return "-"
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"
