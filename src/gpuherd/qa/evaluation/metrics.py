"""How well an order of answers tells wrong ones from right ones: AUROC, AUPRC, PRR, AURAC, accuracy at coverage.

Every figure is one of weighted answers, many weightings at once: the answers as they are, the resamples of a bootstrap
and the left-out ones of a jackknife go through the same lines. Answers with equal scores have no order: each figure is
the mean over all of theirs (for AUPRC, which has no such mean in use, they are flagged together, as scikit-learn does).

Wrong answers are the positives, a higher score means more uncertain. In these arrays a figure that is not defined for a
weighting (one class only) is NaN; ``bootstrap`` makes None of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuherd.qa.bootstrap import NO_SPREAD, BootstrapPlan, Floats, Weights, as_they_are, resamples
from gpuherd.qa.intervals import Figure, Interval

CountArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ranked:
    """Answers in groups of equal score, the least uncertain first.

    Attributes:
        order: places of the answers, (n,).
        starts: where in ``order`` each group begins, (groups,).
        wrong: 1 for a wrong answer, 0 for a right one, in ``order``, (n,).
    """

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    wrong: CountArray


@dataclass(frozen=True, slots=True)
class Grouped:
    """Of each weighting, how many right and wrong answers each group holds; both (weightings, groups)."""

    right: CountArray
    wrong: CountArray


@dataclass(frozen=True, slots=True)
class Rejection:
    """Accuracy among the k least uncertain answers, for every k from 1 to all; (weightings, answers)."""

    accuracy: Floats
    right: CountArray  # right answers in all, (weightings,)

    @property
    def area(self) -> Floats:
        """AURAC: the mean over all k, (weightings,)."""
        return self.mean_of_kept(1.0)

    def mean_of_kept(self, most_rejected: float) -> Floats:
        """The mean over the k that reject at most this share of the answers, all kept being the last of them."""
        return np.asarray(self.accuracy[:, -self.rejections(most_rejected) :].mean(axis=1))

    def rejections(self, most_rejected: float) -> int:
        """How many k those are: at least 1."""
        return max(int(most_rejected * self.accuracy.shape[1] + 1e-9), 1)

    def at(self, coverage: float) -> Floats:
        """Accuracy where this share is kept, the number rounded up; (weightings,)."""
        return np.asarray(self.accuracy[:, kept_of(self.accuracy.shape[1], coverage) - 1])

    def ratio(self, most_rejected: float = 1.0) -> Floats:
        """PRR (Malinin et al. 2017; the discrete form of Vashurin et al. 2025): the area above that of a random order,
        as a share of what the best order (all right answers first) gains. NaN where no order is better than another.
        """
        n = self.accuracy.shape[1]
        kept = np.arange(n - self.rejections(most_rejected) + 1, n + 1)
        best = np.minimum(self.right[:, None] / kept, 1.0).mean(axis=1)
        chance = self.right / n
        gain = best - chance
        # With one class, or nearly all right and few rejections, best and chance are the same up to rounding.
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(gain > 1e-12, (self.mean_of_kept(most_rejected) - chance) / gain, np.nan)


def ranked(scores: ArrayLike, wrong: ArrayLike) -> Ranked:
    """The order of answers by score.

    Args:
        scores: (n,), n >= 1; infinite ones are in order, NaN has none and is refused with ValueError.
        wrong: (n,), true for a wrong answer.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or np.isnan(values).any():
        raise ValueError("an order needs scores, and numbers")
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    starts = np.flatnonzero(np.concatenate(([True], in_order[1:] != in_order[:-1])))
    return Ranked(order, starts, np.asarray(wrong, dtype=np.int64)[order])


def grouped(order: Ranked, weights: NDArray[np.integer]) -> Grouped:
    """Counts of both classes by group.

    Args:
        weights: how often each answer counts, (weightings, n), in the answers' own order.
    """
    in_order = np.take(weights, order.order, axis=1).astype(np.int64, copy=False)
    wrong = in_order * order.wrong
    if order.starts.size == order.order.size:  # no two are equal, as is usual: nothing to add up
        return Grouped(in_order - wrong, wrong)
    every = np.add.reduceat(in_order, order.starts, axis=1)
    wrong = np.add.reduceat(wrong, order.starts, axis=1)
    return Grouped(every - wrong, wrong)


def auroc(groups: Grouped) -> Floats:
    """P(a wrong answer scores higher than a right one) + 1/2 P(they score the same): Mann and Whitney's U over the
    number of pairs. (weightings,); NaN with one class."""
    below = np.cumsum(groups.right, axis=1) - groups.right
    # Twice the sum is a whole number: exact, however many pairs there are.
    twice = np.sum(groups.wrong * (2 * below + groups.right), axis=1)
    pairs = groups.wrong.sum(axis=1) * groups.right.sum(axis=1)
    return _ratio(twice, 2 * pairs)


def auprc(groups: Grouped) -> Floats:
    """Average precision: the sum over thresholds of precision times the recall that it adds. (weightings,); NaN with
    one class."""
    wrong = np.cumsum(groups.wrong[:, ::-1], axis=1)
    flagged = np.cumsum((groups.wrong + groups.right)[:, ::-1], axis=1)
    precision = wrong / np.maximum(flagged, 1)
    found = groups.wrong.sum(axis=1)
    area = np.sum(groups.wrong[:, ::-1] * precision, axis=1)
    one_class = groups.right.sum(axis=1) == 0
    return np.where(one_class, np.nan, _ratio(area, found))


def rejection(groups: Grouped) -> Rejection:
    """Accuracy when the most uncertain answers are left out. All weightings must hold equally many answers.

    Within a group each answer counts as the group's mean: the mean over all orders of it.
    """
    every = groups.right + groups.wrong
    rows, n = every.shape[0], int(every[0].sum())
    if n == 0 or np.any(every.sum(axis=1) != n):
        raise ValueError("weightings of as many answers each, at least one")
    mean = groups.right / np.maximum(every, 1)
    each = np.repeat(mean.ravel(), every.ravel()).reshape(rows, n)
    kept = np.arange(1, n + 1)
    # Rounding must not lift an accuracy above 1.
    return Rejection(np.minimum(np.cumsum(each, axis=1) / kept, 1.0), groups.right.sum(axis=1))


def kept_of(n: int, coverage: float) -> int:
    """How many of n answers this share is, rounded up."""
    return max(int(np.ceil(coverage * n - 1e-9)), 1)


def roc_points(groups: Grouped) -> tuple[Floats, Floats]:
    """The ROC of the first weighting: shares of right and of wrong answers flagged, both from 0 to 1. Both classes must
    be there."""
    right, wrong = groups.right[0, ::-1], groups.wrong[0, ::-1]
    false_alarms = np.concatenate(([0], np.cumsum(right))) / right.sum()
    found = np.concatenate(([0], np.cumsum(wrong))) / wrong.sum()
    return false_alarms, found


def thinned(n: int, most: int) -> Sequence[int]:
    """At most ``most`` (2 or more) of the places 0 to n - 1, evenly spread, both ends among them."""
    if n <= most:
        return range(n)
    return [round(at * (n - 1) / (most - 1)) for at in range(most)]


def _ratio(above: ArrayLike, below: ArrayLike) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.true_divide(above, below), dtype=np.float64)


# --- is one measure better than another on the same answers? DeLong's test of two AUROCs ------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """The difference of two AUROCs of the same answers, by DeLong's variance.

    Attributes:
        difference: the first less the second.
        error: its standard error, above 0.
        freedom: degrees of freedom of that error.
    """

    difference: float
    error: float
    freedom: float

    @property
    def p(self) -> float:
        """Two-sided, of equal areas, by Student's t."""
        from scipy.special import stdtr

        return float(2 * stdtr(self.freedom, -abs(self.difference) / self.error))

    def interval(self, confidence: float) -> Interval:
        """The interval that goes with ``p``, cut at -1 and 1."""
        from scipy.special import stdtrit

        reach = float(stdtrit(self.freedom, (1 + confidence) / 2)) * self.error
        return Interval(max(self.difference - reach, -1.0), min(self.difference + reach, 1.0))


def placements(scores: ArrayLike, wrong: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Of each wrong answer the share of right ones below it, of each right one the share of wrong ones above it, equal
    ones half (DeLong et al. 1988, V10 and V01), in O(n log n) by ranks (Sun and Xu 2014)."""
    from scipy.stats import rankdata

    values = np.asarray(scores, dtype=np.float64)
    among_all = rankdata(values)
    n_wrong, n_right = int(wrong.sum()), int((~wrong).sum())
    of_wrong = (among_all[wrong] - rankdata(values[wrong])) / n_right
    of_right = 1 - (among_all[~wrong] - rankdata(values[~wrong])) / n_wrong
    return np.asarray(of_wrong), np.asarray(of_right)


def compared(one: ArrayLike, other: ArrayLike, wrong: ArrayLike) -> Compared | None:
    """Two scores of the same answers compared (DeLong et al. 1988), with the degrees of freedom of Welch and
    Satterthwaite: the variance is that of two means, and with 8 wrong answers a normal distribution calls one pair in
    ten different where one in twenty is meant.

    None where there is nothing to test: a class with fewer than two answers, or a difference without any variance (two
    scores that order the answers alike, or one that orders them perfectly and one that is always the same).
    """
    labels = np.asarray(wrong, dtype=bool)
    if min(labels.sum(), (~labels).sum()) < 2:
        return None
    first, second = placements(one, labels), placements(other, labels)
    apart = [mine - theirs for mine, theirs in zip(first, second, strict=True)]
    difference = float(apart[0].mean())
    parts = [(float(np.var(each, ddof=1)) / each.size, each.size - 1) for each in apart]
    variance = sum(part for part, _ in parts)
    if variance < 1e-24:
        return None
    return Compared(difference, variance**0.5, variance**2 / sum(part**2 / freedom for part, freedom in parts))


# How honest are confidences? Expected calibration error, of probabilities that were fitted on other answers.
#
# A raw score of uncertainty is no probability, and an ECE of one says nothing (a mean log-prob lies in no bin at
# all): it is calibrated first, each answer by a fit to the other folds, so that no answer helps to judge itself.

FOLDS = 5
BINS = 10


def ece_figure(confidence: ArrayLike, right: ArrayLike, plan: BootstrapPlan) -> Figure:
    """The calibration error of n answers (1 or more) with an interval of its own, the same for every ``plan.method``.

    Resampled errors are larger than the error that was found, as that is larger than the true one: noise adds to each
    bin's gap, and its sign is taken away. Quantiles of them, corrected or not, often don't even hold the value. But two
    errors differ by no more than their bins' gaps do, added up: so the lower end is the value less the quantile of how
    far resampled gaps are from those found. The upper end is the quantile of resampled errors; it is never too low,
    since each is at least the sum of its gaps with the signs that the true ones have, of which it is the interval.
    """
    n = np.size(confidence)
    found = _gaps(confidence, right, as_they_are(n))
    drawn = np.concatenate([_gaps(confidence, right, weights) for weights in resamples(n, plan.resamples, plan.seed)])
    value, tail = float(np.abs(found).sum()), (1 + plan.confidence) / 2
    away = float(np.quantile(np.abs(drawn - found).sum(axis=1), tail))
    if away < 1e-12:
        return Figure(value, note=NO_SPREAD)
    high = float(np.quantile(np.abs(drawn).sum(axis=1), tail))
    return Figure(value, Interval(max(value - away, 0.0), min(max(high, value), 1.0)))


def ece(confidence: ArrayLike, right: ArrayLike, weights: Weights) -> Floats:
    """Expected calibration error (Naeini et al. 2015): the mean over answers of how far, in each of ten equally wide
    bins of confidence, its mean is from the accuracy there. A bin has its upper edge within (Guo et al. 2017).

    Args:
        confidence: probabilities that the answers are right, (n,), in [0, 1]: others are refused with ValueError.
        right: (n,), true for a right answer.
        weights: how often each answer counts, (weightings, n).

    Returns:
        (weightings,), NaN where all weights are 0.
    """
    return np.asarray(np.abs(_gaps(confidence, right, weights)).sum(axis=1))


def _gaps(confidence: ArrayLike, right: ArrayLike, weights: Weights) -> Floats:
    """Of each bin its share of the answers times its mean confidence less its accuracy; (weightings, bins)."""
    p = np.asarray(confidence, dtype=np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError("a calibration error is of probabilities; calibrate scores first")
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], p)
    apart = np.zeros((p.size, BINS))
    apart[np.arange(p.size), bins] = p - np.asarray(right, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(weights @ apart / weights.sum(axis=1, keepdims=True))


def calibrated(scores: ArrayLike, right: ArrayLike, *, method: str = "isotonic", seed: int = 0) -> Floats | None:
    """The probability that each answer is right, by a fit to the answers of the other folds.

    Args:
        scores: of uncertainty, (n,), finite.
        right: (n,), true for a right answer.
        method: ``isotonic`` (pool adjacent violators; Zadrozny and Elkan 2002) or ``platt`` (a sigmoid; Platt 1999).
        seed: of the folds, five, each with its share of both classes.

    Returns:
        (n,) in [0, 1]; None where a class has fewer answers than there are folds.
    """
    u, labels = np.asarray(scores, dtype=np.float64), np.asarray(right, dtype=bool)
    if min(labels.sum(), (~labels).sum()) < FOLDS:
        return None
    fold = folds(labels, seed)
    p = np.empty(u.size)
    for number in range(FOLDS):
        out = fold == number
        fit = isotonic if method == "isotonic" else platt
        p[out] = fit(u[~out], labels[~out], u[out])
    return p


def folds(labels: NDArray[np.bool_], seed: int) -> NDArray[np.int64]:
    """The fold of each answer, at random, the answers of each class spread evenly."""
    draw = np.random.default_rng([seed, labels.size])
    fold = np.empty(labels.size, dtype=np.int64)
    begun = 0
    for label in (False, True):
        places = draw.permutation(np.flatnonzero(labels == label))
        # The second class continues where the first ended, so that folds are equally large.
        fold[places] = (begun + np.arange(places.size)) % FOLDS
        begun += places.size
    return fold


def isotonic(scores: Floats, labels: NDArray[np.bool_], queries: Floats) -> Floats:
    """P(right), never rising with the score: least squares, straight lines between the scores that were fitted and
    level outside them."""
    from scipy.optimize import isotonic_regression

    places, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, weights=labels) / counts
    fitted = isotonic_regression(means, weights=counts.astype(np.float64), increasing=False).x
    return np.clip(np.interp(queries, places, fitted), 0, 1)


def platt(scores: Floats, labels: NDArray[np.bool_], queries: Floats) -> Floats:
    """P(right) = 1 / (1 + exp(a z + b)) of the standardised score z, with Platt's targets in place of 0 and 1, by
    Newton's method with backtracking (Lin, Lin and Weng 2007, algorithm 1)."""
    from scipy.special import expit

    scale = float(scores.std())
    # Scores that are all the same say nothing: the slope is then of no use.
    z = (scores - scores.mean()) / scale if scale > 0 else np.zeros_like(scores)
    n_right = int(labels.sum())
    targets = np.where(labels, (n_right + 1) / (n_right + 2), 1 / (labels.size - n_right + 2))
    design = np.stack((-z, -np.ones_like(z)))  # (2, n): P(right) = expit(a * -z + b * -1)
    at = np.array([0.0, np.log((labels.size - n_right + 1) / (n_right + 1))])

    def loss(parameters: Floats) -> float:
        f = parameters @ design
        return float(np.sum(np.logaddexp(0, f) - targets * f))

    for _ in range(100):
        p = expit(at @ design)
        gradient = design @ (p - targets)
        if np.abs(gradient).max() < 1e-10 * labels.size:
            break
        hessian = (design * (p * (1 - p))) @ design.T + 1e-12 * np.eye(2)
        step = -np.linalg.solve(hessian, gradient)
        size = 1.0
        while size > 1e-10 and loss(at + size * step) > loss(at) + 1e-4 * size * float(gradient @ step):
            size /= 2
        at = at + size * step
    standardised = (queries - scores.mean()) / scale if scale > 0 else np.zeros_like(queries)
    return np.asarray(expit(-(at[0] * standardised + at[1])))
