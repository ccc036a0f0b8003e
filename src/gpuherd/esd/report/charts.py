"""The charts of a page of spectra, declared. ``charts.js`` gives each its rows, from the view's record.

Each is declared once a process: Altair takes a tenth of a second to check one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from gpuherd.report.charts import PERCENT, WHOLE, Axis, drawn_on, specification, steps_chart
from gpuherd.report.nodes import Node

LAST_ALPHA = 12  # what is larger is counted in the last bin of a histogram
_AS_GIVEN = {"value": 0}  # lines join their points in the order of the rows
# Of an axis of logarithms: words that are as short as can be; over a decade or more at 1, 2 and 5 alone.
_POWERS = "datum.value >= 0.001 && datum.value < 10000 ? format(datum.value, '~g') : format(datum.value, '~e')"
_LEADING = "round(datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-9)))"


def _chart(layers: list[Any], height: int, label: str, data: dict[str, str]) -> Node:
    """``data``: the field of the record that has the rows, by the name of the rows."""
    import altair as alt

    spec = specification(alt.layer(*layers), height)
    return ["chart", {"spec": spec, "data": data, "label": label}]


# --- the spectrum of a matrix -----------------------------------------------------------------------------------------


def _log_axis(field: str, title: str) -> dict[str, Any]:
    scale = {"type": "log", "nice": False, "padding": 12}
    wide = f"domain('{field}')[1] > 10 * domain('{field}')[0]"
    labels = f"{wide} && indexof([1, 2, 5], {_LEADING}) < 0 ? '' : {_POWERS}"
    axis = {"title": title, "labelExpr": labels, "tickCount": 6}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


@cache
def spectrum_charts() -> list[Node]:
    """The share of eigenvalues from each on, and their density, log-log, with the fitted law from xmin on, which is an
    upright line with words on the side that has room."""
    import altair as alt

    x = _log_axis("x", "eigenvalue λ")
    drawn = {name: drawn_on(name) for name in ("curve", "law", "bars", "edge", "tail", "xmin")}
    side = {"align": alt.expr("datum.right ? 'right' : 'left'"), "dx": alt.expr("datum.right ? -5 : 5")}
    upright = drawn["xmin"].mark_rule(stroke="var(--fit)", strokeDash=[4, 4], strokeWidth=1.5).encode(x=x)
    words = drawn["xmin"].mark_text(fill="var(--ink)", fontSize=11, baseline="top", **side)
    xmin = [upright, words.encode(x=x, y=alt.value(2), text="words:N")]

    def line(rows: str, y: dict[str, Any], colour: str, **look: Any) -> Any:
        return drawn[rows].mark_line(stroke=colour, strokeWidth=2, **look).encode(x=x, y=y, order=_AS_GIVEN)

    y = _log_axis("y", "share ≥ λ")
    curve = line("curve", y, "var(--accent)", strokeJoin="round")
    shares = [curve, line("law", y, "var(--fit)", strokeDash=[8, 3]), *xmin]
    y = _log_axis("y", "density over log₁₀ λ")
    bars = drawn["bars"].mark_rect(opacity=0.6, fill="var(--accent)").encode(x=x, x2="x2", y=y, y2="floor")
    edge = drawn["edge"].mark_rule(stroke="var(--edge)", strokeDash=[2, 3], strokeWidth=1.5).encode(x=x)
    density = [bars, edge, line("tail", y, "var(--fit)", strokeDash=[8, 3]), *xmin]
    data = {name: f"spectrum.{name}" for name in drawn}
    return [
        _chart(shares, 230, "{name}: share of eigenvalues from λ on, log-log", data),
        _chart(density, 230, "{name}: density of eigenvalues, log-log", data),
    ]


# --- alpha of many matrices -------------------------------------------------------------------------------------------


def histogram_chart(label: str, height: int) -> Node:
    """Histograms of alpha over each other, in bins of 0.25 from 1 on and one for what is above."""
    labels = f"datum.value == {LAST_ALPHA} ? '{LAST_ALPHA}+' : datum.value"
    x = Axis("alpha", (1, LAST_ALPHA + 0.25), values=[2, 4, 6, 8, 10, LAST_ALPHA], labels=labels)
    y = Axis("share of matrices", None, labels=PERCENT)
    return steps_chart(x, y, label, height, {name: name for name in ("areas", "steps", "bins")})


@cache
def depth_chart() -> Node:
    """Alpha of each module over depth: lines for the commonest modules, the median of all ``rows`` in front."""
    import altair as alt

    x = alt.X(
        "depth:Q", axis=alt.Axis(title="layer", labelExpr=WHOLE, tickCount=6), scale=alt.Scale(nice=False, zero=False)
    )
    y = alt.Y(
        "alpha:Q", axis=alt.Axis(title="alpha", tickCount=6), scale=alt.Scale(nice=False, zero=False, domainMin=1)
    )
    layers = [
        drawn_on("shade").mark_rect(fill="var(--accent)", opacity=0.07).encode(y=alt.Y("from:Q"), y2="to"),
        drawn_on("lines")
        .mark_line(strokeWidth=1.3, strokeJoin="round")
        .encode(alt.Stroke("colour:N", scale=None), alt.Detail("module:N"), x=x, y=y, order=_AS_GIVEN),
        drawn_on("rows")
        .transform_aggregate(alpha="median(alpha)", groupby=["depth"])
        .mark_line(stroke="var(--mark)", strokeWidth=2.5, strokeJoin="round")
        .encode(x=x, y=y),
        drawn_on("dots")
        .mark_point(size=22, opacity=1, strokeWidth=0)
        .encode(alt.Fill("colour:N", scale=None), x=x, y=y, tooltip="tip:N"),
    ]
    data = {name: f"depths.{name}" for name in ("rows", "lines", "dots", "shade")}
    return _chart(layers, 230, "alpha over depth, by module", data)
