"""Text for a window of some width: words wrapped, bars, commands that can be copied. Pure; knows no plans.

A line is a tuple of spans, each with what it means (``good``, ``bad``, ...); who prints it decides on colours. Nothing
is told by colour alone. All text is printable, whatever stood in a model's name.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpuherd.columns import Column, fitted
from gpuherd.errors import printable

NARROWEST, WIDEST = 40, 200
# Cells of a bar, and of what is said beside it.
_SHORTEST, _LONGEST = 24, 60
_HOLDS = 30

Meaning = Literal["", "good", "bad", "weak", "head", "note", "weights", "state", "cache", "work", "kept", "others"]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a line, and what it means."""

    text: str
    meaning: Meaning = ""


Line = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """What can be shown: cells a line, and whether there are more signs than those of ASCII."""

    width: int = 100
    unicode: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", max(NARROWEST, min(WIDEST, self.width)))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: what it is, its sign, and its sign where there is but ASCII."""

    name: str
    meaning: Meaning
    sign: str
    plain: str

    def drawn(self, window: Window) -> str:
        """Its sign in this window."""
        return self.sign if window.unicode else self.plain


OVER = Part("does not fit", "bad", "!", "!")
FREE = Part("left", "weak", "·", ".")
OTHERS = Part("used by others", "others", "x", "x")


def plain(line: Line) -> str:
    """The line without its meanings."""
    return "".join(span.text for span in line).rstrip()


def wrapped(
    text: str, window: Window, meaning: Meaning = "", *, first: str = "", rest: str | None = None
) -> list[Line]:
    """A sentence in lines, each with an indent: ``first`` and then ``rest`` (as wide a blank if None)."""
    from textwrap import wrap

    after = " " * len(first) if rest is None else rest
    lines = wrap(printable(text), max(12, window.width - max(len(first), len(after))), break_on_hyphens=False)
    return [(Span(first if not number else after), Span(line, meaning)) for number, line in enumerate(lines)]


def command(words: Sequence[str], window: Window, indent: str = "  ") -> list[Line]:
    """A command that can be copied, in as many lines as it takes, joined by backslashes. A word is never cut.

    Words with signs that can't be printed stand in the form that a shell reads back: ``$'a\\nb'``.
    """
    lines: list[str] = []
    room = window.width - len(" \\")
    for word in [_quoted(each) for each in words]:
        if lines and len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append((indent if not lines else f"{indent}    ") + word)
    return [(Span(line + (" \\" if number < len(lines) - 1 else "")),) for number, line in enumerate(lines)]


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + printable(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], window: Window) -> tuple[str, list[Line]]:
    """The head of a table in this window, and its rows. All words are printable."""
    head, *body = fitted(columns, rows, window.width).lines
    if not window.unicode:
        body = [line.replace("…", "~") for line in body]
    return head, [(Span(line),) for line in body]


@dataclass(frozen=True, slots=True)
class Bar:
    """A GPU to be drawn.

    Attributes:
        parts: bytes of each, in order.
        free: bytes that may be used; ``total``: of the GPU. The rest is in use by others.
        figure: how full it is, in words; ``holds``: what lies there.
    """

    label: str
    parts: tuple[tuple[Part, int], ...]
    free: int
    total: int
    figure: str
    holds: str

    def pieces(self) -> list[tuple[Part, int]]:
        """The parts, and what is left, or beyond what may be used, or others'. What does not fit lies over others'."""
        pieces: list[tuple[Part, int]] = []
        at = 0
        for part, size in self.parts:
            fits = max(0, min(size, self.free - at))
            pieces += [(part, fits), (OVER, size - fits)]
            at += size
        pieces += [(FREE, max(0, self.free - at)), (OTHERS, max(0, self.total - max(self.free, at)))]
        return [(part, size) for part, size in pieces if size]


def draw(bars: Sequence[Bar], scale: int, window: Window) -> list[Line]:
    """The bars below each other, as long as there is room for; ``scale``: the bytes that the longest stands for.

    In a wide window a GPU is one line, in others two.
    """
    label = max(len(bar.label) for bar in bars)
    figure = max(len(bar.figure) for bar in bars)
    holds = max(len(bar.holds) for bar in bars)
    frame = label + 2 + 2 + 2 + figure
    if window.width >= frame + _SHORTEST + 2 + min(holds, _HOLDS):
        cells = min(_LONGEST, window.width - frame - 2 - min(holds, _HOLDS))
        return [line for bar in bars for line in _one_line(bar, scale, cells, label, figure, window)]
    if window.width >= frame + _SHORTEST:
        cells = min(_LONGEST, window.width - frame)
        return [line for bar in bars for line in _two_lines(bar, scale, cells, label, figure, window)]
    lines: list[Line] = []
    for bar in bars:
        lines += wrapped(f"{bar.figure}: {bar.holds}", window, first=f"{bar.label:<{label}}  ")
        lines.append(_drawn(bar, scale, window.width - 2, window))
    return lines


def _one_line(bar: Bar, scale: int, cells: int, label: int, figure: int, window: Window) -> list[Line]:
    before = label + 2 + cells + 2 + 2 + figure + 2
    first, *more = wrapped(bar.holds, window, first=" " * before)
    line = (Span(f"{bar.label:<{label}}  "), *_drawn(bar, scale, cells, window), *_figure(bar, figure), Span("  "))
    return [(*line, *first[1:]), *more]


def _two_lines(bar: Bar, scale: int, cells: int, label: int, figure: int, window: Window) -> list[Line]:
    first = wrapped(bar.holds, window, first=f"{bar.label:<{label}}  ")
    return [*first, (Span(" " * (label + 2)), *_drawn(bar, scale, cells, window), *_figure(bar, figure))]


def _figure(bar: Bar, wide: int) -> Line:
    over = sum(size for _, size in bar.parts) > bar.free
    return Span("  "), Span(f"{bar.figure:>{wide}}", "bad" if over else "")


def _drawn(bar: Bar, scale: int, cells: int, window: Window) -> Line:
    """The bar alone, and blanks up to ``cells``."""
    spans: list[Span] = []
    before = drawn = 0
    for part, size in bar.pieces():
        before += size
        end = round(before * cells / scale) if scale else 0
        if end > drawn:
            spans.append(Span(part.drawn(window) * (end - drawn), part.meaning))
            drawn = end
    return (Span("|"), *spans, Span("|" + " " * (cells - drawn)))


def legend(bars: Sequence[Bar], window: Window) -> list[Line]:
    """What the signs of these bars mean, in as many lines as it takes."""
    parts = dict.fromkeys(part for bar in bars for part, _ in bar.pieces())
    lines: list[list[Span]] = [[]]
    used = 0
    for part in sorted(parts, key=lambda part: part in (FREE, OTHERS, OVER)):
        cells = len(part.name) + 2
        if used and used + 2 + cells > window.width:
            lines.append([])
            used = 0
        if used:
            lines[-1].append(Span("  "))
        lines[-1] += [Span(part.drawn(window), part.meaning), Span(f" {part.name}")]
        used += cells + (2 if used else 0)
    return [tuple(line) for line in lines]
