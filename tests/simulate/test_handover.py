"""Jobs handed to a cluster's own scheduler in virtual time: runs whose course is known, and what always holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.job import Job
from gpuherd.simulate import simulate
from gpuherd.simulate.options import Rules, variants
from gpuherd.simulate.other_schedulers import Handover, Nodes
from gpuherd.simulate.results import Ending, History, busy_spans, figures
from gpuherd.simulate.workload import (
    Background,
    Machine,
    Mix,
    Recipe,
    Scenario,
    Trial,
    Work,
    drawn,
    machine,
    machines,
    spread,
)


def work(name: str, seconds: float | Sequence[Trial], **more: object) -> Work:
    trials = (Trial(seconds),) if isinstance(seconds, (int, float)) else tuple(seconds)
    return Work(Job(**{"name": name, "argv": ("x",), **more}), trials)  # type: ignore[arg-type]


def run(where: tuple[Machine, ...], works: Sequence[Work], **rules: object) -> History:
    plain = {"look": 1.0, "engine_cycle": 1.0, "start_up": 1.0}
    return Handover(where, works, Rules(policy="handover", **{**plain, **rules})).run()  # type: ignore[arg-type]


def spans(history: History) -> dict[int, tuple[float, float]]:
    return {ran.job: (ran.start, ran.end) for ran in history.attempts}


# --- known courses --------------------------------------------------------------------------------------------


def test_what_has_ended_is_seen_at_the_next_look_and_only_then_another_is_handed_over() -> None:
    works = [work(str(number), 10.5) for number in range(2)]
    told = spans(run(machine("1x80GB"), works, at_most=1, look=4.0))
    # The first ends after 1 s of start-up at 11.5; the look at 12 sees it; the pass then starts the other.
    assert told == {0: (1.0, 11.5), 1: (13.0, 23.5)}


def test_with_one_more_in_its_hands_the_cluster_goes_on_without_us() -> None:
    works = [work(str(number), 10.5) for number in range(2)]
    told = spans(run(machine("1x80GB"), works, at_most=2, look=4.0))
    assert told == {0: (1.0, 11.5), 1: (12.5, 23.0)}


def test_the_schedulers_pass_comes_at_most_once_in_a_cycle() -> None:
    works = [work(str(number), seconds) for number, seconds in enumerate((5.0, 6.0, 1.0, 1.0))]
    told = spans(run(machine("2x80GB"), works, engine_cycle=30.0))
    assert [told[job][0] for job in range(4)] == [1.0, 1.0, 31.0, 31.0]


def test_no_more_start_in_a_second_than_the_cluster_can() -> None:
    works = [work(str(number), 1000.0) for number in range(6)]
    told = spans(run(machine("8x80GB"), works, engine_rate=2.0))
    starts = sorted(start for start, _ in told.values())
    assert all(sum(begin <= start < begin + 1.0 for start in starts) <= 2 for begin in starts)
    assert starts[-1] - starts[0] == pytest.approx(2.0, abs=1.0)


def test_of_an_array_only_so_many_run_at_once() -> None:
    works = [work(str(number), 10.0) for number in range(4)]
    told = spans(run(machine("8x80GB"), works, array_limit=2))
    assert sorted(start for start, _ in told.values()) == [1.0, 1.0, 12.0, 12.0]


def test_a_job_of_two_nodes_waits_for_both_and_small_ones_behind_it_do_not_put_it_off() -> None:
    works = [work("long", 100.0, gpus=2), work("wide", 10.0, gpus=2, nodes=2), work("small", 500.0, gpus=1)]
    told = spans(run(machines("2x2x80GB"), works))
    assert told[1][0] == 102.0
    # Both nodes are set aside for it, so that the small one waits until it has ended.
    assert told[2][0] > told[1][1]


def test_who_is_surely_over_in_time_may_have_what_is_set_aside() -> None:
    works = [
        work("long", 100.0, gpus=2, timeout_s=120.0),
        work("wide", 10.0, gpus=2, nodes=2, timeout_s=20.0),
        work("too long", 90.0, gpus=1, timeout_s=200.0),
        work("short", 50.0, gpus=1, timeout_s=60.0),
    ]
    told = spans(run(machines("2x2x80GB"), works))
    assert told[3] == (1.0, 51.0)
    assert told[1][0] == 102.0
    assert told[2][0] > told[1][1]


def test_failures_are_tried_again_and_limits_end_a_job() -> None:
    crash = Trial(5.0, FailureClass.CRASH)
    history = run(
        machine("1x80GB"),
        [work("again", [crash, Trial(5.0)]), work("never", [crash], retries=0), work("slow", 50.0, timeout_s=7.0)],
    )
    assert (history.done, history.failed, history.stuck) == (1, 2, 0)
    by_class = {ran.failure for ran in history.attempts if ran.ending is Ending.FAILED}
    assert by_class == {FailureClass.CRASH, FailureClass.TIMEOUT}
    assert max(ran.end - ran.start for ran in history.attempts) == 7.0


def test_what_the_cluster_can_never_give_is_refused_with_those_that_need_it() -> None:
    works = [
        work("nine", 1.0, gpus=9),
        work("three nodes", 1.0, nodes=3),
        work("large", 1.0, memory_mb=100_000),
        work("after", 1.0, needs=("nine",)),
        work("fits", 1.0, gpus=8, nodes=2),
    ]
    history = run(machines("2x8x80GB"), works, at_most=1)
    assert (history.done, history.failed, history.cancelled, history.stuck) == (1, 3, 1, 0)
    assert history.refused[1] == "asks for 1 GPUs on each of 3 nodes; the cluster has none such"


def test_jobs_on_the_cpu_take_no_gpu() -> None:
    history = run(machine("1x80GB"), [work("gpu", 10.0), work("cpu", 10.0, gpus=0)])
    assert {ran.gpus for ran in history.attempts} == {(0,), ()}
    assert history.makespan_s == 11.0


# --- what must hold of every run ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_gpu_is_given_twice_and_every_job_ends(data: st.DataObject) -> None:
    where = machines(data.draw(st.sampled_from(["3x4x80GB", "2x8x80GB,3x2x24GB", "1x1x80GB"])))
    recipe = Recipe(
        seconds=spread("exponential:60"),
        gpus=Mix((0, 1, 2, 4), (1.0, 6.0, 2.0, 1.0)),
        nodes=Mix((1, 2), (4.0, 1.0)),
        memory_mb=data.draw(st.sampled_from([None, Mix((20_000, 60_000), (1.0, 1.0))])),
        every=data.draw(st.sampled_from([None, spread("exponential:5")])),
        failures={FailureClass.CRASH: 0.1},
        limits=data.draw(st.sampled_from([None, 1.5])),
    )
    works = drawn(data.draw(st.integers(1, 40)), recipe, Random(data.draw(st.integers(0, 99))))
    at_most = data.draw(st.integers(1, 50))
    array_limit = data.draw(st.sampled_from([None, 1, 3]))
    history = run(where, works, at_most=at_most, array_limit=array_limit, look=data.draw(st.sampled_from([0.3, 7.0])))
    assert history.stuck == 0
    assert history.done + history.failed + history.cancelled == len(works)
    for each in busy_spans(history).values():
        assert all(before[1] <= after[0] for before, after in pairwise(each))
    node_of = [number for number, gpus in enumerate(where) for _ in gpus]
    for ran in history.attempts:
        job = works[ran.job].job
        assert len(ran.gpus) == job.gpus * job.nodes
        assert len({node_of[gpu] for gpu in ran.gpus}) == (job.nodes if job.gpus else 0)
    moments = sorted([(ran.start, 1) for ran in history.attempts] + [(ran.end, -1) for ran in history.attempts])
    at_once = 0
    for _, change in moments:
        at_once += change
        assert at_once <= at_most


def test_the_reserve_that_keeps_a_cluster_busy_is_what_ends_between_two_looks() -> None:
    """With 64 GPUs and jobs of 100 s, 0.64 end a second: of 64 + 6 in its hands a look each 10 s leaves none idle."""
    works = drawn(2000, Recipe(seconds=spread("exponential:100")), Random(1))

    def used(at_most: int, look: float) -> float:
        history = run(machines("8x8x80GB"), works, at_most=at_most, look=look, engine_cycle=0.1, start_up=0.1)
        return figures(history, works).used_until_last_start or 0.0

    assert used(32, 10.0) < 0.5
    assert used(64, 10.0) == pytest.approx(100 / (100 + 5), abs=0.02)
    assert used(64 + 3 * 7, 10.0) > 0.985


def test_nodes_with_the_fewest_free_gpus_are_filled_first() -> None:
    nodes = Nodes(machines("3x4x80GB"))
    nodes.take((1,), 3)
    assert nodes.find(1, 1, None) == (1,)
    assert nodes.find(1, 2, None) == (0,)
    nodes.reserve((0, 1))
    assert nodes.find(1, 1, None) == (2,)
    assert nodes.find(2, 1, None) is None
    nodes.unreserve((0, 1))
    assert nodes.find(3, 1, None) == (1, 2, 0)


# --- what the command says ------------------------------------------------------------------------------------


def test_jobs_of_several_nodes_and_strangers_go_with_one_policy_only() -> None:
    works = drawn(2, Recipe(seconds=spread("1"), nodes=Mix((2,), (1.0,))), Random(0))
    scenario = Scenario(machines=machines("2x8x80GB"), works=works)
    with pytest.raises(UsageError, match="--policy handover"):
        simulate(scenario, variants(Rules(), []))
    crowded = Scenario(machines=scenario.machines, works=works, background=Background(0.1))
    with pytest.raises(UsageError, match="--background"):
        simulate(crowded, variants(Rules(policy="handover"), []))


@pytest.mark.parametrize(
    ("word", "says"),
    [("engine_rate=0", "starts in a second"), ("look=0", "length of time"), ("at_most=0", "above 0")],
)
def test_what_makes_no_sense_is_refused(word: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        variants(Rules(), [word])
