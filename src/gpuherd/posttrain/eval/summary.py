"""Gathered results in words: the table that an experiment ends with, and the same as JSON values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpuherd.columns import Column, Fitted, fitted
from gpuherd.errors import printable
from gpuherd.lm.backend import beyond_rounding
from gpuherd.posttrain.eval.results import FORMAT, Estimator
from gpuherd.posttrain.eval.tables import Gathered, Row
from gpuherd.qa.intervals import Figure, Interval
from gpuherd.runs import records

MOST_SENTENCES = 12
_NAMES = frozenset({"algorithm", "data set", "model", "round", "eta"})
_COLUMNS = (
    Column("algorithm", 0),
    Column("data set", 4, middle=True),
    Column("model", 5, middle=True),
    Column("round", 2, right=True),
    Column("eta", 3, right=True),
    Column("pass@1", 0, right=True),
    Column("reward", 0, right=True),
    Column("KL (nats)", 1, right=True),
    Column("majority", 6, right=True),
    Column("problems", 7, right=True),
    Column("seeds", 8, right=True),
    Column("tok/s", 9, right=True),
    Column("GPU-h", 10, right=True),
)


def summary_table(gathered: Gathered, width: int | None) -> Fitted:
    """A line for each policy at its own eta, in so many columns; what there is no room for is named. Columns that no
    policy has anything in are left out, and rewards that are the shares of right completions again."""
    rows = [_words(row) for row in gathered.summary]
    again = all(_value(row, "pass@1") == _value(row, "reward") for row in gathered.summary)
    kept = [
        place
        for place, column in enumerate(_COLUMNS)
        if not rows or (any(row[place] != "-" for row in rows) and not (again and column.heading == "reward"))
    ]
    # What tells two lines apart stays, whatever else there is no room for.
    apart = {place for place in kept if _COLUMNS[place].heading in _NAMES and len({row[place] for row in rows}) > 1}
    columns = [replace(_COLUMNS[place], rank=-1) if place in apart else _COLUMNS[place] for place in kept]
    return fitted(columns, [[row[place] for place in kept] for row in rows], width)


def headline(gathered: Gathered) -> str:
    """What stands below the table: what its figures are."""
    share = f"{100 * gathered.confidence:g} %"
    kinds = {each.estimator for each in gathered.summary if each.estimator is not None}
    estimated = sorted(kinds - {Estimator.EXACT.value})
    drawn = sorted({each.drawn for each in gathered.summary if each.drawn is not None and each.estimator is not None})
    how = f"; KL estimated by {' and '.join(estimated)}" if estimated else "; KL is exact" if kinds else ""
    if drawn and kinds:
        laws = how if estimated else "; KL is summed exactly over the vocabulary, at temperature 1"
        how = f"{laws}, along completions {' and '.join(drawn)}: not the divergence of the models' own laws"
    ties = {each.tie for each in gathered.summary if _majority(each) is not None}
    tie = f"; ties of majority votes by the rule {' and '.join(sorted(ties))}" if ties else ""
    return f"[low, high]: {share} intervals by resampling problems (and seeds, where there are several){how}{tie}"


def clear_differences(gathered: Gathered, most: int = MOST_SENTENCES) -> list[str]:
    """A sentence for each two methods whose difference is beyond chance (Holm-corrected p below 5 %); the first so
    many, and how many there are more."""
    found = []
    for comparison in gathered.comparisons:
        where = f"{comparison.family}, {comparison.evaluated_on}"
        for each in comparison.differences:
            if each.p_holm is not None and each.p_holm < 0.05 and each.difference.value is not None:
                more, less = (each.one, each.other) if each.difference.value > 0 else (each.other, each.one)
                by = f"{abs(each.difference.value):.3f}"
                found.append(
                    printable(
                        f"{where}: {more} is above {less} by {by} in {comparison.metric} "
                        f"(p = {each.p_holm:.2g} by {each.unit}, corrected)"
                    )
                )
    left = len(found) - most
    return [*found[:most], *([f"… and {left} more clear differences: gpuherd report shows them"] if left > 0 else [])]


def unmoved_lines(gathered: Gathered) -> list[str]:
    """A sentence for each method that has hardly moved from the reference."""
    return [
        printable(
            f"{each.family}, {each.evaluated_on}: {method} has hardly moved from the reference (KL at most "
            f"{beyond_rounding(kl):.2g} nats), and is compared with no other at equal KL"
        )
        for each in gathered.comparisons
        for method, kl in each.unmoved.items()
    ]


def json_values(gathered: Gathered) -> dict[str, Any]:
    """All of it as JSON values."""
    return {"format": FORMAT, **records.jsonable(gathered)}


def figure_words(figure: Figure | None, digits: int = 3) -> str:
    """A figure with its interval: ``0.812 [0.790, 0.831]``; ``-`` where it is not known.

    >>> from gpuherd.qa.intervals import Interval
    >>> figure_words(Figure(0.5, Interval(0.25, 0.75))), figure_words(Figure(None)), figure_words(None)
    ('0.500 [0.250, 0.750]', '-', '-')
    >>> figure_words(Figure(7.4e-7)), figure_words(Figure(0.02, Interval(-0.001, 0.04)), 2)
    ('7.4e-07', '0.02 [0.00, 0.04]')
    """
    if figure is None or figure.value is None:
        return "-"
    form = f"z.{digits}f" if figure.value == 0 or abs(figure.value) >= 10**-digits else "z.1e"
    ends = figure.interval
    tail = "" if ends is None else f" [{ends.low:{form}}, {ends.high:{form}}]"
    return f"{figure.value:{form}}{tail}"


def divergence(figure: Figure) -> Figure:
    """A KL divergence as it is shown, without what is rounding.

    >>> from gpuherd.qa.intervals import Interval
    >>> divergence(Figure(-4e-8, Interval(-5e-8, 3e-8)))
    Figure(value=0.0, interval=Interval(low=0.0, high=0.0), note=None, dropped=0)
    """
    ends = figure.interval
    return replace(
        figure,
        value=None if figure.value is None else beyond_rounding(figure.value),
        interval=None if ends is None else Interval(beyond_rounding(ends.low), beyond_rounding(ends.high)),
    )


def _words(row: Row) -> Sequence[str]:
    about, figures = row.about, row.figures
    return (
        printable(about.algorithm),
        printable(about.data),
        printable(about.family),
        "-" if about.round is None else str(about.round),
        "-" if row.eta is None else f"{row.eta:g}",
        figure_words(figures.get("pass@1")),
        figure_words(figures.get("reward")),
        figure_words(divergence(figures["kl"]) if "kl" in figures else None, 2),
        figure_words(_majority(row)),
        str(row.problems),
        str(len(row.seeds)),
        "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}",
        "-" if row.gpu_hours is None else f"{row.gpu_hours:.3g}",
    )


def _value(row: Row, name: str) -> float | None:
    return row.figures[name].value if name in row.figures else None


def _majority(row: Row) -> Figure | None:
    """maj@k of the largest k."""
    ks = [int(name.removeprefix("maj@")) for name in row.figures if name.startswith("maj@")]
    return row.figures[f"maj@{max(ks)}"] if ks else None
