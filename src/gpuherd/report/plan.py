"""The table that ``--dry-run`` prints: what would run, what is done, what is refused and why. Plain rows in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A row of the list. ``size_bytes`` is None where it is not known before a download; ``state`` is "to do",
    "done", or "refused: why"."""

    model: str
    relation: str
    base: str | None
    size_bytes: int | None
    gpus: int
    state: str


def print_plan(console: Console, lines: Sequence[PlanLine], headline: str) -> None:
    """Prints the table and under it the headline."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold", ratio=3)
    table.add_column("relation", overflow="fold")
    table.add_column("base", overflow="fold", ratio=2)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("GPUs", justify="right", no_wrap=True)
    table.add_column("state", overflow="fold", ratio=2)
    for line in lines:
        cells = (line.model, line.relation or "-", line.base or "-", size(line.size_bytes), str(line.gpus), line.state)
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    console.print(Text(headline))


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
