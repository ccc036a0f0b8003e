"""How honest are confidences? Expected calibration error, of probabilities that were fitted on other answers.

A raw score of uncertainty is no probability, and an ECE of one says nothing (a mean log-prob lies in no bin at all): it
is calibrated first, each answer by a fit to the other folds, so that no answer helps to judge itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuherd.qa.bootstrap import NO_SPREAD, Floats, Plan, Weights, as_they_are, resamples
from gpuherd.qa.intervals import Figure, Interval

FOLDS = 5
BINS = 10


def ece_figure(confidence: ArrayLike, right: ArrayLike, plan: Plan) -> Figure:
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
        # The second class goes on where the first ended, so that folds are equally large.
        fold[places] = (begun + np.arange(places.size)) % FOLDS
        begun += places.size
    return fold


def isotonic(scores: Floats, labels: NDArray[np.bool_], asked: Floats) -> Floats:
    """P(right), never rising with the score: least squares, straight lines between the scores that were fitted and
    level outside them."""
    from scipy.optimize import isotonic_regression

    places, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, weights=labels) / counts
    fitted = isotonic_regression(means, weights=counts.astype(np.float64), increasing=False).x
    return np.clip(np.interp(asked, places, fitted), 0, 1)


def platt(scores: Floats, labels: NDArray[np.bool_], asked: Floats) -> Floats:
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
    wanted = (asked - scores.mean()) / scale if scale > 0 else np.zeros_like(asked)
    return np.asarray(expit(-(at[0] * wanted + at[1])))
