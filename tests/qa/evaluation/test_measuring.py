"""One measure under one judging, and measures beside each other: which answers count, what is said where none do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from gpuherd.qa.bootstrap import NO_SPREAD
from gpuherd.qa.evaluation.measuring import (
    BY_DELONG,
    CLOSED_FORM,
    FEW,
    auroc_figure,
    differences,
    grouped_as_they_are,
    histogram,
    measure_result,
)
from gpuherd.qa.evaluation.metrics import compared, rejection
from gpuherd.qa.evaluation.result import EvaluateSettings
from gpuherd.qa.intervals import auroc_interval, wilson

SETTINGS = EvaluateSettings(bootstrap=200)


def some(n: int = 120, seed: int = 0) -> tuple[list[float], list[bool]]:
    draw = np.random.default_rng(seed)
    wrong = draw.random(n) < 0.4
    return [float(each) for each in draw.normal(size=n) + wrong], [bool(each) for each in wrong]


def test_answers_without_label_or_score_are_left_out() -> None:
    scores, wrong = some()
    holes: list[float | None] = [None if at % 7 == 0 else each for at, each in enumerate(scores)]
    gaps: list[bool | None] = [None if at % 5 == 0 else each for at, each in enumerate(wrong)]
    found = measure_result("m", holes, gaps, {"empty": 3}, SETTINGS)
    kept = [at for at in range(120) if at % 7 and at % 5]
    whole = measure_result("m", [scores[at] for at in kept], [wrong[at] for at in kept], {"empty": 3}, SETTINGS)
    assert found == whole
    assert found.scored == len(kept) and found.conclusive
    assert found.base_rate == pytest.approx(np.mean([wrong[at] for at in kept]))
    assert found.auroc.value == pytest.approx(roc_auc_score([wrong[at] for at in kept], [scores[at] for at in kept]))


def test_figures_belong_together() -> None:
    scores, wrong = some(200)
    found = measure_result("m", scores, wrong, {}, EvaluateSettings(bootstrap=200, coverages=(0.5, 1.0)))
    for figure in (found.auroc, found.auprc, found.prr, found.prr_half, found.aurac, found.ece, found.at[0].accuracy):
        assert figure.value is not None and figure.interval is not None
        assert figure.interval.low < figure.interval.high
    kept = rejection(grouped_as_they_are(np.array(scores), np.array(wrong)))
    assert (found.prr.value, found.prr_half.value) == (kept.ratio()[0], kept.ratio(0.5)[0])
    assert found.prr.value != found.prr_half.value and found.aurac.value == kept.area[0]
    assert found.at[1].accuracy.value == pytest.approx(1 - np.mean(wrong))
    assert (found.roc[0].x, found.roc[0].y, found.roc[-1].x, found.roc[-1].y) == (0, 0, 1, 1)
    x, y = [point.x for point in found.roc], [point.y for point in found.roc]
    assert np.trapezoid(y, x) == pytest.approx(found.auroc.value, abs=0.01)  # thinned: nearly
    assert found.rejection[-1].y == pytest.approx(1 - np.mean(wrong))
    assert found.histogram is not None
    assert sum(found.histogram.right) == found.right and sum(found.histogram.wrong) == found.wrong


@pytest.mark.parametrize(
    ("scores", "wrong", "note"),
    [
        ([1.0, 2.0], [False, False], "all 2 answers are right"),
        ([1.0, 2.0], [True, True], "all 2 answers are wrong"),
        ([1.0], [True], "all 1 answers are wrong"),
        ([None, 2.0], [True, None], "no answer has a label and a score"),
        ([], [], "no answer has a label and a score"),
    ],
)
def test_one_class_has_no_auroc(scores: list[float | None], wrong: list[bool | None], note: str) -> None:
    found = measure_result("m", scores, wrong, {}, SETTINGS)
    for figure in (found.auroc, found.auprc, found.prr, found.prr_half, found.ece):
        assert (figure.value, figure.interval, figure.note) == (None, None, note)
    assert found.roc == () and found.auroc_closed_form is None and not found.conclusive
    known = [label for score, label in zip(scores, wrong, strict=True) if score is not None and label is not None]
    assert found.aurac.value == (None if not known else float(not known[0]))
    assert found.at[0].accuracy.value == found.aurac.value


def test_perfect_order_of_few_is_not_certain() -> None:
    wrong = [at < 4 for at in range(60)]
    found = measure_result("m", [float(label) for label in wrong], wrong, {}, SETTINGS)
    assert found.auroc.value == 1 and found.prr.value == pytest.approx(1)
    assert found.auroc.note == f"{CLOSED_FORM}: {NO_SPREAD}"
    assert found.auroc.interval == found.auroc_closed_form == auroc_interval(1.0, 4, 56)
    assert found.ece.value is None and found.ece.note is not None and "calibration needs 5" in found.ece.note
    assert found.prr.interval is None and found.prr.note is not None
    assert not found.conclusive
    assert auroc_figure(np.array(wrong, dtype=float), np.array(wrong), SETTINGS) == found.auroc


def test_of_few_answers_the_interval_is_that_of_the_counts() -> None:
    for wrong_ones, by_counts in ((9, True), (10, False)):
        wrong = [at < wrong_ones for at in range(100)]
        scores = [float(at * 37 % 101) + 20 * label for at, label in enumerate(wrong)]
        found = measure_result("m", scores, wrong, {}, SETTINGS)
        assert (found.auroc.interval == found.auroc_closed_form) == by_counts
        assert found.auroc.note == (f"{CLOSED_FORM}: {FEW}" if by_counts else None)
        assert found.conclusive == (not by_counts)


def test_two_answers_are_enough_for_figures() -> None:
    found = measure_result("m", [1.0, 2.0], [False, True], {}, SETTINGS)
    assert found.auroc.value == 1 and found.auroc.interval is not None
    assert found.auroc.dropped > 50  # half of the resamples draw one of them twice


def test_differences_are_paired_and_corrected() -> None:
    scores, wrong = some(200, 1)
    draw = np.random.default_rng(5)
    worse = [float(each) for each in draw.normal(size=200)]
    near = [each + 0.01 * noise for each, noise in zip(scores, worse, strict=True)]
    holes: list[float | None] = [None if at < 40 else each for at, each in enumerate(worse)]
    columns = {"nll": scores, "same": [np.exp(each) for each in scores], "near": near, "worse": worse, "holes": holes}
    found = {each.name: each for each in differences(columns, wrong, SETTINGS, lambda names: names)}
    assert list(found) == ["same", "near", "worse", "holes"]
    for name, row in found.items():
        kept = [at for at in range(200) if columns[name][at] is not None]
        areas = [
            roc_auc_score([wrong[at] for at in kept], [columns[each][at] for at in kept]) for each in (name, "nll")
        ]
        assert row.auroc.value == pytest.approx(areas[0] - areas[1], abs=1e-9)
        assert row.answers == len(kept)
    assert found["same"].p is None and found["same"].p_holm is None
    # What is nearly the same is compared far more sharply than two intervals side by side could.
    assert found["near"].auroc.interval is not None and found["worse"].auroc.interval is not None
    near_width, worse_width = (
        each.high - each.low for each in (found["near"].auroc.interval, found["worse"].auroc.interval)
    )
    assert near_width < 0.1 * worse_width
    smallest = min(found[name].p or 1 for name in ("near", "worse", "holes"))
    assert min(each.p_holm or 1 for each in found.values()) == pytest.approx(3 * smallest)
    base = [None if at % 10 == 0 else each for at, each in enumerate(scores)]
    (turned,) = differences({"nll": base, "holes": holes}, wrong, SETTINGS, lambda names: names)
    assert turned.answers == sum(at >= 40 and at % 10 > 0 for at in range(200))
    one_class = differences({"nll": scores, "x": worse}, [True] * 200, SETTINGS, lambda names: names)
    assert one_class[0].auroc.value is None and one_class[0].p_holm is None


@pytest.mark.parametrize("seed", range(12))
def test_intervals_and_p_of_differences_are_corrected_alike_for_each_family(seed: int) -> None:
    """An interval leaves out 0 exactly where p is small enough, whatever the number of measures beside it."""
    draw = np.random.default_rng(seed)
    scores, wrong = some(200, seed)
    columns: dict[str, list[float]] = {"nll": scores}
    for number in range(8):
        noise = draw.normal(size=200) * (0.2 + 0.3 * number)
        columns[f"m{number}" if number % 2 else f"weighted-nll:w{number}"] = list(np.asarray(scores) + noise)
    found = differences(columns, wrong, SETTINGS, lambda names: names)
    for row in found:
        assert row.among_all is not None and row.p is not None and row.among_all.p == row.p_holm
        assert (row.among_measures is None) == row.name.startswith("weighted-nll")
        for each in (row.among_all, row.among_measures):
            if each is not None:
                assert (0.0 in each.interval) == (each.p > 1 - SETTINGS.confidence), (row.name, each)
                assert row.auroc.value is not None and row.auroc.value in each.interval
    alone = {name: column for name, column in columns.items() if not name.startswith("weighted")}
    without = {row.name: row for row in differences(alone, wrong, SETTINGS, lambda names: names)}
    for row in found:
        assert row.among_measures is None or row.among_measures == without[row.name].among_all


def test_differences_of_few_have_intervals_by_delong() -> None:
    for wrong_ones, by_delong in ((9, True), (10, False)):
        wrong = [at < wrong_ones for at in range(100)]
        draw = np.random.default_rng(1)
        one, other = ([float(each) for each in draw.normal(size=100) + np.array(wrong)] for _ in range(2))
        (found,) = differences({"nll": one, "x": other}, wrong, SETTINGS, lambda names: names)
        beside = compared(other, one, wrong)
        assert beside is not None and found.auroc.interval is not None
        assert (found.auroc.interval == beside.interval(0.95)) == by_delong
        assert found.auroc.note == (f"{BY_DELONG}: {FEW}" if by_delong else None)
        assert found.p == beside.p
    alone = [True] + [False] * 30
    (found,) = differences({"nll": one[:31], "x": other[:31]}, alone, SETTINGS, lambda names: names)
    assert found.auroc.value is not None and found.p is None
    assert (found.auroc.interval, found.auroc.note) == (None, FEW)


def test_all_kept_being_right_is_not_certain() -> None:
    wrong = [at >= 70 for at in range(100)]
    found = measure_result(
        "m", [float(at) for at in range(100)], wrong, {}, EvaluateSettings(bootstrap=100, coverages=(0.1,))
    )
    (at,) = found.at
    assert at.accuracy.value == 1
    assert at.accuracy.interval == wilson(10, 10)
    assert at.accuracy.note == f"Wilson's interval of 10 answers: {NO_SPREAD}"


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), min_size=1, max_size=60))
def test_a_histogram_holds_every_answer(pairs: list[tuple[float, bool]]) -> None:
    values, labels = np.array([value for value, _ in pairs]), np.array([label for _, label in pairs])
    found = histogram(values, labels)
    assert sum(found.right) + sum(found.wrong) == len(pairs)
    assert sum(found.wrong) == labels.sum()
    assert (found.edges[0], found.edges[-1]) == (values.min(), values.max())
    assert len(found.right) == len(found.wrong) == len(found.edges) - 1
    assert list(found.edges) == sorted(found.edges)


def test_one_huge_score_leaves_the_others_apart() -> None:
    values = np.concatenate((np.linspace(0, 1, 199), [1e12]))
    found = histogram(values, np.zeros(200, dtype=bool))
    assert max(found.right) < 20


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.5, -1e300, 1e300])), st.sampled_from([None, True, False])
        ),
        max_size=25,
    )
)
def test_any_scores_and_labels_can_be_evaluated(pairs: list[tuple[float | None, bool | None]]) -> None:
    scores, wrong = [score for score, _ in pairs], [label for _, label in pairs]
    found = measure_result("m", scores, wrong, {}, EvaluateSettings(bootstrap=100))
    for figure in (found.auroc, found.auprc, found.aurac, found.ece):
        assert figure.value is None or 0 <= figure.value <= 1
        if figure.interval is not None:
            assert -1e-9 <= figure.interval.low <= figure.interval.high <= 1 + 1e-9
    for figure in (found.auroc, found.prr):
        assert (figure.value is None) == (min(found.right, found.wrong) == 0) or figure is found.prr
