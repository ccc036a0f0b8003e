"""The charts of a page of spectra, declared: rows come of the view's record, Vega-Lite's transforms do the rest.

``charts.js`` gives each its rows: of a matrix its sketch and its fit, of a model the alphas by layer, of models counts.
Each is declared once a process: Altair takes a tenth of a second to check one.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from gpuherd.report.charts import PERCENT, WHOLE, Axis, drawn_on, specification, steps_chart
from gpuherd.report.nodes import Node

if TYPE_CHECKING:
    import altair

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


# --- the spectrum of a matrix: one row, with x and y of its sketch, its histogram and its fit -------------------------

# The row by what is drawn of it: "fit" has none without a fit, and "edge" none where that lies out of the frame.
_SPECTRUM = {name: f"spectrum.{name}" for name in ("matrix", "fit", "edge")}


@cache
def spectrum_charts() -> list[Node]:
    """The share of eigenvalues from each on, and their density, log-log, with the fitted law from xmin on."""
    return [_ccdf(), _density()]


def _log_axis(field: str, title: str) -> dict[str, Any]:
    scale = {"type": "log", "nice": False, "padding": 12}
    wide = f"domain('{field}')[1] > 10 * domain('{field}')[0]"
    labels = f"{wide} && indexof([1, 2, 5], {_LEADING}) < 0 ? '' : {_POWERS}"
    axis = {"title": title, "labelExpr": labels, "tickCount": 6}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


_X = _log_axis("x", "eigenvalue λ")


def _law(rows: altair.Chart, height: str, floor: str, y: dict[str, Any]) -> altair.Chart:
    """The law from xmin to the largest eigenvalue, or to where it leaves the frame below.

    Args:
        height: an expression of its height at xmin.
        floor: an expression of the height that the frame ends at.
    """
    stop = f"datum.alpha > 1 ? datum.xmin * pow({floor} / datum.start, 1 / (1 - datum.alpha)) : datum.top"
    return (
        rows.transform_calculate(start=height)
        .transform_calculate(x=f"[datum.xmin, min(datum.top, {stop})]")
        .transform_flatten(["x"])
        .transform_calculate(y="datum.start * pow(datum.x / datum.xmin, 1 - datum.alpha)")
        .mark_line(stroke="var(--fit)", strokeDash=[8, 3], strokeWidth=2)
        .encode(x=_X, y=y, order=_AS_GIVEN)
    )


def _xmin() -> list[altair.Chart]:
    """Where the law begins, as an upright line with words on the side that has room."""
    import altair as alt

    fitted = drawn_on("fit").transform_calculate(x="datum.xmin")
    side = {"align": alt.expr("datum.right ? 'right' : 'left'"), "dx": alt.expr("datum.right ? -5 : 5")}
    words = {"fill": "var(--ink)", "fontSize": 11, "baseline": "top", **side}
    return [
        fitted.mark_rule(stroke="var(--fit)", strokeDash=[4, 4], strokeWidth=1.5).encode(x=_X),
        fitted.mark_text(**words).encode(x=_X, y=alt.value(2), text="words:N"),
    ]


def _ccdf() -> Node:
    y = _log_axis("y", "share ≥ λ")
    curve = drawn_on("matrix").transform_flatten(["x", "y"])
    line = curve.mark_line(stroke="var(--accent)", strokeWidth=2, strokeJoin="round").encode(x=_X, y=y, order=_AS_GIVEN)
    layers = [line, _law(drawn_on("fit"), "datum.begin", "datum.low", y), *_xmin()]
    return _chart(layers, 230, "{name}: share of eigenvalues from λ on, log-log", _SPECTRUM)


def _density() -> Node:
    """Where there are few eigenvalues, ``together`` bins are one: each is to hold some."""
    import altair as alt

    y = _log_axis("y", "density over log₁₀ λ")
    fit = ["alpha", "xmin", "begin", "top"]

    def bins(rows: str) -> altair.Chart:
        return (
            drawn_on(rows)
            .transform_flatten(["bins"])
            .transform_window(number="row_number()")
            .transform_calculate(bin="floor((datum.number - 1) / datum.together)")
            .transform_aggregate(share="sum(bins)", groupby=["bin", "least", "width", *fit])
            .transform_filter("datum.share > 0")
            .transform_calculate(
                x="pow(10, datum.least + datum.bin * datum.width)",
                x2="pow(10, datum.least + (datum.bin + 0.94) * datum.width)",
                y="datum.share / datum.width",
            )
            .transform_joinaggregate(lowest="min(y)")
            .transform_calculate(floor="datum.lowest / 2")
        )

    bars = bins("matrix").mark_rect(opacity=0.6, fill="var(--accent)").encode(x=_X, x2="x2", y=y, y2="floor")
    edge = (
        drawn_on("edge")
        .transform_calculate(x="datum.edge")
        .mark_rule(stroke="var(--edge)", strokeDash=[2, 3], strokeWidth=1.5)
        .encode(x=_X)
    )
    once = bins("fit").transform_window(number="row_number()").transform_filter(alt.datum.number == 1)
    law = _law(once, "datum.begin * (datum.alpha - 1) * LN10", "datum.floor", y)
    label = "{name}: density of eigenvalues, log-log"
    return _chart([bars, edge, law, *_xmin()], 230, label, _SPECTRUM)


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
