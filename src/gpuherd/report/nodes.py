"""What a view of a page is made of, as JSON: text, or ``[tag, attributes, *children]``. Pure.

The tag is an HTML element or a widget of ``assets/page.js``. Every text becomes a text node, whoever wrote it; names of
tags and attributes are ours alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import printable
from gpuherd.report.numbers import fixed, is_known

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


def choose(key: str, label: str, options: Sequence[tuple[Any, str]]) -> Node:
    """A list to choose the key's value from: (value, its words)."""
    return ["choose", {"key": key, "label": label, "options": [list(each) for each in options]}]


def pick(key: str, value: Any, *words: Node, title: str | None = None) -> Node:
    """A button that gives the key this value."""
    return element("pick", *words, key=key, value=value, title=title)


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
    """

    word: str
    why: str | None = None
    kind: str = ""
    format: str | None = None
    sorts: bool = True


def cell(value: float | str | None, *words: Node, title: str | None = None) -> Node:
    """A cell that sorts by its value."""
    return [value, element("span", *words, title=title or None)]


def table(
    label: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]],
    *,
    sort: int | None = None,
    descending: bool = False,
    page: int = 100,
    hint: str | None = None,
    name: str | None = None,
) -> Node:
    """A table that sorts by its headings, filters by words where there is a hint, and shows so many rows at a time.

    Args:
        rows: a ``cell`` for each column, or a plain value where the column has a format.
        name: tables of one name keep how a reader has sorted them.
    """
    told = [
        {"word": each.word, "why": each.why, "kind": each.kind, "format": each.format, "sorts": each.sorts, "key": at}
        for at, each in enumerate(columns)
    ]
    about = {"label": label, "columns": told, "rows": rows, "sort": sort, "descending": descending, "page": page}
    return ["table", about | {"hint": hint, "name": name or label}]


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

    def place(number: float) -> float:
        return round(min(1.0, max(0.0, (number - low) / ((high - low) or 1.0))), 4)

    words = fixed(value, digits) + ("" if ends is None else f" [{fixed(ends[0], digits)}, {fixed(ends[1], digits)}]")
    about: dict[str, Any] = {"label": printable(f"{label} {words}"), "faint": faint}
    if is_known(value):
        about["value"] = place(value)
        if ends is not None:
            about |= {"low": place(ends[0]), "high": place(ends[1])}
    if at is not None:
        about["at"] = place(at)
    return ["interval", about]


def legend(keys: Sequence[tuple[str, str, Sequence[int] | None]]) -> Node:
    """Lines with what they stand for: (words, colour, dashes)."""
    return element("div", *(key(colour, dash, words) for words, colour, dash in keys), kind="legend")


def key(colour: str, dash: Sequence[int] | None, *words: Node) -> Node:
    """A stroke of a line in its colour, and words."""
    return ["key", {"colour": colour, "dash": None if dash is None else list(dash)}, *words]
