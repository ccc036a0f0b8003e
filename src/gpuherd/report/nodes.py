"""What a view of a page is made of, as JSON: text, or ``[tag, attributes, *children]``; and numbers as its words. Pure.

The tag is an HTML element or a widget of ``assets/page.js``. Every text becomes a text node, whoever wrote it; names of
tags and attributes are ours alone. A number has the digits that matter, a true minus sign, and a dash for none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from gpuherd.errors import printable

NONE = "–"
_MINUS = "\N{MINUS SIGN}"


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether there is a number, and it is finite."""
    return value is not None and math.isfinite(value)


def fixed(value: float | None, digits: int = 3) -> str:
    """With so many digits behind the point, also where they are 0.

    >>> fixed(0.5), fixed(-0.25), fixed(-0.0001), fixed(None)
    ('0.500', '−0.250', '0.000', '–')
    """
    if not is_known(value):
        return NONE
    return re.sub(r"^-(0(\.0*)?)$", r"\1", f"{value:.{digits}f}").replace("-", _MINUS)


def figure(value: float | None, digits: int = 3) -> str:
    """With about four digits, whatever its size.

    >>> figure(3), figure(0.01234), figure(12.3456), figure(0.00012), figure(123456.7)
    ('3', '0.0123', '12.35', '1.20e-4', '1.23e+5')
    """
    if not is_known(value):
        return NONE
    size = abs(value)
    if value == 0 or (value == int(value) and size < 1e6):
        return str(int(value))
    if size >= 1e5 or size < 1e-3:
        return _exponent(f"{value:.2e}")
    if size < 0.1:
        return f"{value:#.{digits}g}"
    return f"{value:.{0 if size >= 1e4 else 1 if size >= 100 else min(2, digits) if size >= 10 else digits}f}"


def axis(value: float) -> str:
    """As short as can be.

    >>> axis(0.1), axis(2.0), axis(7.06e-06), axis(-1500000.0)
    ('0.1', '2', '7.1e-6', '−1.5e+6')
    """
    size = abs(value)
    small = size != 0 and (size < 1e-3 or size >= 1e6)
    words = _exponent(f"{value:.1e}").replace(".0e", "e") if small else f"{value:.6g}"
    return words.replace("-", _MINUS, 1) if value < 0 else words


def _exponent(words: str) -> str:
    """Without zeros in front: 1.2e-4."""
    return re.sub(r"e([+-])0*(\d)", r"e\1\2", words)


def percent(value: float | None) -> str:
    """100 % is all, and 0 % is nothing.

    >>> percent(1.0), percent(0.9999), percent(0.1234), percent(0.0001)
    ('100 %', '> 99.9 %', '12.3 %', '< 0.1 %')
    """
    if not is_known(value):
        return NONE
    if value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    return "< 0.1 %" if value < 0.0005 else "> 99.9 %" if value >= 0.9995 else f"{100 * value:.1f} %"


def counted(count: int, word: str) -> str:
    """
    >>> counted(1, "job"), counted(2, "job")
    ('1 job', '2 jobs')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """From the least to the largest, with a little room, and 0 within where it is near."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if 0 < low < 0.5 * high:
        low = 0.0
    room = ((high - low) or abs(high) or 1.0) * 0.06
    return (0.0 if low == 0 else low - room), high + room


def share_spread(values: Sequence[float]) -> tuple[float, float]:
    """Shares from 0 to 1; where all are small, as far as they go."""
    most = max(0.0, *values) if values else 0.0
    return 0.0, 1.06 * most if 0 < most < 0.4 else 1.0


Node = Any  # str | list | None


def element(tag: str, *children: Node, kind: str | None = None, **attributes: Any) -> Node:
    """An element; ``kind`` is its class. Words of attributes are made printable."""
    found = {"class": kind} if kind else {}
    found |= {name.replace("_", "-"): value for name, value in attributes.items() if value is not None}
    return [
        tag,
        {name: printable(value) if isinstance(value, str) else value for name, value in found.items()},
        *(child for child in children if child is not None),
    ]


def card(title: str | None, *children: Node, level: str = "h2") -> Node:
    """A part of a view in a frame of its own."""
    return element("section", element(level, title) if title else None, *children, kind="card")


def note(text: str, kind: str = "note") -> Node:
    """A sentence in small letters; other kinds: "soft", "warn", "bad"."""
    return element("p", text, kind=kind)


def link(address: str, *words: Node, title: str | None = None) -> Node:
    """A link to a place of the page."""
    return element("a", *words, href=address, title=title)


def definitions(pairs: Sequence[tuple[str, Node]], summary: str) -> Node:
    """Words with what they mean, folded away."""
    lines = [each for word, meaning in pairs for each in (element("dt", word), element("dd", meaning))]
    return element("details", element("summary", summary), element("dl", *lines), kind="how")


# --- what readers choose ----------------------------------------------------------------------------------------------


def when(key: str, values: Any, *children: Node) -> Node:
    """What is there while the key has this value, or one of these."""
    return ["when", {key: values}, *(child for child in children if child is not None)]


def check(key: str, *words: Node, value: Any = None, label: str | None = None, most: int | None = None) -> Node:
    """A box that turns the key on and off; with a value, that adds it to the values of the key (at most so many)."""
    return element("check", *words, key=key, value=value, label=label, most=most)


def choose(key: str, label: str, options: Sequence[tuple[Any, str]] | str) -> Node:
    """A list to choose the key's value from: (value, its words); of a template a field in braces that has them."""
    pairs = options if isinstance(options, str) else [list(each) for each in options]
    return ["choose", {"key": key, "label": label, "options": pairs}]


def pick(key: str, value: Any, *words: Node, title: str | None = None) -> Node:
    """A button that gives the key this value."""
    return element("pick", *words, key=key, value=value, title=title)


def step(key: str, word: str, to: str, end: str) -> Node:
    """A button of a template that goes to the key's value in the field ``to``; ``end``: the field that says there is
    none."""
    about = {"key": key, "value": f"{{{to}}}", "class": "step", "id": word, "disabled": f"{{{end}}}"}
    return ["pick", about, word]


# --- templates: nodes that are built with a record, whose fields their texts and attributes name as "{path:format}" ---


def given(field: str, *children: Node) -> Node:
    """What is there where the record has the field: not empty and not 0."""
    return element("given", *children, field=field)


def missing(field: str, *children: Node) -> Node:
    """What is there where the record has not."""
    return ["given", {"field": field, "not": True}, *children]


def known(field: str, *children: Node) -> Node:
    """What is there where the field is a number, 0 among them."""
    return element("given", *children, field=field, known=True)


def repeat(field: str, *children: Node) -> Node:
    """The children once for every record of a field."""
    return element("each", *children, field=field)


def live(
    key: str | Sequence[str],
    *children: Node,
    part: str | None = None,
    place: str | None = None,
    late: bool = False,
) -> Node:
    """What alone is made anew when the key, or one of the keys, changes.

    Args:
        part: the record's function that gives, or promises, the children's record for the key's value.
        place: its id.
        late: made only once it comes into sight.
    """
    return element("live", *children, key=key, part=part, id=place, late=late or None)


def fold(summary: Node, *children: Node, name: str, kind: str | None = None) -> Node:
    """What is made when a reader unfolds it, and stays open from view to view."""
    return element("fold", *children, summary=summary, name=name, kind=kind)


Family = Sequence[Any]  # (number of the record or a node, its members, what their fold is called or None)


def tree(frame: str, branch: Node, families: Sequence[Family], most: int) -> Node:
    """Records of a frame, shown by a template, in families of which so many are shown at first."""
    rest = [[None, families[most:], f"{len(families) - most} more families"]] if len(families) > most else []
    return ["tree", {"frame": frame, "branch": branch, "families": [*families[:most], *rest]}]


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        word: its heading.
        why: what it means, in a line.
        kind: classes of its cells: "num", "name", "rare" (left out on a narrow screen), "picture".
        format: how the page shows its plain values: "figure", "figure4", "percent", "many", "text"; None for cells.
        sorts: whether its heading sorts the table.
        field: of records, what it sorts by and shows.
        shows: of records, the template of its cells, where that is not the field alone.
        given: a field of the view's record without which there is no such column.
    """

    word: str
    why: str | None = None
    kind: str = ""
    format: str | None = None
    sorts: bool = True
    field: str | None = None
    shows: Node = None
    given: str | None = None


def cell(value: float | str | None, *words: Node, title: str | None = None) -> Node:
    """A cell that sorts by its value."""
    return [value, element("span", *words, title=title or None)]


def table(
    label: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]] = (),
    *,
    sort: int | None = None,
    descending: bool = False,
    page: int = 100,
    hint: str | None = None,
    name: str | None = None,
    frame: str | None = None,
    field: str | None = None,
    words: Sequence[str] | None = None,
    mark: tuple[str, str] | None = None,
) -> Node:
    """A table that sorts by its headings, filters by words where there is a hint, and shows so many rows at a time.

    Args:
        rows: a ``cell`` for each column, or a plain value where the column has a format.
        name: tables of one name keep how a reader has sorted them.
        frame, field: in place of rows the records of a frame, or of a field of the view's record.
        words: the fields that the filter looks through; None for those that the columns sort by.
        mark: a key, and the field of the row whose value it has.
    """
    about: dict[str, Any] = {"label": label, "columns": [asdict(column) for column in columns], "rows": rows}
    about |= {"frame": frame, "field": field, "words": words, "mark": mark, "name": name or label, "hint": hint}
    return ["table", about | {"sort": sort, "descending": descending, "page": page}]


# --- figures with intervals -------------------------------------------------------------------------------------------

Ends = tuple[float, float]


def interval(
    value: float | None,
    ends: Ends | None,
    scale: Ends,
    *,
    at: float | None = None,
    faint: bool = False,
    label: str = "",
    digits: int = 3,
) -> Node:
    """A dot with its interval on a scale; ``at``: a line to compare with."""
    low, high = scale

    def place(number: float) -> str:
        return _percentage(min(1.0, max(0.0, (number - low) / ((high - low) or 1.0))))

    words = fixed(value, digits) + ("" if ends is None else f" [{fixed(ends[0], digits)}, {fixed(ends[1], digits)}]")
    between = ends if is_known(value) else None
    parts = [
        None if at is None else _upright("at", place(at)),
        *([] if between is None else range_mark(place(between[0]), place(between[1]))),
        dot(place(value)) if is_known(value) else None,
    ]
    return scale_picture(f"{label} {words}", *parts, kind="interval faint" if faint else "interval")


def scale_picture(label: str, *parts: Node, kind: str = "interval") -> Node:
    """A scale as wide as its place, with marks on it."""
    return element("svg", _across("scale", "0%", "100%"), *parts, kind=kind, role="img", aria_label=label)


def range_mark(low: str, high: str) -> list[Node]:
    """From one end to another, on a scale."""
    return [_across("reach", low, high), _upright("end", low), _upright("end", high)]


def dot(place: str, fill: str | None = None) -> Node:
    """A value on a scale."""
    return element("circle", kind="dot", cx=place, cy=8, r=3.25, fill=fill)


def _across(kind: str, low: str, high: str) -> Node:
    return element("line", kind=kind, x1=low, x2=high, y1=8, y2=8)


def _upright(kind: str, place: str) -> Node:
    ends = (5, 11) if kind == "end" else (0, 16)
    return element("line", kind=kind, x1=place, x2=place, y1=ends[0], y2=ends[1])


def shares(counts: Sequence[int], label: str) -> Node:
    """Shares of a whole next to each other, in the colours of classes."""
    whole = sum(counts) or 1
    parts = [
        element(
            "rect", kind=f"v{at}", x=_percentage(sum(counts[:at]) / whole), width=_percentage(count / whole), height=14
        )
        for at, count in enumerate(counts)
    ]
    return element("svg", *parts, kind="shares", role="img", aria_label=label)


def _percentage(share: float) -> str:
    return f"{round(100 * share, 2):g}%"


def ends_words(ends: Ends, write: Callable[[float | None], str] = fixed) -> Node:
    """An interval in small letters, below its value."""
    return element("span", f"{write(ends[0])} to {write(ends[1])}", kind="ends")


def legend(keys: Sequence[tuple[str, str, Sequence[int] | None]]) -> Node:
    """Lines with what they stand for: (words, colour, dashes)."""
    return element("div", *(key(colour, dash, words) for words, colour, dash in keys), kind="legend")


def key(colour: str, dash: Sequence[int] | None, *words: Node) -> Node:
    """A stroke of a line in its colour, and words."""
    about: dict[str, Any] = {"x1": 0, "x2": 22, "y1": 3, "y2": 3, "stroke": colour, "stroke_width": 2.5}
    line = element("line", **about, stroke_dasharray=None if dash is None else " ".join(map(str, dash)))
    return element(
        "span", element("svg", line, viewBox="0 0 22 6", kind="key-line", aria_hidden="true"), *words, kind="key"
    )
