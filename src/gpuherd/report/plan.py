"""What ``--dry-run`` prints: a table of what would run or is done, and the refused rows with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from gpuherd.columns import Column, fitted, window
from gpuherd.errors import printable


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
        table = fitted(_COLUMNS, [_words(line) for line in lines], window(console))
        table.show(console)
        console.print()
        table.show_left_out(console)
    for sentence in refused:
        console.print(Text.assemble(("refused  ", "red"), sentence), soft_wrap=True)
    console.print(Text(headline), soft_wrap=True)


def _words(line: PlanLine) -> tuple[str, ...]:
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
