"""Several seeds, equal KL and paired differences: by hand, by simulation, and by what must not be claimed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gpuherd.posttrain.eval.compare import Run, SweepPoint, at_equal_kl, differences, shared_kls, unmoved
from gpuherd.posttrain.eval.metrics import Ratio, drawn_means, over_seeds
from gpuherd.qa.bootstrap import BootstrapPlan, Floats

PLAN = BootstrapPlan(resamples=400, confidence=0.95, method="percentile")


def ratio(values: object) -> Ratio:
    top: Floats = np.asarray(values, dtype=np.float64)
    return Ratio(top, np.ones_like(top))


def test_the_interval_over_seeds_knows_that_seeds_differ() -> None:
    problems = np.random.default_rng(0).random(400)
    alike = [ratio(problems), ratio(problems), ratio(problems)]
    apart = [ratio(problems - 0.2), ratio(problems), ratio(problems + 0.2)]
    narrow, wide = over_seeds(alike, True, PLAN), over_seeds(apart, True, PLAN)
    assert narrow.value == pytest.approx(wide.value) == pytest.approx(problems.mean())
    assert narrow.interval is not None and wide.interval is not None
    assert wide.interval.high - wide.interval.low > 5 * (narrow.interval.high - narrow.interval.low)


def test_variance_between_seeds_is_not_too_small() -> None:
    # Every problem of a run says the same, so that all variance is between the three runs.
    draw = np.random.default_rng(1)
    for runs in (2, 3, 5):
        values = draw.normal(size=runs)
        drawn = drawn_means([ratio(np.full(5, value)) for value in values], True, BootstrapPlan(resamples=20_000))
        assert np.var(drawn) == pytest.approx(np.var(values, ddof=1) / runs, rel=0.05)
        assert drawn.mean() == pytest.approx(values.mean(), abs=0.03)


def test_problems_of_their_own_are_drawn_apart() -> None:
    values = np.random.default_rng(0).random(300)
    shared, own = (over_seeds([ratio(values)] * 4, same, PLAN) for same in (True, False))
    assert shared.interval is not None and own.interval is not None
    # Independent draws average out; one draw that all share does not.
    assert own.interval.high - own.interval.low < 0.75 * (shared.interval.high - shared.interval.low)


def point(kl: float, metric: float) -> SweepPoint:
    return SweepPoint([ratio(np.full(50, kl))], [ratio(np.full(50, metric))])


def at(sweeps: Mapping[str, Sequence[SweepPoint]], kls: Sequence[float], plan: BootstrapPlan = PLAN) -> Any:
    """Every two methods at the same values of KL."""
    return at_equal_kl(sweeps, dict.fromkeys(combinations(sweeps, 2), kls), plan)


def test_curves_are_read_between_their_points_and_never_beyond() -> None:
    sweeps = {"a": [point(0, 0.2), point(2, 0.6), point(4, 0.7)], "b": [point(0, 0.2), point(1, 0.6)]}
    figures, apart = at(sweeps, [0.5, 1.0, 3.0])
    read = {(each.method, each.kl): each.metric.value for each in figures}
    assert read == {
        ("a", 0.5): pytest.approx(0.3),
        ("a", 1.0): pytest.approx(0.4),
        ("a", 3.0): pytest.approx(0.65),
        ("b", 0.5): pytest.approx(0.4),
        ("b", 1.0): pytest.approx(0.6),
        ("b", 3.0): None,
    }
    assert [each.difference.value for each in apart] == [pytest.approx(-0.1), pytest.approx(-0.2), None]
    assert apart[2].p is None and "does not reach" in (apart[2].difference.note or "")


def test_a_sweep_may_turn_back_in_kl() -> None:
    order = [point(2, 0.6), point(0, 0.2), point(1, 0.5)]
    figures, _ = at({"a": order, "b": order}, [0.5])
    assert figures[0].metric.value == pytest.approx(0.35)


def test_at_equal_kl_the_better_method_is_found_and_an_equal_one_not() -> None:
    draw = np.random.default_rng(2)
    base = draw.random(300)

    def sweep(gain: float, noise: float) -> list[SweepPoint]:
        return [
            SweepPoint(
                [ratio(kl * draw.gamma(9, 1 / 9, 300))], [ratio(base + gain * kl + noise * draw.normal(size=300))]
            )
            for kl in (0.0, 1.0, 2.0, 4.0)
        ]

    sweeps = {"good": sweep(0.2, 0.1), "poor": sweep(0.1, 0.1), "same": sweep(0.1, 0.1)}
    _, apart = at(sweeps, [2.0])
    found = {(each.one, each.other): each for each in apart}
    better = found["good", "poor"]
    assert better.p_holm is not None and better.p_holm < 0.05
    assert better.difference.interval is not None and better.difference.interval.low > 0
    assert better.difference.value == pytest.approx(0.2, abs=0.06)
    same = found["poor", "same"]
    assert same.p is not None and same.p_holm is not None and same.p_holm >= same.p
    assert same.difference.interval is not None and 0 in same.difference.interval


def test_values_of_kl_are_those_that_both_methods_reach() -> None:
    sweeps = {"a": [point(0, 0), point(4.37, 1)], "b": [point(0, 0), point(2.58, 1)]}
    found = shared_kls(sweeps, PLAN)
    assert found == {("a", "b"): (0.64, 1.2, 1.9, 2.5)}
    assert shared_kls({}, PLAN) == {} and shared_kls({"a": [point(1, 0)]}, PLAN) == {}
    figures, _ = at_equal_kl(sweeps, found, PLAN)
    assert all(each.metric.value is not None for each in figures)


def test_a_method_that_did_not_move_hides_no_difference_of_the_others() -> None:
    def sweep(end: float, gain: float) -> list[SweepPoint]:
        spread = np.linspace(-0.1, 0.1, 50)
        return [point(0, 0), SweepPoint([ratio(np.full(50, end))], [ratio(gain + spread * gain)])]

    sweeps = {"far": sweep(8, 0.8), "still": sweep(2e-6, 0.0), "short": sweep(0.2, 0.1), "other": sweep(6, 0.3)}
    kls = shared_kls(sweeps, PLAN)
    assert all(some == () for pair, some in kls.items() if "still" in pair)
    assert max(kls["far", "other"]) == 6 and 0.1 < max(kls["far", "short"]) == max(kls["short", "other"]) <= 0.2
    figures, apart = at_equal_kl(sweeps, kls, PLAN)
    clear = {(each.one, each.other) for each in apart if each.p_holm is not None and each.p_holm < 0.05}
    assert ("far", "other") in clear
    assert {each.method for each in figures} == {"far", "short", "other"}
    assert len({each.kl for each in figures}) <= 8  # two ranges of four values
    assert unmoved(sweeps, PLAN) == {"still": pytest.approx(2e-6)}
    # Ranges that are nearly as long are read at the same values.
    near = {name: [point(0, 0), point(end, 1)] for name, end in (("a", 3.0), ("b", 4.0), ("c", 5.0))}
    assert len({kl for some in shared_kls(near, PLAN).values() for kl in some}) == 4


def noisy(draw: np.random.Generator, kl: float, metric: float, runs: int, spread: float) -> SweepPoint:
    """Of runs that scatter by so much, on problems that scatter as well."""
    shifts = draw.normal(metric, spread, runs)
    return SweepPoint(
        [ratio(kl * draw.gamma(9, 1 / 9, 60)) for _ in range(runs)],
        [ratio(shift + 0.02 * draw.normal(size=60)) for shift in shifts],
        tuple(range(runs)),
    )


def test_at_equal_kl_runs_are_the_unit_where_there_are_several() -> None:
    """Three runs a method, all methods equal: at 5 % about one pair in twenty may be called different."""
    draw, called, plan = np.random.default_rng(0), 0, BootstrapPlan(100, 0.95, "percentile")
    for _ in range(60):
        sweeps = {name: [point(0, 0), noisy(draw, 2, 0.5, 3, 0.1)] for name in "ab"}
        (only,) = at(sweeps, [1.0], plan)[1]
        assert only.unit == "seeds" and only.p is not None
        called += only.p < 0.05
    assert called <= 7  # by resamples of the runs it was a quarter of them
    alone = {name: [point(0, 0), noisy(draw, 2, height, 1, 0.0)] for name, height in (("a", 0.3), ("b", 0.6))}
    (only,) = at(alone, [1.0], plan)[1]
    assert only.unit == "problems" and only.p == pytest.approx(0.01)  # the least that 100 resamples can say


def test_runs_of_other_seeds_are_not_paired_by_their_places() -> None:
    runs = [ratio(np.full(50, value)) for value in (0.1, 0.5, 0.9)]
    mine = SweepPoint([ratio(np.full(50, 2.0))] * 3, runs, (0, 1, 2))
    for seeds, unit in (((0, 1, 2), None), ((5, 6, 7), 1.0)):
        theirs = SweepPoint(mine.kl, runs, seeds)
        _, (only,) = at({"a": [point(0, 0), mine], "b": [point(0, 0), theirs]}, [2.0])
        assert only.difference.value == 0 and only.p == unit
        assert (only.difference.interval is None) is (unit is None)  # equal runs resampled alike never differ


def test_where_curves_are_read_nearly_all_resamples_reach() -> None:
    draw = np.random.default_rng(3)
    sweeps = {name: [point(0, 0.2), noisy(draw, 3, 0.5, 1, 0.0)] for name in "ab"}
    kls = shared_kls(sweeps, PLAN)["a", "b"]
    end = min(points[1].kl[0].value for points in sweeps.values())
    assert len(kls) == 4 and 0.7 * end < kls[-1] < end
    figures, apart = at(sweeps, kls)
    assert all(each.metric.dropped <= 0.05 * PLAN.resamples for each in figures)
    assert all(each.difference.dropped <= 0.1 * PLAN.resamples for each in apart)


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(0, 50), min_size=1, max_size=5), min_size=1, max_size=4))
def test_shared_values_lie_within_both_sweeps(kls: list[list[float]]) -> None:
    sweeps = {str(place): [point(kl, 0) for kl in row] for place, row in enumerate(kls)}
    for pair, found in shared_kls(sweeps, PLAN).items():
        for row in (kls[int(place)] for place in pair):
            assert all(min(row) <= kl <= max(row) for kl in found)


def test_one_run_each_is_the_paired_t_test_over_problems() -> None:
    draw = np.random.default_rng(4)
    one, other = draw.random(40), draw.random(40)
    ids = tuple(map(str, range(40)))
    (found,) = differences({"a": [Run(0, ids, ratio(one))], "b": [Run(0, ids, ratio(other))]}, PLAN)
    expected = stats.ttest_rel(one, other)
    assert found.unit == "problems" and found.problems == 40
    assert found.difference.value == pytest.approx(one.mean() - other.mean())
    assert found.p == pytest.approx(expected.pvalue) and found.p_holm == found.p
    interval = expected.confidence_interval(0.95)
    assert found.difference.interval is not None
    assert found.difference.interval.low == pytest.approx(interval.low, abs=0.03)


def test_only_common_problems_count_in_whatever_order() -> None:
    mine = Run(0, ("a", "b", "c"), ratio([1, 2, 9]))
    theirs = Run(0, ("b", "x", "a"), ratio([1, 50, 1]))
    (found,) = differences({"one": [mine], "other": [theirs]}, PLAN)
    assert found.problems == 2 and found.difference.value == pytest.approx(0.5)
    assert differences({"one": [mine], "other": [Run(0, ("z",), ratio([1]))]}, PLAN) == []


def test_with_several_seeds_the_runs_are_the_unit() -> None:
    draw = np.random.default_rng(5)
    ids = tuple(map(str, range(2000)))
    base = draw.random(2000)
    # Ten thousand problems would call a tenth of a point different; three runs that scatter by as much do not.
    mine = [Run(seed, ids, ratio(base + shift)) for seed, shift in enumerate((0.0, 0.1, 0.2))]
    theirs = [Run(seed, ids, ratio(base + shift)) for seed, shift in enumerate((0.1, -0.1, 0.0))]
    (found,) = differences({"a": mine, "b": theirs}, PLAN)
    assert found.unit == "seeds"
    assert found.p == pytest.approx(stats.ttest_1samp([-0.1, 0.2, 0.2], 0).pvalue)
    others = [Run(seed + 10, run.problems, run.metric) for seed, run in enumerate(theirs)]
    (apart,) = differences({"a": mine, "b": others}, PLAN)
    assert apart.p == pytest.approx(stats.ttest_ind([0.0, 0.1, 0.2], [0.1, -0.1, 0.0], equal_var=False).pvalue)


def test_nothing_is_tested_where_nothing_differs() -> None:
    ids = ("a", "b", "c")
    same = [Run(0, ids, ratio([1, 0, 1]))]
    (found,) = differences({"a": same, "b": same}, PLAN)
    assert found.p is None and found.p_holm is None and found.difference.value == 0
    (lone,) = differences({"a": [Run(0, ("a",), ratio([1]))], "b": [Run(0, ("a",), ratio([0]))]}, PLAN)
    assert lone.p is None and lone.difference.interval is None
    # One that is always right against one that is always wrong differs in all problems by the same, which no t knows.
    ever = {name: [Run(0, tuple("abcdefgh"), ratio([right] * 8))] for name, right in (("a", 1), ("b", 0))}
    (found,) = differences(ever, PLAN)
    assert found.difference.value == 1 and found.p == pytest.approx(2 * 0.5**8)
    # One run against several of other seeds: no variance of the one is known.
    several = [Run(seed + 1, ids, ratio([seed, 0, 1])) for seed in range(3)]
    (mixed,) = differences({"a": same, "b": several}, PLAN)
    assert mixed.unit == "seeds" and mixed.p is None
