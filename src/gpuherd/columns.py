"""Tables of text with a line a row, for lists that are longer than a screen. Pure; imports nothing of gpuherd.

In a narrow window the least useful columns are left out first; only then is a word shortened, an id in its middle,
where two of them differ least. Where nobody sees a window (a pipe, a file) all is written in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

GAP = "  "
_ELLIPSIS = "…"
# So many of a hundred ids are whole before another column gets room: a single endless one does not push all out.
_WHOLE_PERCENT = 99


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: what stands above it.
        rank: how useful it is; the lowest stays longest.
        least: cells that it can do with; None: it is shown whole (for ids: nearly all of them) or not at all.
        middle: it holds ids, which are shortened in the middle and not at the end.
        right: its words end, and do not begin, below each other.
    """

    heading: str
    rank: int
    least: int | None = None
    middle: bool = False
    right: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """The lines of a table, the heading first, and the headings of the columns for which there was no room."""

    lines: tuple[str, ...]
    left_out: tuple[str, ...]


def window(console: Console) -> int | None:
    """The cells that a line may have; None where the output is no terminal and a line may have any number."""
    return console.width if console.is_terminal else None


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Fitted:
    """The table in ``width`` cells; None for as many as it needs. Each row has a word a column, all of them printable.

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
    """The cells of each column, None for one that is left out."""
    natural = [max([len(column.heading), *found[-1:]]) for column, found in zip(columns, lengths, strict=True)]
    if width is None:
        return list(natural)
    wanted = [_wanted(column, found, most) for column, found, most in zip(columns, lengths, natural, strict=True)]
    by_rank = sorted(range(len(columns)), key=lambda number: columns[number].rank)
    given: dict[int, int] = {}
    left = width + len(GAP)
    for number in by_rank:
        if not given or wanted[number] + len(GAP) <= left:
            given[number] = min(wanted[number], max(left - len(GAP), 1))
            left -= given[number] + len(GAP)
    # What is left over goes to those that can use it, the most useful first.
    for number in by_rank:
        if number in given:
            more = min(left, natural[number] - given[number])
            given[number] += more
            left -= more
    return [given.get(number) for number in range(len(columns))]


def _wanted(column: Column, lengths: Sequence[int], natural: int) -> int:
    """The cells without which the column is not worth showing."""
    if column.middle and column.least is None and lengths:
        return max(len(column.heading), lengths[(len(lengths) - 1) * _WHOLE_PERCENT // 100])
    return natural if column.least is None else min(natural, max(column.least, len(column.heading)))


def _part(word: str, column: Column, width: int) -> str:
    """The word in exactly so many cells."""
    word = shortened(word, width, middle=column.middle)
    blank = " " * (width - _cells(word))
    return blank + word if column.right else word + blank


def shortened(word: str, width: int, *, middle: bool) -> str:
    """The word in at most ``width`` cells, with an ellipsis in its middle or at its end for what is left out.

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
    """The cells of a terminal that the word takes: two for a Chinese sign."""
    if word.isascii():
        return len(word)
    from rich.cells import cell_len

    return cell_len(word)
