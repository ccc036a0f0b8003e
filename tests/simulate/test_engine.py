"""Simulated runs: what must hold of every one, and small ones whose course is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.gpu.health import FIRST_FAULT_S
from gpuherd.jobs.job import Job
from gpuherd.simulate.engine import Simulation
from gpuherd.simulate.options import TURNAROUND_S, Rules
from gpuherd.simulate.other_schedulers import run_guides
from gpuherd.simulate.results import Ending, FinishedAttempt, History, busy_spans, figures
from gpuherd.simulate.workload import (
    Background,
    Machine,
    Mix,
    Recipe,
    Trial,
    Work,
    diagnosis,
    drawn,
    failure_shares,
    machine,
    machines,
    spread,
    start_time,
)


def work(name: str, *trials: Trial | float, arrives_s: float = 0.0, **more: object) -> Work:
    job = Job(**{"name": name, "argv": ("x",), **more})  # type: ignore[arg-type]
    found = tuple(trial if isinstance(trial, Trial) else Trial(trial) for trial in trials)
    return Work(job, found, arrives_s)


def run(
    where: tuple[Machine, ...], works: Sequence[Work], rules: Rules | None = None, strangers: Background | None = None
) -> History:
    return Simulation(where, works, rules or Rules(max_checks=1), strangers).run()


def by_name(history: History, works: Sequence[Work]) -> dict[str, list[FinishedAttempt]]:
    found: dict[str, list[FinishedAttempt]] = defaultdict(list)
    for ran in sorted(history.attempts, key=lambda ran: ran.start):
        found[works[ran.job].job.name].append(ran)
    return found


# --- known courses --------------------------------------------------------------------------------------------


def test_64_jobs_of_300_s_on_8_gpus_are_within_one_percent_of_ideal() -> None:
    works = drawn(64, Recipe(seconds=spread("300")), Random(0))
    history = run(machine("8x80GB"), works, Rules())
    # Nobody else is there: a second of quiet time before the first start, then a moment between two jobs on a GPU.
    assert history.makespan_s == pytest.approx(1 + 8 * 300 + 7 * TURNAROUND_S)
    assert figures(history, works).over_least == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("seconds", "makespan_s"), [(30, 6137.0), (300, 6407.0), (3600, 30217.0)])
def test_the_loop_of_the_guides_takes_as_long_as_was_measured(seconds: int, makespan_s: float) -> None:
    works = drawn(64, Recipe(seconds=spread(str(seconds))), Random(0))
    assert run_guides(machine("8x80GB"), works).makespan_s == makespan_s


def test_a_job_that_needs_another_runs_after_it_and_is_cancelled_when_that_fails() -> None:
    for_good = Trial(5.0, FailureClass.BAD_INPUT)
    works = [work("a", 10.0), work("b", 1.0, needs=("a",)), work("c", for_good), work("d", 1.0, needs=("c", "b"))]
    history = run(machine("4x80GB"), works)
    ran = by_name(history, works)
    assert ran["b"][0].start >= ran["a"][0].end
    assert (history.done, history.failed, history.cancelled) == (2, 1, 1)
    assert "d" not in ran


def test_rounds_follow_each_other() -> None:
    works = [work("late", 1.0, round=2), work("early", 7.0, round=1), work("between", 3.0, round=1)]
    ran = by_name(run(machine("8x80GB"), works), works)
    assert ran["late"][0].start >= max(ran["early"][0].end, ran["between"][0].end)


def test_priority_then_age_or_length_decide() -> None:
    works = [work("old", 10.0, cost=10.0), work("long", 20.0, cost=20.0), work("urgent", 1.0, priority=5, cost=1.0)]
    by_age = run(machine("1x80GB"), works)
    assert [works[ran.job].job.name for ran in by_age.attempts] == ["urgent", "old", "long"]
    longest = run(machine("1x80GB"), works, Rules(max_checks=1, order="longest"))
    assert [works[ran.job].job.name for ran in longest.attempts] == ["urgent", "long", "old"]


def test_a_time_limit_ends_an_attempt_and_the_job_is_tried_again() -> None:
    works = [work("slow", 100.0, retries=1, timeout_s=30.0), work("quick", 10.0)]
    history = run(machine("2x80GB"), works)
    slow = by_name(history, works)["slow"]
    assert [ran.end - ran.start for ran in slow] == pytest.approx([30.0, 30.0])
    assert {ran.failure for ran in slow} == {FailureClass.TIMEOUT}
    assert slow[0].gpus != slow[1].gpus, "a timeout is tried elsewhere"
    assert (history.done, history.failed) == (1, 1)


def test_out_of_memory_climbs_to_more_gpus() -> None:
    oom = Trial(10.0, FailureClass.OUT_OF_MEMORY)
    works = [work("big", oom, oom, 50.0, gpus=1, gpus_at_most=4, retries=0)]
    ran = by_name(run(machine("4x80GB"), works), works)["big"]
    assert [len(each.gpus) for each in ran] == [1, 2, 4]
    assert ran[-1].ending is Ending.DONE


def test_a_gpu_with_a_fault_is_left_out_for_a_while() -> None:
    works = [work("first", Trial(10.0, FailureClass.GPU_FAULT), 10.0, retries=3)]
    works += [work(f"job-{number}", 30.0) for number in range(40)]
    history = run(machine("2x80GB"), works)
    fault = next(ran for ran in history.attempts if ran.failure is FailureClass.GPU_FAULT)
    later = [ran.start for ran in history.attempts if ran.gpus == fault.gpus and ran.start > fault.end]
    assert history.done == 41
    assert later == [] or min(later) >= fault.end + FIRST_FAULT_S


@pytest.mark.parametrize("seed", range(4))
def test_jobs_with_bugs_cost_hardly_more_than_their_own_time(seed: int) -> None:
    """30 % of all attempts crash, wherever they run: no GPU is to blame."""
    recipe = Recipe(seconds=spread("uniform:1s,20s"), failures=failure_shares("crash=0.3"))
    works = drawn(1500, recipe, Random(seed))
    history = run(machine("4x80GB"), works)
    busy_s = sum(ran.end - ran.start for ran in history.attempts)
    assert history.makespan_s < 1.03 * busy_s / 4


@pytest.mark.parametrize("failure", FailureClass)
def test_every_class_of_failure_is_judged_as_that_class(failure: FailureClass) -> None:
    assert diagnosis(failure).failure is failure


def test_jobs_share_where_the_run_lets_all_or_they_say_so_themselves() -> None:
    works = [work(f"job-{number}", 100.0, memory_mb=20_000) for number in range(8)]
    together = run(machine("2x80GB"), works, Rules(max_checks=1, share=True))
    assert together.makespan_s < 101
    assert figures(together, works).utilisation == pytest.approx(1.0, abs=0.01)
    assert run(machine("2x80GB"), works).makespan_s > 400
    willing = [work(f"job-{number}", 100.0, memory_mb=20_000, share=True) for number in range(8)]
    assert run(machine("2x80GB"), willing).makespan_s == together.makespan_s


def test_what_can_never_run_is_refused_and_the_rest_runs() -> None:
    works = [work("huge", 1.0, gpus=9), work("fat", 1.0, memory_mb=90_000), work("well", 1.0)]
    history = run(machine("8x80GB"), works)
    assert (history.done, history.failed) == (1, 2)
    assert "9 GPUs" in history.refused[0] and "90000 MB" in history.refused[1]


def test_in_quiet_hours_nothing_new_starts() -> None:
    works = [work(f"job-{number}", 1800.0) for number in range(8)]
    rules = Rules(max_checks=1, quiet_hours="Mon-Fri 09:00-18:00")
    history = Simulation(machine("1x80GB"), works, rules, starts_at=start_time("Mon 08:00")).run()
    # Two fit in before nine, though the second runs into the quiet hours by a moment; the others wait for the evening.
    starts = sorted(ran.start for ran in history.attempts)
    assert [start < 3600 for start in starts] == [True, True] + [False] * 6
    assert starts[2] >= 10 * 3600
    assert history.done == 8


def test_a_limit_in_quiet_hours_leaves_some_gpus() -> None:
    works = [work(f"job-{number}", 1800.0) for number in range(8)]
    rules = Rules(max_checks=1, quiet_hours="Mon", quiet_max_gpus=1)
    history = run(machine("4x80GB"), works, rules)
    assert history.makespan_s == pytest.approx(8 * 1800, rel=0.01)


def test_large_jobs_that_wait_for_the_evening_hide_no_small_one() -> None:
    """More of them at the head of the queue than a decision looks at."""
    works = [work(f"wide-{number}", 60.0, gpus=2) for number in range(30)]
    works += [work(f"small-{number}", 60.0) for number in range(10)]
    rules = Rules(max_checks=1, quiet_hours="Mon", quiet_max_gpus=1)
    history = run(machine("4x80GB"), works, rules)
    assert history.done == 40
    ran = by_name(history, works)
    assert max(ran[f"small-{number}"][0].end for number in range(10)) < 3600
    assert min(ran[f"wide-{number}"][0].start for number in range(30)) >= 24 * 3600


# --- strangers ------------------------------------------------------------------------------------------------

ALWAYS_IN_THE_WAY = Background(busy=0.5, mean_s=600.0, barge=1.0)


def test_when_strangers_are_ignored_no_attempt_is_cut() -> None:
    works = [work(f"job-{number}", 300.0) for number in range(20)]
    history = run(machine("4x80GB"), works, Rules(max_checks=1), ALWAYS_IN_THE_WAY)
    assert len(history.attempts) == 20
    assert all(ran.end - ran.start == pytest.approx(300.0) for ran in history.attempts)


def test_jobs_that_give_way_go_back_without_losing_a_try() -> None:
    works = [work(f"job-{number}", 300.0, retries=0) for number in range(20)]
    history = run(machine("4x80GB"), works, Rules(max_checks=1, yield_to_others="requeue"), ALWAYS_IN_THE_WAY)
    assert history.done == 20
    cut = [ran for ran in history.attempts if ran.ending is Ending.GAVE_WAY]
    assert cut and all(ran.end - ran.start < 300.0 for ran in cut)


def test_jobs_that_are_paused_run_as_long_as_ever_but_for_the_pauses() -> None:
    works = [work(f"job-{number}", 300.0, retries=0) for number in range(20)]
    history = run(machine("4x80GB"), works, Rules(max_checks=1, yield_to_others="pause"), ALWAYS_IN_THE_WAY)
    assert len(history.attempts) == history.done == 20
    lengths = [ran.end - ran.start for ran in history.attempts]
    assert min(lengths) == pytest.approx(300.0)
    assert max(lengths) > 310.0
    for ran in history.attempts:
        shared_s = sum(
            max(0.0, min(ran.end, visit.end) - max(ran.start, visit.start))
            for visit in history.visits
            if visit.gpu == ran.gpus[0]
        )
        # Two seconds go by until a stranger counts, and the quiet time until the job goes on.
        assert ran.end - ran.start - 300.0 <= shared_s + 2.0


def test_strangers_who_look_never_come_to_a_gpu_of_ours() -> None:
    works = [work(f"job-{number}", 500.0) for number in range(30)]
    history = run(machine("4x80GB"), works, Rules(max_checks=1), Background(busy=0.5, mean_s=600.0))
    spans = busy_spans(history)
    for visit in history.visits:
        assert not any(start < visit.end and visit.start < end for start, end in spans[visit.gpu])


def test_a_job_that_can_never_get_its_gpus_does_not_hold_the_simulation_up() -> None:
    works = [work("all", 1.0, gpus=8)]
    history = run(machine("8x80GB"), works, Rules(max_checks=10), Background(busy=0.99, mean_s=360_000.0))
    assert (history.done, history.stuck) == (0, 1)


# --- what must hold of every run ------------------------------------------------------------------------------

FAILURES = st.sampled_from([None, None, None, *FailureClass])
TRIALS = st.lists(st.builds(Trial, st.integers(1, 400).map(float), FAILURES), min_size=1, max_size=3).map(tuple)


@st.composite
def any_works(draw: st.DrawFn) -> list[Work]:
    works: list[Work] = []
    for number in range(draw(st.integers(1, 14))):
        gpus = draw(st.sampled_from([0, 1, 1, 1, 2, 4]))
        memory_mb = draw(st.sampled_from([None, 10_000, 30_000, 60_000]))
        works.append(
            work(
                f"job-{number}",
                *draw(TRIALS),
                arrives_s=float(draw(st.sampled_from([0, 0, 50, 500]))),
                gpus=gpus,
                gpus_at_most=draw(st.sampled_from([None, 4])) if gpus else None,
                memory_mb=memory_mb,
                share=gpus == 1 and memory_mb is not None and draw(st.booleans()),
                priority=draw(st.integers(0, 1)),
                round=0,
                cost=float(draw(st.integers(1, 9))),
                retries=draw(st.integers(0, 2)),
                needs=tuple({f"job-{draw(st.integers(0, number - 1))}"}) if number and draw(st.booleans()) else (),
            )
        )
    return sorted(works, key=lambda each: each.arrives_s)


@settings(max_examples=60, deadline=None)
@given(
    works=any_works(),
    where=st.sampled_from(["one 4x80GB", "one 2x80GB+2x24GB", "cluster 2x4x80GB", "cluster 4x2x80GB"]),
    rules=st.builds(
        Rules,
        max_checks=st.sampled_from([1, 10]),
        order=st.sampled_from(["age", "longest"]),
        share=st.booleans(),
        yield_to_others=st.sampled_from(["ignore", "pause", "requeue"]),
        max_gpus=st.sampled_from([None, 4]),
        max_concurrent=st.sampled_from([None, 2]),
    ),
    busy=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 5),
)
def test_what_holds_of_every_run(works: list[Work], where: str, rules: Rules, busy: float, seed: int) -> None:
    place = machine(where.split()[-1]) if where.startswith("one ") else machines(where.split()[-1])
    strangers = Background(busy, 300.0, 0.3) if busy else None
    history = Simulation(place, works, rules, strangers, seed).run()
    assert history == Simulation(place, works, rules, strangers, seed).run(), "the same again is the same"
    assert history.done + history.failed + history.cancelled + history.stuck == len(works)
    assert history.stuck == 0
    _nobody_is_in_anothers_way(history, works, [gpu.total_mb for each in place for gpu in each])
    _limits_are_kept(history, rules)
    ran = by_name(history, works)
    for each in works:
        mine = ran.get(each.job.name, [])
        assert sum(one.ending is Ending.DONE for one in mine) <= 1
        for one, after in pairwise(mine):
            assert one.end <= after.start
        for need in each.job.needs:
            done_at = [one.end for one in ran.get(need, []) if one.ending is Ending.DONE]
            assert not mine or (done_at and mine[0].start >= done_at[0])
        assert all(one.wait_s >= 0 and one.start >= each.arrives_s for one in mine)


def _nobody_is_in_anothers_way(history: History, works: Sequence[Work], total_mb: Sequence[int]) -> None:
    events: list[tuple[float, int, FinishedAttempt]] = []
    for ran in history.attempts:
        events += [(ran.end, 0, ran), (ran.start, 1, ran)]
    on: dict[int, list[FinishedAttempt]] = defaultdict(list)
    for _, begins, ran in sorted(events, key=lambda event: event[:2]):
        for gpu in ran.gpus:
            on[gpu].append(ran) if begins else on[gpu].remove(ran)
            assert len(on[gpu]) <= 1 or all(each.shared for each in on[gpu])
            if len(on[gpu]) > 1:
                assert sum(works[each.job].job.memory_mb or 0 for each in on[gpu]) <= total_mb[gpu]
    for visit in history.visits:
        # Who was there first has the GPU: nothing of ours starts beside a stranger.
        assert not any(visit.gpu in ran.gpus and visit.start <= ran.start < visit.end for ran in history.attempts)


def _limits_are_kept(history: History, rules: Rules) -> None:
    for moment in {ran.start for ran in history.attempts}:
        running = [ran for ran in history.attempts if ran.start <= moment < ran.end]
        assert rules.max_concurrent is None or len(running) <= rules.max_concurrent
        held = {gpu for ran in running for gpu in ran.gpus}
        assert rules.max_gpus is None or len(held) <= rules.max_gpus


def test_a_large_job_is_not_starved_by_small_ones_that_keep_coming() -> None:
    works = [work(f"small-{n}", 60.0, arrives_s=n * 20.0) for n in range(400)]
    works.insert(26, work("large", 60.0, arrives_s=510.0, gpus=4))
    ran = by_name(run(machine("4x80GB"), works), works)["large"]
    assert ran[0].start <= 510 + 60 + 1


def test_a_cluster_of_machines_is_one_queue_and_a_job_stays_on_one_machine() -> None:
    recipe = Recipe(seconds=spread("exponential:100"), gpus=Mix((1, 4), (4.0, 1.0)))
    works = drawn(300, recipe, Random(5))
    history = run(machines("5x4x80GB"), works)
    assert history.done == 300
    assert all(len({gpu // 4 for gpu in ran.gpus}) == 1 for ran in history.attempts)
    assert {gpu // 4 for ran in history.attempts for gpu in ran.gpus} == set(range(5))
    assert (figures(history, works).utilisation or 0) > 0.6


def test_time_limits_let_short_jobs_run_on_gpus_that_are_kept() -> None:
    sizes = Mix((1, 2, 4, 8), (70.0, 15.0, 10.0, 5.0))
    without, limited = (
        drawn(200, Recipe(seconds=spread("lognormal:5m,1"), gpus=sizes, limits=limits), Random(0))
        for limits in (None, 1.5)
    )
    assert [each.trials for each in without] == [each.trials for each in limited]
    plain, filled = (figures(run(machine("8x80GB"), works), works) for works in (without, limited))
    assert plain.done == filled.done == 200
    assert (filled.over_least or 9) < 0.85 * (plain.over_least or 0)


def test_works_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        run(machine("4x80GB"), [work("b", 1.0, arrives_s=5.0), work("a", 1.0)])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    where=st.sampled_from(["8x80GB", "4x4x80GB"]),
    order=st.sampled_from(["age", "longest"]),
    failing=st.booleans(),
)
def test_decisions_that_nothing_new_has_come_to_are_left_out_and_nothing_is_missed(
    seed: int, where: str, order: str, failing: bool
) -> None:
    recipe = Recipe(
        seconds=spread("exponential:60"),
        gpus=Mix((0, 1, 2, 4), (1.0, 6.0, 2.0, 1.0)),
        every=spread("exponential:5") if seed % 2 else None,
        failures={FailureClass.CRASH: 0.1, FailureClass.GPU_FAULT: 0.02} if failing else {},
    )
    works = drawn(60, recipe, Random(seed))
    rules = Rules(max_checks=2, order=order)  # type: ignore[arg-type]
    there = machine(where) if where.count("x") == 1 else machines(where)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Simulation, "_nothing_is_new", lambda _: False)
        always = run(there, works, rules)
    sparing = run(there, works, rules)
    assert sparing.attempts == always.attempts
    assert sparing.decisions <= always.decisions
