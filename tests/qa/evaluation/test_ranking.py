"""AUROC, average precision, rejection: against scikit-learn, scipy and formulas written out, 200 random cases each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from gpuherd.qa.bootstrap import as_they_are
from gpuherd.qa.evaluation.metrics import auprc, auroc, grouped, ranked, rejection, roc_points, thinned


def cases(count: int = 200) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Scores with and without ties, of classes large and small; both classes always there."""
    draw = np.random.default_rng(6)
    for number in range(count):
        n = int(draw.integers(2, 300))
        wrong = draw.random(n) < draw.choice([0.02, 0.3, 0.5, 0.95])
        wrong[:2] = (True, False)
        scores = draw.normal(size=n) + wrong * draw.choice([0, 0.5, 3])
        if number % 3 == 0:
            scores = np.round(scores, int(draw.integers(0, 2)))
        if number % 10 == 0:
            scores = np.exp(scores * 40)  # a perplexity's range
        if number % 25 == 0:
            scores[:] = 1.5  # says nothing at all
        yield scores, wrong


def groups_of(scores: np.ndarray, wrong: np.ndarray, weights: np.ndarray | None = None):  # type: ignore[no-untyped-def]
    return grouped(ranked(scores, wrong), as_they_are(scores.size) if weights is None else weights)


def test_auroc_is_scikit_learns_and_mann_whitneys() -> None:
    for scores, wrong in cases():
        found = auroc(groups_of(scores, wrong))[0]
        assert found == pytest.approx(roc_auc_score(wrong, scores), abs=1e-9)
        u = mannwhitneyu(scores[wrong], scores[~wrong]).statistic
        assert found == pytest.approx(u / (wrong.sum() * (~wrong).sum()), abs=1e-9)


def test_average_precision_is_scikit_learns() -> None:
    for scores, wrong in cases():
        assert auprc(groups_of(scores, wrong))[0] == pytest.approx(average_precision_score(wrong, scores), abs=1e-9)


def test_roc_is_scikit_learns() -> None:
    for scores, wrong in cases(50):
        x, y = roc_points(groups_of(scores, wrong))
        expected_x, expected_y, _ = roc_curve(wrong, scores, drop_intermediate=False)
        np.testing.assert_allclose(x, expected_x, atol=1e-12)
        np.testing.assert_allclose(y, expected_y, atol=1e-12)


def test_weights_count_answers_as_often() -> None:
    draw = np.random.default_rng(1)
    for scores, wrong in cases(60):
        drawn = draw.integers(0, scores.size, scores.size)
        weights = np.bincount(drawn, minlength=scores.size)[None, :]
        weighted, repeated = groups_of(scores, wrong, weights), groups_of(scores[drawn], wrong[drawn])
        for figure in (auroc, auprc):
            np.testing.assert_allclose(figure(weighted), figure(repeated), atol=1e-12)
        np.testing.assert_allclose(rejection(weighted).accuracy, rejection(repeated).accuracy, atol=1e-12)
        np.testing.assert_allclose(rejection(weighted).ratio(), rejection(repeated).ratio(), atol=1e-12)


def literal_area(scores: np.ndarray, right: np.ndarray, most_rejected: float) -> float:
    """LM-Polygraph's prediction rejection area, as its papers give it: answers sorted, the mean quality of those kept,
    averaged over the numbers of rejected ones."""
    n = scores.size
    rejections = max(int(most_rejected * n + 1e-9), 1)
    quality = right[np.argsort(scores, kind="stable")]
    return float(np.mean([quality[: n - rejected].mean() for rejected in range(rejections)]))


@pytest.mark.parametrize("most_rejected", [1.0, 0.5])
def test_prr_without_ties_is_the_literal_one(most_rejected: float) -> None:
    for number, (scores, wrong) in enumerate(cases()):
        untied = np.argsort(np.argsort(scores, kind="stable"), kind="stable") + 0.0
        right = (~wrong).astype(float)
        kept = rejection(groups_of(untied, wrong))
        area, best = literal_area(untied, right, most_rejected), literal_area(wrong + 0.0, right, most_rejected)
        assert kept.mean_of_kept(most_rejected)[0] == pytest.approx(area, abs=1e-9)
        expected = (area - right.mean()) / (best - right.mean()) if best - right.mean() > 1e-12 else np.nan
        assert kept.ratio(most_rejected)[0] == pytest.approx(expected, abs=1e-9, nan_ok=True), number


def test_rejection_areas_are_lm_polygraphs() -> None:
    recorded = json.loads((Path(__file__).parent / "peers" / "lm_polygraph_rejection.json").read_text())
    assert len(recorded["cases"]) == 200
    for letters, whole, half in recorded["cases"]:
        kept = rejection(groups_of(np.arange(len(letters)) + 0.0, np.array([letter == "-" for letter in letters])))
        assert kept.mean_of_kept(1.0)[0] == pytest.approx(whole, abs=1e-9)
        assert kept.mean_of_kept(0.5)[0] == pytest.approx(half, abs=1e-9)


def test_ties_give_the_mean_over_all_orders() -> None:
    scores, wrong = np.array([1.0, 1.0, 1.0, 2.0, 2.0]), np.array([True, False, False, True, False])
    kept = rejection(groups_of(scores, wrong))
    areas, accuracies = [], []
    for order in itertools.permutations(range(5)):
        tied = scores[list(order)]
        if np.all(tied[1:] >= tied[:-1]):
            right = ~wrong[list(order)]
            accuracies.append(np.cumsum(right) / np.arange(1, 6))
            areas.append(accuracies[-1].mean())
    np.testing.assert_allclose(kept.accuracy[0], np.mean(accuracies, axis=0), atol=1e-12)
    assert kept.area[0] == pytest.approx(np.mean(areas), abs=1e-12)


def test_rejection_at_its_ends() -> None:
    wrong = np.array([False] * 6 + [True] * 4)
    best, worst, level = (rejection(groups_of(s, wrong)) for s in (wrong + 0.0, -1.0 * wrong, np.zeros(10)))
    assert best.ratio()[0] == pytest.approx(1)
    assert worst.ratio()[0] < 0
    assert level.ratio()[0] == pytest.approx(0, abs=1e-12)
    assert level.area[0] == pytest.approx(0.6)
    assert [best.at(share)[0] for share in (0.01, 0.6, 0.61, 1.0)] == pytest.approx([1, 1, 6 / 7, 0.6])
    # 0.7 of 10 is 7 answers, although 0.7 * 10 is above 7 in binary.
    assert best.at(0.7)[0] == pytest.approx(6 / 7)


def test_one_class_has_no_figures() -> None:
    for wrong in (np.zeros(4, dtype=bool), np.ones(4, dtype=bool)):
        groups = groups_of(np.arange(4.0), wrong)
        assert np.isnan(auroc(groups)[0])
        assert np.isnan(auprc(groups)[0])
        assert np.isnan(rejection(groups).ratio()[0])


def test_scores_that_are_no_numbers_are_refused() -> None:
    for scores in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="scores"):
            ranked(scores, [False] * len(scores))
    assert auroc(groups_of(np.array([-np.inf, 0, np.inf]), np.array([False, False, True])))[0] == 1


def test_weightings_of_unequal_size_are_refused() -> None:
    order = ranked([1.0, 2.0], [True, False])
    with pytest.raises(ValueError, match="as many"):
        rejection(grouped(order, np.array([[1, 1], [2, 1]])))


labelled = st.lists(st.tuples(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 7.0]), st.booleans()), min_size=2, max_size=30)


@given(labelled)
def test_auroc_turns_round_with_the_order(pairs: list[tuple[float, bool]]) -> None:
    scores, wrong = np.array([score for score, _ in pairs]), np.array([label for _, label in pairs])
    one, turned = auroc(groups_of(scores, wrong))[0], auroc(groups_of(-scores, wrong))[0]
    if wrong.all() or not wrong.any():
        assert np.isnan(one)
    else:
        assert one + turned == pytest.approx(1, abs=1e-12)
        assert auroc(groups_of(np.exp(scores), wrong))[0] == one  # only the order counts
        assert rejection(groups_of(scores, wrong)).ratio()[0] <= 1 + 1e-12


@given(st.integers(1, 1000), st.integers(2, 50))
def test_thinning_keeps_both_ends_and_the_order(n: int, most: int) -> None:
    places = list(thinned(n, most))
    assert places[0] == 0 and places[-1] == n - 1
    assert places == sorted(set(places)) and len(places) <= most
