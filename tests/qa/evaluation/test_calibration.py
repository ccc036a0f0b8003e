"""Calibrations against scikit-learn's, ECE against its bins, and that no answer judges itself."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.calibration import _SigmoidCalibration, calibration_curve
from sklearn.isotonic import IsotonicRegression

from gpuherd.qa.bootstrap import NO_SPREAD, BootstrapPlan
from gpuherd.qa.evaluation.metrics import FOLDS, calibrated, ece, ece_figure, folds, isotonic, platt


def some(n: int, seed: int, rounded: bool = False) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    right = draw.random(n) < 0.6
    right[:2] = (True, False)
    scores = draw.normal(size=n) - right
    return (np.round(scores, 1) if rounded else scores), right


def test_isotonic_is_scikit_learns() -> None:
    for seed in range(200):
        scores, right = some(int(np.random.default_rng(seed).integers(4, 150)), seed, rounded=seed % 2 == 0)
        asked = np.concatenate((scores, np.linspace(-6, 6, 40)))
        expected = IsotonicRegression(increasing=False, out_of_bounds="clip").fit(scores, right).predict(asked)
        np.testing.assert_allclose(isotonic(scores, right, asked), expected, atol=1e-9)


def test_platt_is_scikit_learns() -> None:
    for seed in range(60):
        scores, right = some(120, seed)
        expected = _SigmoidCalibration().fit(scores, right).predict(scores)
        np.testing.assert_allclose(platt(scores, right, scores), expected, atol=2e-4)


def test_platt_finds_the_minimum() -> None:
    """Closer than scikit-learn's own tolerance: the gradient of Platt's loss is nought, by both parameters."""
    for seed in range(50):
        scores, right = some(80, seed)
        p = platt(scores, right, scores)
        targets = np.where(right, (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2))
        assert np.sum(p - targets) == pytest.approx(0, abs=1e-7)
        assert np.sum((p - targets) * scores) == pytest.approx(0, abs=1e-6)


def test_scores_that_say_nothing_give_the_base_rate() -> None:
    right = np.array([True] * 30 + [False] * 10)
    flat = np.full(40, 3.0)
    np.testing.assert_allclose(isotonic(flat, right, flat), 0.75)
    np.testing.assert_allclose(platt(flat, right, flat), (30 * 31 / 32 + 10 / 12) / 40, atol=1e-9)


def test_perfect_and_far_off_scores_stay_probabilities() -> None:
    right = np.array([True] * 30 + [False] * 10)
    scores = np.where(right, 0.0, 1e9)
    for fit in (isotonic, platt):
        p = fit(scores, right, np.array([-1e300, 0.0, 1e9, 1e300]))
        assert np.all((p >= 0) & (p <= 1)) and p[0] > 0.9 > 0.2 > p[-1]


def test_ece_is_that_of_scikit_learns_bins() -> None:
    for seed in range(200):
        draw = np.random.default_rng(seed)
        p = np.round(draw.random(120), 1 if seed % 2 else 6)  # edges of bins too
        right = draw.random(120) < p**2
        accuracy, confidence = calibration_curve(right, p, n_bins=10)
        sizes = np.bincount(np.searchsorted(np.linspace(0, 1, 11)[1:-1], p), minlength=10)
        expected = np.sum(np.abs(accuracy - confidence) * sizes[sizes > 0]) / 120
        assert ece(p, right, np.ones((1, 120), dtype=int))[0] == pytest.approx(expected, abs=1e-9)


def test_ece_of_weights_is_that_of_repeated_answers() -> None:
    draw = np.random.default_rng(0)
    p, right = draw.random(50), draw.random(50) < 0.5
    drawn = draw.integers(0, 50, 50)
    weights = np.bincount(drawn, minlength=50)[None, :]
    expected = ece(p[drawn], right[drawn], np.ones((1, 50), dtype=int))
    np.testing.assert_allclose(ece(p, right, weights), expected, atol=1e-12)


def test_an_error_lies_in_its_own_interval() -> None:
    """Quantiles of resampled errors leave it out in one of five such cases: noise makes each of them larger."""
    for seed in range(40):
        draw = np.random.default_rng(seed)
        p = np.round(draw.uniform(0.5, 1, 117), 1 if seed % 2 else 6)
        found = ece_figure(p, draw.random(117) < p, BootstrapPlan(200, 0.95, "bca", seed))
        assert found.value is not None and found.interval is not None
        assert 0 <= found.interval.low <= found.value <= found.interval.high <= 1


@pytest.mark.parametrize("bent", [1.0, 2.0])
def test_intervals_of_an_error_hold_the_truth(bent: float) -> None:
    """Confidences evenly over [0, 1], accuracy p or p squared: the true error is 0, or the mean of p - p^2, 1/6."""
    held, draw = 0, np.random.default_rng(8)
    for seed in range(100):
        p = draw.random(300)
        interval = ece_figure(p, draw.random(300) < p**bent, BootstrapPlan(200, 0.95, "bca", seed)).interval
        assert interval is not None
        held += (0 if bent == 1 else 1 / 6) in interval
    assert held >= 90


def test_an_error_that_no_resample_changes_has_no_interval() -> None:
    found = ece_figure([1.0, 1.0, 0.0], [True, True, False], BootstrapPlan(100))
    assert (found.value, found.interval, found.note) == (0, None, NO_SPREAD)


@pytest.mark.parametrize("scores", [[-1.3, -0.2], [0.5, 1.2], [0.5, float("nan")]])
def test_ece_of_raw_scores_is_refused(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="calibrate"):
        ece(scores, [True, False], np.ones((1, 2), dtype=int))


def test_folds_are_even_in_size_and_class() -> None:
    right = np.array([True] * 37 + [False] * 14)
    fold = folds(right, 0)
    for part in (right, ~right, np.ones(51, dtype=bool)):
        sizes = np.bincount(fold[part], minlength=FOLDS)
        assert sizes.max() - sizes.min() <= 1
    assert np.array_equal(fold, folds(right, 0)) and not np.array_equal(fold, folds(right, 1))


@pytest.mark.parametrize("method", ["isotonic", "platt"])
def test_no_answer_has_a_part_in_its_own_probability(method: str) -> None:
    scores, right = some(100, 1)
    p = calibrated(scores, right, method=method, seed=3)
    turned = right.copy()
    at = int(np.flatnonzero(right)[7])
    # Its label goes to another answer of its fold, so that the folds stay as they are.
    other = next(int(each) for each in np.flatnonzero(~right) if folds(right, 3)[each] == folds(right, 3)[at])
    turned[[at, other]] = turned[[other, at]]
    fold = folds(right, 3)
    assert p is not None
    fits = fold != fold[at]
    fit = isotonic if method == "isotonic" else platt
    assert p[at] == pytest.approx(fit(scores[fits], turned[fits], scores[[at]])[0], abs=1e-12)


def test_too_few_of_a_class_are_not_calibrated() -> None:
    assert calibrated(np.arange(20.0), np.array([False] * 4 + [True] * 16)) is None
    assert calibrated(np.arange(20.0), np.array([False] * 5 + [True] * 15)) is not None
