"""A table on standard output, in the width of the terminal. Knows no table."""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.columns import Column, fitted, window


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Prints the heading and a line a row; each row has a word a column, all of them printable."""
    from rich.console import Console

    for line in fitted(columns, rows, window(Console())).lines:
        print(line)
