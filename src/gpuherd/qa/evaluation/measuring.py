"""One measure under one judging: every figure with its interval, the curves, and where in an answer it tells. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gpuherd.qa.bootstrap import BootstrapPlan, Floats, Statistics, Weights, as_they_are, figures
from gpuherd.qa.evaluation import metrics
from gpuherd.qa.evaluation.metrics import FOLDS, Compared, Ranked, calibrated, compared, ece_figure
from gpuherd.qa.evaluation.result import (
    AtCoverage,
    AtPosition,
    AurocDifference,
    CurvePoint,
    EvaluateSettings,
    Histogram,
    HolmCorrected,
    MeasureResult,
    PrefixAuroc,
    weighting_of,
)
from gpuherd.qa.intervals import FEWEST_OF_A_CLASS, Figure, Interval, auroc_interval, holm, holm_divisors, wilson
from gpuherd.qa.measures.evidence import ScoredText

Scores = Sequence[float | None]
Labels = Sequence[bool | None]

MOST_POINTS = 200  # of a curve
LEAST_BINS, MOST_BINS = 5, 30  # of a histogram
_HALF = 0.5  # the most that is rejected in the second PRR
CLOSED_FORM = "interval from the counts alone"
BY_DELONG = "interval by DeLong's variance"
FEW = "resamples of so few answers of a class promise too much"


def plan_of(settings: EvaluateSettings) -> BootstrapPlan:
    """How the intervals of an evaluation are made."""
    return BootstrapPlan(settings.bootstrap, settings.confidence, settings.interval, settings.seed)


def measure_result(
    name: str, scores: Scores, wrong: Labels, undefined: Mapping[str, int], settings: EvaluateSettings
) -> MeasureResult:
    """The figures of a measure over the answers that have a label and a score.

    Args:
        scores: of each question; None: undefined. Higher is more uncertain.
        wrong: of each question whether the answer is wrong; None: no label.
        undefined: why scores are None, with counts.
    """
    places = both_known(scores, wrong)
    values = np.array([scores[at] for at in places], dtype=np.float64)
    labels = np.array([wrong[at] for at in places], dtype=bool)
    right, wrongs = int((~labels).sum()), int(labels.sum())
    found, closed = _figures(values, labels, settings)
    curves = grouped_as_they_are(values, labels) if values.size else None
    return MeasureResult(
        name=name,
        right=right,
        wrong=wrongs,
        undefined=undefined,
        auroc=found["auroc"],
        auroc_closed_form=closed,
        auprc=found["auprc"],
        base_rate=wrongs / values.size if values.size else None,
        prr=found["prr"],
        prr_half=found["prr_half"],
        aurac=found["aurac"],
        ece=found["ece"],
        at=tuple(AtCoverage(coverage, found[_at(coverage)]) for coverage in settings.coverages),
        roc=_roc(curves) if curves is not None and right and wrongs else (),
        rejection=() if curves is None else _rejection_curve(curves),
        histogram=None if curves is None else histogram(values, labels),
    )


def both_known(scores: Scores, wrong: Labels) -> list[int]:
    """The places of the answers that have a label and a score."""
    return [
        at
        for at, (score, label) in enumerate(zip(scores, wrong, strict=True))
        if score is not None and label is not None
    ]


def auroc_figure(values: Floats, labels: NDArray[np.bool_], settings: EvaluateSettings) -> Figure:
    """AUROC alone, with its interval; None with a class missing."""
    missing = one_class(labels)
    if missing is not None:
        return Figure(None, note=missing)
    order = metrics.ranked(values, labels)

    def statistic(weights: Weights) -> dict[str, Floats]:
        return {"auroc": metrics.auroc(metrics.grouped(order, weights))}

    found = figures(statistic, values.size, plan_of(settings))["auroc"]
    return _with_closed_form(found, labels, settings)


def differences(
    columns: Mapping[str, Scores],
    wrong: Labels,
    settings: EvaluateSettings,
    names: Callable[[Sequence[str]], Iterable[str]],
) -> tuple[AurocDifference, ...]:
    """AUROC of every measure minus that of ``settings.against``, which must be one of them.

    Args:
        names: passes the measures' names on, and may show progress.
    """
    base = columns[settings.against]
    rows = [
        _difference(name, columns[name], base, wrong, settings)
        for name in names([*columns])
        if name != settings.against
    ]
    every = _corrected(rows, settings.confidence)
    measures = _corrected([row for row in rows if weighting_of(row[0].name) is None], settings.confidence)
    return tuple(
        replace(
            row,
            p_holm=None if row.name not in every else every[row.name].p,
            among_all=every.get(row.name),
            among_measures=measures.get(row.name),
        )
        for row, _ in rows
    )


def _corrected(rows: Sequence[tuple[AurocDifference, Compared | None]], confidence: float) -> dict[str, HolmCorrected]:
    """The differences of a family that have a p, by name."""
    p_values = [row.p for row, _ in rows]
    steps = zip(rows, holm(p_values), holm_divisors(p_values, 1 - confidence), strict=True)
    return {
        row.name: HolmCorrected(p, delong.interval(1 - (1 - confidence) / divisor))
        for (row, delong), p, divisor in steps
        if delong is not None and p is not None and divisor is not None
    }


def one_class(labels: NDArray[np.bool_]) -> str | None:
    """Why there is no AUROC: no answer, or all of one class; None where there are both."""
    if labels.size == 0:
        return "no answer has a label and a score"
    if labels.all() or not labels.any():
        return f"all {labels.size} answers are {'wrong' if labels[0] else 'right'}"
    return None


def histogram(values: Floats, labels: NDArray[np.bool_]) -> Histogram:
    """Scores by class in equally wide bins over the middle 98 % of the scores, as many as the root of their number; the
    outermost reach to the extremes, so that one huge perplexity does not put all others into one bin. Scores that are
    all equal make one bin."""
    bins = min(max(round(values.size**0.5), LEAST_BINS), MOST_BINS)
    low, first, last, high = (float(each) for each in np.quantile(values, (0, 0.01, 0.99, 1)))
    # Scores that differ by less than a float64 can divide so finely would make bins without any width.
    edges = np.unique(np.concatenate(([low], np.linspace(first, last, bins + 1)[1:-1], [high])))
    if edges.size == 1:
        return Histogram((low, high), (int((~labels).sum()),), (int(labels.sum()),))
    right, wrong = (np.histogram(values[chosen], edges)[0] for chosen in (~labels, labels))
    return Histogram(tuple(map(float, edges)), tuple(map(int, right)), tuple(map(int, wrong)))


def grouped_as_they_are(values: Floats, labels: NDArray[np.bool_]) -> metrics.Grouped:
    """The answers by score, each counted once."""
    return metrics.grouped(metrics.ranked(values, labels), as_they_are(values.size))


def _figures(
    values: Floats, labels: NDArray[np.bool_], settings: EvaluateSettings
) -> tuple[dict[str, Figure], Interval | None]:
    """Every figure by name, and the closed-form interval of the AUROC."""
    missing = one_class(labels)
    if missing is not None:
        nothing = Figure(None, note=missing)
        found = dict.fromkeys(("auroc", "auprc", "prr", "prr_half", "ece"), nothing)
        # All answers alike: whichever are kept, the accuracy is that of all of them.
        alike = nothing if labels.size == 0 else Figure(float(not labels[0]), note=missing)
        return found | dict.fromkeys(("aurac", *map(_at, settings.coverages)), alike), None
    plan = plan_of(settings)
    found = figures(_ranking_statistics(metrics.ranked(values, labels), settings.coverages), values.size, plan)
    found["auroc"] = _with_closed_form(found["auroc"], labels, settings)
    for coverage in settings.coverages:
        name = _at(coverage)
        found[name] = _with_wilson(found[name], metrics.kept_of(values.size, coverage), settings)
    found["ece"] = _ece(values, labels, settings)
    area = found["auroc"].value
    return found, None if area is None else _closed_form(area, labels, settings)


def _ranking_statistics(order: Ranked, coverages: Sequence[float]) -> Statistics:
    def statistics(weights: Weights) -> dict[str, Floats]:
        groups = metrics.grouped(order, weights)
        kept = metrics.rejection(groups)
        return {
            "auroc": metrics.auroc(groups),
            "auprc": metrics.auprc(groups),
            "prr": kept.ratio(),
            "prr_half": kept.ratio(_HALF),
            "aurac": kept.area,
        } | {_at(coverage): kept.at(coverage) for coverage in coverages}

    return statistics


def _at(coverage: float) -> str:
    return f"accuracy at {coverage!r}"


def _ece(values: Floats, labels: NDArray[np.bool_], settings: EvaluateSettings) -> Figure:
    confidence = calibrated(values, ~labels, method=settings.calibration, seed=settings.seed)
    if confidence is None:
        return Figure(None, note=f"calibration needs {FOLDS} answers of each class")
    return ece_figure(confidence, ~labels, plan_of(settings))


def _closed_form(area: float, labels: NDArray[np.bool_], settings: EvaluateSettings) -> Interval:
    return auroc_interval(area, int(labels.sum()), int((~labels).sum()), settings.confidence)


def _with_closed_form(found: Figure, labels: NDArray[np.bool_], settings: EvaluateSettings) -> Figure:
    """The interval from the counts, where resamples can't show how uncertain an AUROC is: they never differ, most have
    one class, or a class is so small that their intervals hold the truth too seldom (90 of 100 times with 8 answers;
    docs/evaluation.md)."""
    if found.value is None:
        return found
    if found.interval is not None and not _few(labels):
        return found
    interval = _closed_form(found.value, labels, settings)
    return replace(found, interval=interval, note=f"{CLOSED_FORM}: {found.note or FEW}")


def _few(labels: NDArray[np.bool_]) -> bool:
    return bool(min(labels.sum(), (~labels).sum()) < FEWEST_OF_A_CLASS)


def _with_wilson(found: Figure, kept: int, settings: EvaluateSettings) -> Figure:
    """With Wilson's interval if it has none: the same value in every resample does not make it certain."""
    if found.value is None or found.interval is not None:
        return found
    interval = wilson(round(found.value * kept), kept, settings.confidence)
    return replace(found, interval=interval, note=f"Wilson's interval of {kept} answers: {found.note}")


def _difference(
    name: str, scores: Scores, base: Scores, wrong: Labels, settings: EvaluateSettings
) -> tuple[AurocDifference, Compared | None]:
    """The difference, not corrected yet, and what its p is from."""
    places = [at for at in both_known(scores, wrong) if base[at] is not None]
    one, other = (np.array([column[at] for at in places], dtype=np.float64) for column in (scores, base))
    labels = np.array([wrong[at] for at in places], dtype=bool)
    missing = one_class(labels)
    if missing is not None:
        return AurocDifference(name, len(places), Figure(None, note=missing), None, None), None
    orders = [metrics.ranked(values, labels) for values in (one, other)]

    def statistic(weights: Weights) -> dict[str, Floats]:
        mine, theirs = (metrics.auroc(metrics.grouped(order, weights)) for order in orders)
        return {"difference": mine - theirs}

    found = figures(statistic, len(places), plan_of(settings))["difference"]
    delong = compared(one, other, labels)
    if _few(labels) or found.interval is None:
        interval = None if delong is None else delong.interval(settings.confidence)
        why = found.note or FEW
        found = replace(found, interval=interval, note=why if interval is None else f"{BY_DELONG}: {why}")
    return AurocDifference(name, len(places), found, None if delong is None else delong.p, None), delong


def _roc(curves: metrics.Grouped) -> tuple[CurvePoint, ...]:
    x, y = metrics.roc_points(curves)
    return tuple(CurvePoint(float(x[at]), float(y[at])) for at in metrics.thinned(x.size, MOST_POINTS))


def _rejection_curve(curves: metrics.Grouped) -> tuple[CurvePoint, ...]:
    accuracy = metrics.rejection(curves).accuracy[0]
    n = accuracy.size
    return tuple(CurvePoint((at + 1) / n, float(accuracy[at])) for at in metrics.thinned(n, MOST_POINTS))


# --- where in an answer the uncertainty is ----------------------------------------------------------------------------
#
# AUROC from the first tokens alone, and NLL place by place. ``nllSAR`` (phases 1.5 and 1.6) asks how many tokens it
# takes to tell a wrong answer. An answer that is shorter than a prefix is its own prefix; how many are, is said with
# the figures, since beyond them nothing new is measured.


MOST_POSITIONS = 512  # beyond that hardly any answer has a token, and no page shows it


def prefixes(
    answers: Sequence[ScoredText | None], wrong: Labels, settings: EvaluateSettings
) -> tuple[PrefixAuroc, ...]:
    """AUROC of the NLL of the first tokens, for each length of ``settings.prefixes``.

    Args:
        answers: of each question, with all log-probs known; None for one that has not. Those without tokens are left
            out too.
        wrong: of each question whether its answer is wrong; None: no label.
    """
    chosen, labels = _with_tokens(answers, wrong)
    found = []
    for length in settings.prefixes:
        tokens = np.array([min(len(answer.log_probs), length) for answer in chosen])
        mean = np.array([-math.fsum(answer.log_probs[:length]) for answer in chosen]) / tokens
        figures_of = [auroc_figure(values, labels, settings) for values in (mean * tokens, mean)]
        found.append(PrefixAuroc(length, len(chosen), int((tokens < length).sum()), *figures_of))
    return tuple(found)


def positions(
    answers: Sequence[ScoredText | None], wrong: Labels, settings: EvaluateSettings
) -> tuple[AtPosition, ...]:
    """Mean NLL at each position, of right and of wrong answers apart; as far as two answers of any class reach."""
    chosen, labels = _with_tokens(answers, wrong)
    if not chosen:
        return ()
    longest = max(len(answer.log_probs) for answer in chosen)
    table = np.full((len(chosen), min(longest, MOST_POSITIONS)), np.nan)  # NaN where there is no token
    for row, answer in zip(table, chosen, strict=True):
        some = answer.log_probs[: row.size]
        row[: len(some)] = np.negative(some)
    found = []
    for at, column in enumerate(table.T):
        right, wrongs = (column[~np.isnan(column) & (labels == label)] for label in (False, True))
        if right.size + wrongs.size < 2:
            break
        means = [mean_figure(values, settings.confidence) for values in (right, wrongs)]
        found.append(AtPosition(at, right.size, wrongs.size, *means))
    return tuple(found)


def mean_figure(values: Floats, confidence: float) -> Figure:
    """The mean with Student's interval; no interval of fewer than two values, nothing of none."""
    if values.size == 0:
        return Figure(None, note="no answer is that long")
    mean = float(values.mean())
    if values.size == 1:
        return Figure(mean, note="one answer has no interval")
    from scipy.special import stdtrit

    reach = float(stdtrit(values.size - 1, (1 + confidence) / 2) * values.std(ddof=1) / np.sqrt(values.size))
    return Figure(mean, Interval(mean - reach, mean + reach))


def _with_tokens(answers: Sequence[ScoredText | None], wrong: Labels) -> tuple[list[ScoredText], np.ndarray]:
    pairs = [
        (answer, label)
        for answer, label in zip(answers, wrong, strict=True)
        if answer is not None and answer.log_probs and label is not None
    ]
    return [answer for answer, _ in pairs], np.array([label for _, label in pairs], dtype=bool)
