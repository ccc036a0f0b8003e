"""Tables of text with one line for each row, for lists longer than a screen. Imports nothing of gpuherd.

In a narrow window the least useful columns are left out first; only then are words shortened, ids in their middle,
where two of them differ least. Output to a pipe or a file is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

GAP = "  "
_ELLIPSIS = "…"
# This percentage of ids is shown whole before another column gets room: one endless id does not displace all columns.
_WHOLE_PERCENT = 99


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: the text above it.
        rank: how useful it is; the lowest stays longest.
        least: its smallest width in cells; None: it is shown whole (for ids: nearly all of them) or not at all.
        middle: its words are ids, which are shortened in the middle and not at the end.
        right: its words are aligned to the right.
    """

    heading: str
    rank: int
    least: int | None = None
    middle: bool = False
    right: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """The lines of a table, the heading first, and the headings of columns without room."""

    lines: tuple[str, ...]
    left_out: tuple[str, ...]

    def show(self, console: Console) -> None:
        """Prints the lines, the heading in bold."""
        from rich.text import Text

        console.print(Text(self.lines[0], style="bold"), soft_wrap=True)
        console.print(Text("\n".join(self.lines[1:])), soft_wrap=True)

    def show_left_out(self, console: Console) -> None:
        """Prints which columns have no room, if any."""
        from rich.text import Text

        if self.left_out:
            console.print(Text(f"no room for {', '.join(self.left_out)}: a wider window or --json shows them"))


def window(console: Console) -> int | None:
    """The terminal's width in cells; None for output that is no terminal, whose lines may have any width."""
    return console.width if console.is_terminal else None


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Fitted:
    """The table in ``width`` cells; None for as many as it needs. Each row has one printable word for each column.

    >>> columns = (Column("model", 0, middle=True), Column("base", 2, least=4), Column("GPUs", 1, right=True))
    >>> fitted(columns, [("an-org/a-model", "an-org/its-base", "8")], 20)
    Fitted(lines=('model           GPUs', 'an-org/a-model     8'), left_out=('base',))
    """
    lengths = [sorted(_cells(row[number]) for row in rows) for number in range(len(columns))]
    widths = _widths(columns, lengths, width)
    kept = [number for number in range(len(columns)) if widths[number] is not None]
    lines = []
    for words in ([column.heading for column in columns], *rows):
        parts = [_part(words[number], columns[number], widths[number] or 0) for number in kept]
        lines.append(GAP.join(parts).rstrip())
    return Fitted(
        tuple(lines), tuple(column.heading for column, cells in zip(columns, widths, strict=True) if not cells)
    )


def _widths(columns: Sequence[Column], lengths: Sequence[Sequence[int]], width: int | None) -> list[int | None]:
    """The width of each column, None for one that is left out."""
    natural = [max([len(column.heading), *found[-1:]]) for column, found in zip(columns, lengths, strict=True)]
    if width is None:
        return list(natural)
    wanted = [_least_width(column, found, most) for column, found, most in zip(columns, lengths, natural, strict=True)]
    by_rank = sorted(range(len(columns)), key=lambda number: columns[number].rank)
    given: dict[int, int] = {}
    left = width + len(GAP)
    for number in by_rank:
        if not given or wanted[number] + len(GAP) <= left:
            given[number] = min(wanted[number], max(left - len(GAP), 1))
            left -= given[number] + len(GAP)
    # Spare cells go to the columns that can use them, the most useful first.
    for number in by_rank:
        if number in given:
            more = min(left, natural[number] - given[number])
            given[number] += more
            left -= more
    return [given.get(number) for number in range(len(columns))]


def _least_width(column: Column, lengths: Sequence[int], natural: int) -> int:
    """The smallest width at which the column is worth showing."""
    if column.middle and column.least is None and lengths:
        return max(len(column.heading), lengths[(len(lengths) - 1) * _WHOLE_PERCENT // 100])
    return natural if column.least is None else min(natural, max(column.least, len(column.heading)))


def _part(word: str, column: Column, width: int) -> str:
    """The word in exactly ``width`` cells."""
    word = shortened(word, width, middle=column.middle)
    blank = " " * (width - _cells(word))
    return blank + word if column.right else word + blank


def shortened(word: str, width: int, *, middle: bool) -> str:
    """The word in at most ``width`` cells, with an ellipsis in its middle or at its end.

    >>> shortened("meta-llama/Meta-Llama-3-8B-Instruct", 20, middle=True)
    'meta-llama…-Instruct'
    """
    if _cells(word) <= width:
        return word
    room = width - 1
    tail = room // 2 if middle else 0
    head = _beginning(word, room - tail)
    return head + _ELLIPSIS + _beginning(word[::-1], tail)[::-1]


def _beginning(word: str, width: int) -> str:
    cells = 0
    for position, sign in enumerate(word):
        cells += _cells(sign)
        if cells > width:
            return word[:position]
    return word


def _cells(word: str) -> int:
    """The width of the word in cells of a terminal: two for a Chinese sign."""
    if word.isascii():
        return len(word)
    from rich.cells import cell_len

    return cell_len(word)
