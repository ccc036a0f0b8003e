"""Plots for papers of a run: what is earned against the distance from the reference, and learning curves.

The same results give the same picture. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.posttrain.eval.tables import Comparison, Row
from gpuherd.posttrain.report.figures import curves_of, ends_of, figure_of
from gpuherd.posttrain.report.reading import RunReport, Training
from gpuherd.qa.intervals import Figure as Estimate
from gpuherd.report.charts import LINES, blank_figure, label_axes, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 8
_ACROSS = 3
_LEARNING = ("reward", "loss", "kl", "entropy", "value_loss")


def run_figure(run: RunReport) -> Figure:
    """Metric against KL for each family and data set that can be compared, then the figures of the first MOST_LINES
    trainings by step.

    Raises:
        UsageError: there is neither.
        MissingExtra: matplotlib is not installed.
    """
    curves = [(each, found) for each in run.gathered.comparisons if (found := curves_of(run, each))]
    trainings = run.trainings[:MOST_LINES]
    names = [name for name in _LEARNING if any(name in each.series for each in trainings)]
    if trainings and not names:
        names = sorted({name for each in trainings for name in each.series})[:_ACROSS]
    panels = len(curves) + len(names)
    if not panels:
        raise UsageError("nothing to plot: no evaluation has its distance from the reference, and no training a curve")
    down = -(-panels // _ACROSS)
    figure = blank_figure(4.3 * min(_ACROSS, panels), 3.3 * down + 0.3)
    axes = list(figure.subplots(down, min(_ACROSS, panels), squeeze=False).flat)
    for place, (comparison, found) in zip(axes, curves, strict=False):
        _draw_divergence(place, comparison, found)
    for place, name in zip(axes[len(curves) :], names, strict=False):
        _draw_learning(place, name, trainings)
    for place in axes[panels:]:
        place.set_axis_off()
    figure.suptitle(plain_text(run.title, 90), fontsize=10)
    return figure


def _draw_divergence(axes: Axes, comparison: Comparison, sweeps: dict[str, list[Row]]) -> None:
    for (name, rows), (colour, stroke) in zip(sorted(sweeps.items()), cycle(LINES), strict=False):
        (x, xerr), (y, yerr) = (
            _with_errors([figure_of(row, key) for row in rows]) for key in ("kl", comparison.metric)
        )
        axes.errorbar(
            x, y, yerr=yerr, xerr=xerr, color=colour, linestyle=stroke, marker="o", markersize=3, linewidth=1.2,
            elinewidth=0.8, label=plain_text(name, 24),
        )  # fmt: skip
    if comparison.metric == "pass@1":
        # As the page: where all are small, only as far as they go.
        figures = [row.figures["pass@1"] for rows in sweeps.values() for row in rows]
        most = max((each.interval.high if each.interval else each.value or 0.0 for each in figures), default=1.0)
        axes.set_ylim(0, 1.06 * most if 0 < most < 0.4 else 1)
    axes.set_title(plain_text(f"{comparison.family}, {comparison.evaluated_on}", 48), fontsize=9, loc="left")
    label_axes(axes, "KL from the reference, nats", comparison.metric)
    axes.legend(fontsize=6)


def _with_errors(figures: Sequence[Estimate]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """The values, and how far their intervals reach below and above them."""
    values = [each.value or 0.0 for each in figures]
    ends = [ends_of(each) or (value, value) for each, value in zip(figures, values, strict=True)]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)]
    return values, (below, [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)])


def _draw_learning(axes: Axes, name: str, trainings: Sequence[Training]) -> None:
    from matplotlib.ticker import MaxNLocator

    for training, (colour, stroke) in zip(trainings, LINES, strict=False):
        points = training.series.get(name)
        if not points:
            continue
        label = plain_text(training.name, 32)
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=colour, linestyle=stroke, linewidth=1.2, label=label,
            marker="o" if len(points) == 1 else None, markersize=3,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(plain_text(name), fontsize=9, loc="left")
    label_axes(axes, "step", plain_text(name))
    axes.legend(fontsize=6)
