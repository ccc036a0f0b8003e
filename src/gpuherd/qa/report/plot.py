"""Plots for papers of an evaluation: ROC and rejection curves of some measures, and their AUROCs with intervals.

The same evaluation gives the same picture. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.qa.evaluation.result import ByJudge, MeasureResult, RunEvaluation
from gpuherd.report.charts import BLUE, GREY, LINES, blank_figure, label_axes, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CURVES = 6
MOST_BARS = 60


def evaluation_figure(evaluation: RunEvaluation) -> Figure:
    """A row a judging: ROC curves, accuracy against the share of answers kept, and AUROCs with their intervals.

    Curves are of the measures with the highest AUROC and of the one that others are compared with, at most MOST_CURVES.
    Weightings of tokens are left out where anything else was evaluated.

    Raises:
        UsageError: under no judging is there an AUROC.
        MissingExtra: matplotlib is not installed.
    """
    judges = [judge for judge in evaluation.judges if any(each.auroc.value is not None for each in judge.measures)]
    if not judges:
        raise UsageError("nothing to plot: no judging has both right and wrong answers with a score")
    heights = [max(3.6, 1.0 + 0.17 * min(MOST_BARS, len(_ranked(judge)))) for judge in judges]
    figure = blank_figure(12.5, sum(heights) + 0.3)
    rows = figure.subplots(len(judges), 3, squeeze=False, height_ratios=heights)
    for judge, (roc, rejection, bars) in zip(judges, rows, strict=True):
        chosen = curves_of(judge, evaluation.settings.against)
        _draw_roc(roc, chosen)
        _draw_rejection(rejection, chosen)
        _draw_aurocs(bars, _ranked(judge)[:MOST_BARS], evaluation.settings.confidence)
        title = f"{plain_text(judge.judging)}: {judge.right} right, {judge.wrong} wrong"
        if not any(each.conclusive for each in judge.measures):  # a picture goes where no page explains it
            title += "; too few of one class to conclude anything"
        roc.set_title(title, fontsize=9, loc="left")
    figure.suptitle(plain_text(evaluation.run_id, 90), fontsize=10)
    return figure


def curves_of(judge: ByJudge, against: str) -> list[MeasureResult]:
    """The measures whose curves are drawn: the best, and ``against`` last."""
    reference = [each for each in judge.measures if each.name == against and each.auroc.value is not None]
    # Of measures that order the answers alike, as NLL a token and perplexity do, one curve is enough.
    seen = {each.roc for each in reference}
    best = []
    for each in _ranked(judge):
        if each.roc not in seen:
            seen.add(each.roc)
            best.append(each)
    return [*best[: MOST_CURVES - len(reference)], *reference]


def _ranked(judge: ByJudge) -> list[MeasureResult]:
    """The measures with an AUROC, the best first; without weightings of tokens where anything else was evaluated."""
    measures = [each for each in judge.measures if each.weighting is None] or judge.measures
    known = [(each.auroc.value, each) for each in measures if each.auroc.value is not None]
    return [each for _, each in sorted(known, key=lambda pair: -pair[0])]


def _draw_roc(axes: Axes, chosen: Sequence[MeasureResult]) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    for each, (colour, stroke) in zip(chosen, LINES, strict=False):
        label = f"{plain_text(each.name)} {each.auroc.value:.3f}"
        axes.plot([p.x for p in each.roc], [p.y for p in each.roc], color=colour, linestyle=stroke, label=label)
    label_axes(axes, "right answers flagged", "wrong answers flagged")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_box_aspect(1)
    axes.legend(fontsize=7, loc="lower right", title="AUROC", title_fontsize=7)


def _draw_rejection(axes: Axes, chosen: Sequence[MeasureResult]) -> None:
    for each, (colour, stroke) in zip(chosen, LINES, strict=False):
        axes.plot([p.x for p in each.rejection], [p.y for p in each.rejection], color=colour, linestyle=stroke)
    if chosen:
        axes.axhline(chosen[0].right / chosen[0].scored, color=GREY, linewidth=0.8, linestyle=":")
    label_axes(axes, "share of answers kept, the most certain first", "accuracy of these")
    axes.set_xlim(0, 1)


def _draw_aurocs(axes: Axes, ranked: Sequence[MeasureResult], confidence: float) -> None:
    axes.axvline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    for place, each in enumerate(ranked):
        value, interval = each.auroc.value, each.auroc.interval
        if value is None:
            continue
        if interval is not None:
            axes.plot([interval.low, interval.high], [place, place], color=BLUE, linewidth=1.2)
        # Hollow: too few answers of one class to conclude anything.
        axes.plot([value], [place], "o", color=BLUE, markersize=4, fillstyle="full" if each.conclusive else "none")
    axes.set_yticks(range(len(ranked)), [plain_text(each.name, 36) for each in ranked])
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    label_axes(axes, f"AUROC with its {100 * confidence:g} % interval", "")
