"""DeLong's test against its double sum written out and Welch's test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from gpuherd.qa.evaluation.metrics import compared


def literal_delong(one: np.ndarray, other: np.ndarray, wrong: np.ndarray) -> tuple[float, float] | None:
    """Difference and error of DeLong, DeLong and Clarke-Pearson 1988, eq. 4 to 9, with psi pair by pair."""
    kernels = []
    for scores in (one, other):
        above, equal = (
            scores[wrong][:, None] > scores[~wrong][None, :],
            scores[wrong][:, None] == scores[~wrong][None, :],
        )
        kernels.append(above + 0.5 * equal)
    areas = [kernel.mean() for kernel in kernels]
    s10 = np.cov([kernel.mean(axis=1) for kernel in kernels])
    s01 = np.cov([kernel.mean(axis=0) for kernel in kernels])
    s = s10 / wrong.sum() + s01 / (~wrong).sum()
    variance = s[0, 0] + s[1, 1] - 2 * s[0, 1]
    if variance < 1e-20:
        return None
    return float(areas[0] - areas[1]), float(np.sqrt(variance))


def test_delong_is_the_double_sum() -> None:
    draw = np.random.default_rng(2)
    for number in range(200):
        n = int(draw.integers(6, 120))
        wrong = draw.random(n) < draw.choice([0.2, 0.5])
        wrong[:4] = (True, True, False, False)
        one = draw.normal(size=n) + wrong * draw.choice([0, 1, 2])
        other = draw.normal(size=n) + 0.5 * one
        if number % 3 == 0:
            one, other = np.round(one), np.round(other)
        expected, found = literal_delong(one, other, wrong), compared(one, other, wrong)
        if found is None:
            assert expected is None
        else:
            assert (found.difference, found.error) == pytest.approx(expected, abs=1e-9)


def test_p_and_interval_are_welchs_of_the_placements() -> None:
    """A difference of areas is that of two means: of what each wrong answer and what each right one has above it."""
    draw = np.random.default_rng(4)
    wrong = np.arange(60) < 7
    one, other = draw.normal(size=60) + wrong, draw.normal(size=60)
    found = compared(one, other, wrong)
    assert found is not None
    above = [(each[wrong][:, None] > each[~wrong][None, :]) + 0.0 for each in (one, other)]
    apart = above[0] - above[1]
    welch = stats.ttest_ind(apart.mean(axis=1), -apart.mean(axis=0), equal_var=False)
    assert found.freedom == pytest.approx(welch.df, abs=1e-9)
    reach = stats.t.ppf(0.975, welch.df) * found.error
    interval = found.interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((found.difference - reach, found.difference + reach))
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.difference) / found.error, welch.df), abs=1e-12)


def test_with_few_wrong_answers_equal_measures_are_rarely_called_different() -> None:
    """400 answers, 8 wrong, two equally good measures, 400 times: a normal distribution calls one in ten different."""
    draw, wrong, called = np.random.default_rng(6), np.arange(400) < 8, {"t": 0, "normal": 0}
    for _ in range(400):
        common = draw.normal(size=400) + wrong
        found = compared(common + 0.7 * draw.normal(size=400), common + 0.7 * draw.normal(size=400), wrong)
        assert found is not None
        called["t"] += found.p < 0.05
        called["normal"] += abs(found.difference) / found.error > stats.norm.ppf(0.975)
    assert called["t"] / 400 < 0.07 < called["normal"] / 400


def test_orders_that_are_alike_have_no_p() -> None:
    scores, wrong = np.arange(10.0), np.array([True, False] * 5)
    assert compared(scores, np.exp(scores), wrong) is None


def test_a_class_of_one_has_no_p() -> None:
    assert compared([1, 2, 3.0], [3, 1, 2.0], [True, False, False]) is None
