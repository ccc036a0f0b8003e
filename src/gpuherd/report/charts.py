"""Charts, declared. On pages: Vega-Lite specifications by Altair, each with its rows. For papers: matplotlib's figures.

On a page colours are the page's own (``var(--…)``), so that a chart follows the light and the dark scheme as it stands.
Lines differ by strokes too. A mark with a tooltip is a place where the pointer and the arrow keys read the
chart off. Pictures for papers are made by matplotlib's objects alone: no window and no global state, so that they can
be made anywhere; each room's ``report/plot`` draws them. Pure but for the import of either library.
"""

from __future__ import annotations

import bisect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError, naming_extras, printable
from gpuherd.report.nodes import Node, element, key, legend, when
from gpuherd.report.nodes import axis as axis_words

if TYPE_CHECKING:
    import altair
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Point = tuple[float, float]
# After Okabe and Ito: they differ also for readers who see few colours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
_DASHES = (None, (7, 3), (2, 3), (9, 3, 2, 3), (12, 4), (4, 2), (1, 3), (6, 2, 1, 2))
_UNBROKEN = (1, 0)
_AS_GIVEN = {"value": 0}  # lines join their points in the order of the rows
_STOPS = 60  # at most so many places at which lines are read off

# What all charts of a page look like, as Vega-Lite's configuration.
CONFIG: dict[str, Any] = {
    "aria": False,
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "gridColor": "var(--grid)",
        "domain": False,
        "ticks": False,
        "labelColor": "var(--soft)",
        "titleColor": "var(--ink)",
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "labelPadding": 5,
        "labelLimit": 100,
    },
}


@dataclass(frozen=True, slots=True)
class Stroke:
    """How a line looks."""

    colour: str
    dash: tuple[int, ...] | None = None


def stroke(number: int) -> Stroke:
    """The look of the so-many-th line: 64 differ."""
    return Stroke(COLOURS[number % 8], _DASHES[(number + number // 8) % 8])


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart.

    Attributes:
        name: as the legend calls it.
        points: (x, y), sorted by x.
        band: (x, low, high), where there are intervals.
        behind: words behind its value where it is read off, by x.
    """

    name: str
    points: Sequence[Point]
    stroke: Stroke
    band: Sequence[tuple[float, float, float]] = ()
    behind: Callable[[float], str] | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        title: its words.
        domain: from where to where it goes; None for from 0 to the largest value.
        whole: whether only whole numbers are marked.
        values: what is marked; None for a few round numbers.
        labels: a Vega expression of the words at a mark.
        tell: a value of it in words, where the chart is read off.
    """

    title: str
    domain: tuple[float, float] | None
    whole: bool = False
    values: Sequence[float] | None = None
    labels: str | None = None
    tell: Callable[[float], str] = axis_words

    def encoded(self, channel: str) -> dict[str, Any]:
        """How Vega-Lite calls it: "x" or "y", which are names of fields too."""
        drawn: dict[str, Any] = {"title": self.title or None, "tickCount": 6 if channel == "x" else 5}
        if self.values is not None:
            drawn["values"] = list(self.values)
        if self.whole or self.labels is not None:
            drawn["labelExpr"] = self.labels or WHOLE
        about = {"field": channel, "type": "quantitative", "axis": drawn}
        if self.domain is None:
            return about | {"stack": None}
        return about | {"scale": {"domain": list(self.domain), "nice": False, "zero": False, "clamp": True}}


WHOLE = "datum.value % 1 ? '' : format(datum.value, ',d')"  # words of whole numbers alone
PERCENT = "round(datum.value * 1000) / 10 + ' %'"


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    label: str,
    *,
    height: int = 230,
    diagonal: bool = False,
    level: float | None = None,
    dots: bool = False,
    note: str | None = None,
    select: str | None = None,
    keys: bool = True,
) -> Node:
    """Lines over a common axis that are read off together at one place, with their intervals and a legend.

    Args:
        diagonal: a line from corner to corner.
        level: a height to compare with.
        dots: whether the points are marked; lines are then read off at these alone.
        select: a key of the page: only the lines of the names that are chosen there are drawn.
        keys: whether there is a legend.
    """
    data: dict[str, list[dict[str, Any]]] = {
        "level": [] if level is None else [{"y": level}],
        "diagonal": [{"x": a, "y": b} for a, b in zip(x.domain or (), y.domain or (), strict=True)] if diagonal else [],
        "bands": [_row(e, x=a, y=b, y2=c) for e in lines if len(e.band) > 1 for a, b, c in e.band],
        "reach": [_row(e, x=a, y=b, y2=c) for e in lines if len(e.band) == 1 for a, b, c in e.band],
        "lines": [_row(e, x=a, y=b) for e in lines for a, b in e.points],
        "dots": [_row(e, x=a, y=b) for e in lines if dots or len(e.points) == 1 for a, b in e.points],
        "stops": _stops(lines, x, y, dots),
    }
    drawn = {name: rows for name, rows in data.items() if rows}
    about = _chart(_layered(tuple(drawn), height), x, y, drawn, label, along=True, note=note, select=select)
    keys_of = [key(each.stroke.colour, each.stroke.dash, each.name) for each in lines]
    if select is not None:
        keys_of = [when(select, each.name, node) for each, node in zip(lines, keys_of, strict=True)]
    return element("div", about, element("div", *keys_of, kind="legend") if keys else None)


def _row(line: Line, **more: Any) -> dict[str, Any]:
    return {"series": line.name, "colour": line.stroke.colour, "dash": line.stroke.dash or _UNBROKEN, **more}


@cache
def _layered(names: tuple[str, ...], height: int) -> dict[str, Any]:
    """A specification of these marks over each other, each drawn on the rows of its name."""
    alt = _altair()
    tint, inside = alt.Stroke("colour:N", scale=None), alt.Fill("colour:N", scale=None)
    dash, series = alt.StrokeDash("dash:N", scale=None), alt.Detail("series:N")
    aside, cross = {"stroke": "var(--soft)", "strokeDash": [3, 4]}, {"strokeWidth": 1.2, "opacity": 0.7}
    place = {"x": "x:Q", "y": "y:Q"}
    line, upright = place | {"order": _AS_GIVEN}, place | {"y2": "y2"}
    filled = alt.Fill("fill:N", scale=None), alt.Size("size:Q", scale=None)
    marks: dict[str, Callable[[Any], Any]] = {
        "level": lambda on: on.mark_rule(**aside).encode(y="y:Q"),
        "diagonal": lambda on: on.mark_line(**aside).encode(**place),
        "bands": lambda on: on.mark_area(opacity=0.16).encode(inside, series, **upright),
        "reach": lambda on: on.mark_rule(opacity=0.6).encode(tint, **upright),
        "lines": lambda on: on.mark_line(strokeWidth=2, strokeJoin="round").encode(tint, dash, series, **line),
        "dots": lambda on: on.mark_point(size=30, opacity=1, strokeWidth=0).encode(inside, **place),
        "stops": lambda on: on.mark_point(size=70, opacity=0, stroke="var(--card)").encode(
            inside, tooltip="tip:N", **place
        ),
        # of a scatter chart
        "guides": lambda on: on.mark_line(strokeWidth=1.6).encode(tint, dash, series, **line),
        "up": lambda on: on.mark_rule(**cross).encode(tint, **upright),
        "across": lambda on: on.mark_rule(**cross).encode(tint, x2="x2", **place),
        "marks": lambda on: on.mark_point(opacity=1, strokeWidth=1.6).encode(tint, *filled, tooltip="tip:N", **place),
        # of histograms over each other, whose bins are read off
        "areas": lambda on: on.mark_area(interpolate="step-after", opacity=0.28).encode(
            inside, series, x="x:Q", y=alt.Y("y:Q", stack=None), order=_AS_GIVEN
        ),
        "steps": lambda on: on.mark_line(interpolate="step-after", strokeWidth=1.8).encode(tint, dash, series, **line),
        "spans": lambda on: on.mark_bar(strokeWidth=2, cornerRadius=2, minBandSize=2).encode(
            inside,
            alt.FillOpacity("opacity:Q", scale=None),
            alt.Stroke("outline:N", scale=None),
            dash,
            x="x:Q",
            x2="x2",
            y="row:N",
            tooltip="tip:N",
        ),
        "bins": lambda on: on.mark_rect(fill="var(--soft)", fillOpacity=0.2, opacity=0).encode(
            x="x:Q", x2="x2", tooltip="tip:N"
        ),
    }
    return specification(alt.layer(*(marks[name](drawn_on(name)) for name in names)), height)


def _stops(lines: Sequence[Line], x: Axis, y: Axis, dots: bool) -> list[dict[str, Any]]:
    """Where lines are read off, with their tooltips: at their points, or at places between their ends."""
    places = sorted({a for each in lines for a, _ in each.points})
    if not dots and len(places) > _STOPS:
        ends = places[0], places[-1]
        places = [ends[0] + (ends[1] - ends[0]) * at / (_STOPS - 1) for at in range(_STOPS)]
        if all(a == int(a) for each in lines for a, _ in each.points):
            places = sorted({round(each) for each in places})
    return [
        {"series": each.name, "x": at, "y": height, "tip": _tip(each, at, height, x, y)}
        for at in places
        for each in lines
        if (height := read(each.points, at)) is not None
    ]


def _tip(line: Line, at: float, height: float, x: Axis, y: Axis) -> str:
    extra = line.behind(at) if line.behind else ""
    return f"{x.title}: {x.tell(at)}\n{printable(line.name)}: {y.tell(height)}{extra and ' '}{extra}"


def read(points: Sequence[Point], at: float) -> float | None:
    """The height of a line at a place, None beyond its ends; where it rises upright, the upper end.

    >>> read([(0, 0), (2, 1)], 1), read([(0, 0), (0, 5), (1, 6)], 0), read([(0, 0)], 1)
    (0.5, 5, None)
    """
    if not points or not points[0][0] <= at <= points[-1][0]:
        return None
    place = bisect.bisect_right(points, at, key=lambda point: point[0]) - 1
    (x0, y0), (x1, y1) = points[place], points[min(place + 1, len(points) - 1)]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point with its intervals in both directions.

    Attributes:
        ends_x, ends_y: None where there are none.
        filled: drawn larger, and filled.
        tip: the lines of its tooltip.
    """

    x: float
    y: float
    colour: str
    tip: Sequence[str]
    ends_x: tuple[float, float] | None = None
    ends_y: tuple[float, float] | None = None
    filled: bool = True


def scatter_chart(lines: Sequence[Line], marks: Sequence[Mark], x: Axis, y: Axis, label: str, note: str) -> Node:
    """Points with their intervals, on lines."""
    data = {
        "guides": [_row(each, x=a, y=b) for each in lines for a, b in each.points],
        "up": [{"x": e.x, "y": e.ends_y[0], "y2": e.ends_y[1], "colour": e.colour} for e in marks if e.ends_y],
        "across": [{"y": e.y, "x": e.ends_x[0], "x2": e.ends_x[1], "colour": e.colour} for e in marks if e.ends_x],
        "marks": [
            {
                "x": each.x,
                "y": each.y,
                "colour": each.colour,
                "fill": each.colour if each.filled else "var(--card)",
                "size": 80 if each.filled else 40,
                "tip": "\n".join(map(printable, each.tip)),
            }
            for each in marks
        ],
    }
    keys = legend([(each.name, each.stroke.colour, each.stroke.dash) for each in lines])
    about = _chart(_layered(tuple(data), 250), x, y, data, label)
    return element("div", about, keys, element("p", note, kind="note"))


@dataclass(frozen=True, slots=True)
class Span:
    """A bar from one time to another.

    Attributes:
        lane: the row that it lies in; ``sub``: which of those that share the lane at one time.
        outline: the colour of its border; None without one.
    """

    lane: str
    sub: int
    start: float
    end: float
    colour: str
    tip: Sequence[str]
    opacity: float = 1.0
    outline: str | None = None
    broken: bool = False


def timeline_chart(spans: Sequence[Span], x: Axis, label: str) -> Node:
    """Bars in time, a lane a device."""
    rows = sorted({(each.lane, each.sub) for each in spans}, key=lambda row: (_natural(row[0]), row[1]))
    names = [f"{lane}\t{sub}" for lane, sub in rows]
    data = {
        "spans": [
            {
                "row": f"{each.lane}\t{each.sub}",
                "x": each.start,
                "x2": each.end,
                "colour": each.colour,
                "opacity": each.opacity,
                "outline": each.outline or "none",
                "dash": [4, 3] if each.broken else [1, 0],
                "tip": "\n".join(map(printable, each.tip)),
            }
            for each in spans
        ]
    }
    # A lane is named once, though jobs that share it lie below each other.
    words = "split(datum.value, '\\t')[1] == '0' ? split(datum.value, '\\t')[0] : ''"
    lanes = {
        "field": "row",
        "type": "nominal",
        "sort": names,
        "axis": {"title": None, "grid": False, "labelLimit": 90, "labelExpr": words},
        "scale": {"paddingInner": 0.2, "paddingOuter": 0.1},
    }
    return _chart(_layered(("spans",), 20 * len(rows)), x, lanes, data, label)


def _natural(word: str) -> list[tuple[int, str]]:
    """Sorts numbers in words by their size."""
    return [(int(each), "") if each.isdecimal() else (-1, each) for each in re.split(r"(\d+)", word)]


def drawn_on(name: str) -> altair.Chart:
    """A chart of the rows that a page gives under this name."""
    alt = _altair()
    return alt.Chart(alt.NamedData(name=name))


def _chart(
    drawn: dict[str, Any],
    x: Axis,
    y: Axis | dict[str, Any],
    data: Mapping[str, Any],
    label: str,
    *,
    along: bool = False,
    note: str | None = None,
    select: str | None = None,
) -> Node:
    """A specification of layers with its axes and its rows."""
    axes = {"x": x.encoded("x"), "y": y if isinstance(y, dict) else y.encoded("y")}

    def with_axes(part: dict[str, Any]) -> dict[str, Any]:
        own = part["encoding"]
        return part | {"encoding": own | {name: axis for name, axis in axes.items() if name in own}}

    full = drawn | {"layer": [*map(with_axes, drawn["layer"])]}
    about = {"spec": full, "data": data, "label": printable(label), "along": along, "note": note, "select": select}
    return ["chart", about]


def specification(chart: Any, height: int) -> dict[str, Any]:
    """A chart of Altair as a page embeds it, with CONFIG for all."""
    found: dict[str, Any] = chart.properties(height=height).to_dict()
    return {name: value for name, value in found.items() if name not in ("$schema", "config")}


def _altair() -> Any:
    """Raises MissingExtra."""
    with naming_extras({"altair": "page"}, "the charts of the page need"):
        import altair
    return altair


@dataclass(frozen=True, slots=True)
class Steps:
    """A class of a histogram.

    Attributes:
        heights: a bin each.
        filled: drawn as an area, else as a line.
    """

    name: str
    heights: Sequence[float]
    stroke: Stroke
    filled: bool


def histogram_chart(
    classes: Sequence[Steps], edges: Sequence[float], tips: Sequence[Sequence[str]], x: Axis, y: Axis, label: str
) -> Node:
    """Histograms over each other; a bin is read off with all of them. ``edges``: one more than there are bins."""

    def corners(some: Sequence[Steps]) -> list[dict[str, Any]]:
        return [
            {"series": each.name, "x": x, "y": y, "colour": each.stroke.colour, "dash": each.stroke.dash or _UNBROKEN}
            for each in some
            for x, y in zip((edges[0], *edges), (0.0, *each.heights, 0.0), strict=True)
        ]

    data = {
        "areas": corners([each for each in classes if each.filled]),
        "steps": corners(classes),
        "bins": [
            {"x": start, "x2": end, "tip": "\n".join(map(printable, lines))}
            for start, end, lines in zip(edges, edges[1:], tips, strict=False)
        ],
    }
    return steps_chart(x, y, label, 210, data)


def steps_chart(x: Axis, y: Axis, label: str, height: int, data: Mapping[str, Any]) -> Node:
    """The same of rows as they are drawn: ``areas`` and ``steps`` (series, x, y, colour, dash), and ``bins`` (x, x2,
    tip); or of the fields of the view's record that have them."""
    return _chart(_layered(("areas", "steps", "bins"), height), x, y, data, label, along=True)


# --- pictures for papers ----------------------------------------------------------------------------------------------

FORMATS = ("png", "svg", "pdf")
BLUE, RED, GREY = *COLOURS[:2], "#8a8f98"
_STROKES = ("-", "--", ":", "-.", (0, (6, 2)), (0, (1, 2)), (0, (3, 1, 1, 1)), (0, (8, 3)))
# Of the lines of a plot: a stroke each, so that they differ in grey too.
LINES = tuple(zip(COLOURS, _STROKES, strict=True))


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches. Raises MissingExtra where matplotlib is not installed."""
    with naming_extras(dict.fromkeys(("matplotlib", "matplotlib.figure"), "page"), "plots need"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def label_axes(axes: Axes, x: str, y: str) -> None:
    """What stands at the axes, and a grid."""
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)


def picture_bytes(figure: Figure, file_format: str, dpi: int = 150) -> bytes:
    """The picture as a file of FORMATS: the same bytes for the same figure."""
    import matplotlib as mpl

    out = io.BytesIO()
    # Without the date and with ids by content, so that a picture changes only when its figures do.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[file_format]
    with mpl.rc_context({"svg.hashsalt": "gpuherd", "svg.fonttype": "none"}):
        figure.savefig(out, format=file_format, dpi=dpi, metadata=metadata)
    return out.getvalue()


def check_format(name: str) -> str:
    """The format that a file name's ending asks for. Raises UsageError."""
    ending = name.rpartition(".")[2].lower()
    if "." not in name or ending not in FORMATS:
        raise UsageError(f"{name!r}: a plot is written as .{', .'.join(FORMATS)}; name the file so")
    return ending


def plain_text(name: str, most: int = 48) -> str:
    """The name, shortened in its middle, as plain text for matplotlib, which would read $ as the start of a formula."""
    name = printable(name)
    short = name if len(name) <= most else f"{name[: most // 3]}…{name[-(most - most // 3 - 1) :]}"
    return short.replace("$", r"\$")
