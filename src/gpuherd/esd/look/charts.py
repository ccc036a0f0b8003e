"""The charts of the page of spectra, declared; the page's script gives them the rows of the model that is looked at."""

from __future__ import annotations

from typing import Any

from gpuherd.report.charts import drawn_on, histogram_specification, specification


def specifications() -> dict[str, dict[str, Any]]:
    """Vega-Lite specifications by name, each without rows and with plain axes. Raises MissingExtra."""
    return {"plot": _plot(), "histogram": histogram_specification(200)}


def _plot() -> dict[str, Any]:
    """Shaded heights, bars, lines, upright rules with words, and points, each in the colours that its rows name."""
    import altair as alt

    tint, inside = alt.Stroke("colour:N", scale=None), alt.Fill("colour:N", scale=None)
    dash, width = alt.StrokeDash("dash:N", scale=None), alt.StrokeWidth("width:Q", scale=None)
    words = {"fill": "var(--ink)", "fontSize": 11, "baseline": "top"}
    layers = [
        drawn_on("shade").mark_rect(fill="var(--accent)", opacity=0.07).encode(y="y:Q", y2="y2"),
        drawn_on("bars").mark_rect(opacity=0.6).encode(inside, x="x:Q", x2="x2", y="y:Q", y2="y2"),
        drawn_on("lines")
        .mark_line(strokeJoin="round")
        .encode(tint, dash, width, alt.Detail("series:N"), x="x:Q", y="y:Q", order={"value": 0}),
        drawn_on("rules").mark_rule(strokeWidth=1.5).encode(tint, dash, x="x:Q"),
        drawn_on("dots")
        .mark_point(size=22, opacity=1, strokeWidth=0)
        .encode(inside, x="x:Q", y="y:Q", tooltip="tip:N"),
        drawn_on("words").mark_text(align="left", dx=5, **words).encode(x="x:Q", y=alt.value(2), text="text:N"),
        drawn_on("words_left").mark_text(align="right", dx=-5, **words).encode(x="x:Q", y=alt.value(2), text="text:N"),
    ]
    return specification(alt.layer(*layers), 230)
