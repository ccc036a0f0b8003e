"""Plots for papers of a run: what is earned against the distance from the reference, and learning curves.

The same results give the same picture. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.posttrain.eval.results import REFERENCE
from gpuherd.posttrain.eval.tables import Comparison, Gathered, Row
from gpuherd.posttrain.report.reading import RunReport, Training
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
    comparisons = [each for each in run.gathered.comparisons if _sweeps(run.gathered, each)]
    trainings = run.trainings[:MOST_LINES]
    names = [name for name in _LEARNING if any(name in each.series for each in trainings)]
    if trainings and not names:
        names = sorted({name for each in trainings for name in each.series})[:_ACROSS]
    panels = len(comparisons) + len(names)
    if not panels:
        raise UsageError("nothing to plot: no evaluation has its distance from the reference, and no training a curve")
    down = -(-panels // _ACROSS)
    figure = blank_figure(4.3 * min(_ACROSS, panels), 3.3 * down + 0.3)
    axes = list(figure.subplots(down, min(_ACROSS, panels), squeeze=False).flat)
    for place, comparison in zip(axes, comparisons, strict=False):
        _draw_divergence(place, comparison, _sweeps(run.gathered, comparison))
    for place, name in zip(axes[len(comparisons) :], names, strict=False):
        _draw_learning(place, name, trainings)
    for place in axes[panels:]:
        place.set_axis_off()
    figure.suptitle(plain_text(run.title, 90), fontsize=10)
    return figure


def _sweeps(gathered: Gathered, comparison: Comparison) -> dict[str, list[Row]]:
    """The rows of each method's last round, by KL, behind the reference."""
    found: dict[str, list[Row]] = {}
    for row in gathered.rows:
        same = (row.about.family, row.about.evaluated_on) == (comparison.family, comparison.evaluated_on)
        named = row.about.algorithm == REFERENCE or row.about.dataset == comparison.dataset
        if same and named and {"kl", comparison.metric} <= row.figures.keys() and row.figures["kl"].value is not None:
            found.setdefault(row.about.algorithm, []).append(row)
    start = found.pop(REFERENCE, [])[:1]
    for name, rows in found.items():
        last = max(-1 if row.about.round is None else row.about.round for row in rows)
        kept = [row for row in rows if (-1 if row.about.round is None else row.about.round) == last]
        found[name] = sorted([*start, *kept], key=lambda row: row.figures["kl"].value or 0.0)
    return found


def _draw_divergence(axes: Axes, comparison: Comparison, sweeps: dict[str, list[Row]]) -> None:
    for (name, rows), (colour, stroke) in zip(sorted(sweeps.items()), cycle(LINES), strict=False):
        kl, height = ([row.figures[key] for row in rows] for key in ("kl", comparison.metric))
        x, y = ([each.value or 0.0 for each in figures] for figures in (kl, height))
        reach = [
            [
                (0.0, 0.0)
                if each.interval is None or each.value is None
                else (max(0.0, each.value - each.interval.low), max(0.0, each.interval.high - each.value))
                for each in figures
            ]
            for figures in (kl, height)
        ]
        xerr, yerr = ([[low for low, _ in ends], [high for _, high in ends]] for ends in reach)
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
