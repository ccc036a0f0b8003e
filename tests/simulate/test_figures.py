"""Makespan, utilisation, waits, and what no scheduler could do better than."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.job import Job
from gpuherd.simulate.engine import Simulation
from gpuherd.simulate.options import Rules
from gpuherd.simulate.results import Ending, FinishedAttempt, History, Visit, figures, least_possible_s
from gpuherd.simulate.workload import Trial, Work, machine


def work(name: str, seconds: float, arrives_s: float = 0.0, gpus: int = 1, needs: tuple[str, ...] = ()) -> Work:
    return Work(Job(name=name, argv=("x",), gpus=gpus, needs=needs), (Trial(seconds),), arrives_s)


def test_figures_of_a_run_worked_out_by_hand() -> None:
    attempts = (
        FinishedAttempt(0, (0,), 0.0, 40.0, 0.0, Ending.FAILED, FailureClass.CRASH),
        FinishedAttempt(1, (1,), 0.0, 100.0, 0.0, Ending.DONE),
        FinishedAttempt(0, (0,), 50.0, 80.0, 9.0, Ending.DONE),
        FinishedAttempt(2, (2, 3), 20.0, 60.0, 20.0, Ending.DONE),
        FinishedAttempt(3, (4,), 0.0, 60.0, 0.0, Ending.DONE, shared=True),
        FinishedAttempt(4, (4,), 30.0, 90.0, 30.0, Ending.DONE, shared=True),
    )
    works = [work(name, 30.0) for name in "abcde"]
    told = figures(History((5,), attempts, (Visit(0, 90.0, 200.0),), 5, 0, 0, {}), works)
    assert told.makespan_s == 100.0
    assert told.gpu_hours * 3600 == pytest.approx(40 + 100 + 30 + 80 + 90)
    assert told.utilisation == pytest.approx(340 / 500)
    assert told.lost_gpu_hours * 3600 == pytest.approx(40)
    assert told.external_share == pytest.approx(10 / 500)
    assert told.failures == {"crash": 1}
    assert told.waits is not None
    waits = (told.waits.mean_s, told.waits.p50_s, told.waits.p95_s, told.waits.max_s)
    assert waits == pytest.approx((59 / 5, 9.0, 30.0, 30.0))


def test_the_least_possible_is_the_work_or_the_longest_chain() -> None:
    assert least_possible_s(4, [work(str(n), 100.0) for n in range(8)]) == 200.0
    assert least_possible_s(4, [work("a", 100.0, gpus=4), work("b", 10.0)]) == pytest.approx(102.5)
    chain = [work("c", 30.0, needs=("b",)), work("b", 20.0, needs=("a",)), work("a", 10.0, arrives_s=5.0)]
    assert least_possible_s(4, chain) == 65.0


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 100), st.sampled_from([1, 1, 2, 4])), min_size=1))
def test_no_run_is_shorter_than_the_least_possible(kinds: list[tuple[int, int, int]]) -> None:
    works = [
        work(str(n), float(s), float(at), gpus) for n, (s, at, gpus) in enumerate(sorted(kinds, key=lambda k: k[1]))
    ]
    told = figures(Simulation(machine("4x80GB"), works, Rules(max_checks=1)).run(), works)
    assert told.makespan_s >= told.least_s - 1e-6
    assert told.done == len(works)
