"""Several users on one machine in virtual time: shares, turns, predictions, and what must hold of every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.test_recorded import SCENARIOS

from gpuherd.gpus.idle import IdleRule
from gpuherd.jobs.job import Job
from gpuherd.simulate import Recipe, Result, Rules, Scenario, drawn, machine, simulate, spread, variants
from gpuherd.simulate.charts import user_shares
from gpuherd.simulate.engine import Simulation
from gpuherd.simulate.options import TURNAROUND_S
from gpuherd.simulate.people import User, arrivals, hours_used, user_figures, users, with_expected_costs, works_of
from gpuherd.simulate.results import Ending, FinishedAttempt, History, UserHistory, busy_spans
from gpuherd.simulate.shared import SharedSimulation
from gpuherd.simulate.workload import Background, Mix, Trial, Work, start_time

QUIET_S = IdleRule(max_checks=2).quiet_s


def jobs_of(
    people: Sequence[User], length: str = "3m", count: int = 40, gpus: Mapping[str, int] | None = None, seed: int = 0
) -> tuple[Work, ...]:
    def recipe(user: User) -> Recipe:
        return Recipe(seconds=spread(length), gpus=Mix(((gpus or {}).get(user.name, 1),), (1.0,)))

    return works_of(
        (user, with_expected_costs(drawn(count, recipe(user), Random(f"{seed}/{user.name}")))) for user in people
    )


def ran(
    people: Sequence[User], works: Sequence[Work], where: str = "4x80GB", rules: Rules | None = None, **more: object
) -> Result:
    scenario = Scenario(machines=machine(where), works=tuple(works), users=tuple(people), **more)  # type: ignore[arg-type]
    (result,) = simulate(scenario, variants(rules or Rules(), []))
    return result


def shares_until(history: History, works: Sequence[Work], second: float) -> dict[str, float]:
    """Each user's part of the GPU time up to this second."""
    used = {user.name: 0.0 for user in history.users}
    for each in history.attempts:
        used[works[each.job].user] += len(each.gpus) * max(0.0, min(each.end, second) - each.start)
    return {name: seconds / sum(used.values()) for name, seconds in used.items()}


# --- shares -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["alice,bob,carol", "alice:2,bob:1,carol:1", "alice:3,bob:2,carol:1"])
@pytest.mark.parametrize("length", ["3m", "uniform:2m,5m"])
def test_three_users_with_40_jobs_each_have_their_shares_of_an_hour_on_4_gpus(word: str, length: str) -> None:
    people = users(word)
    works = jobs_of(people, length)
    result = ran(people, works)
    assert result.figures.done == 120
    weight = sum(user.weight for user in people)
    found = shares_until(result.history, works, 3600)
    for user in people:
        assert found[user.name] == pytest.approx(user.weight / weight, rel=0.05, abs=0.015)
    # Turns cost no GPU time to speak of.
    assert (result.figures.used_until_last_start or 0) > 0.97


def test_without_turns_the_first_one_keeps_all_gpus_until_no_job_is_left() -> None:
    people = users("alice:1,bob:9")
    works = jobs_of(people)
    by_chance = ran(people, works, rules=Rules(turns=False))
    alice, bob = by_chance.users
    assert bob.first_gpu_s is not None and bob.first_gpu_s > 1_500
    assert bob.of_due == 0.0 and alice.of_due == pytest.approx(10.0, rel=0.01)
    assert (alice.predicted_s, bob.predicted_s) == (None, None)
    turns = ran(people, works).users
    assert turns[1].first_gpu_s is not None and turns[1].first_gpu_s < 5
    assert turns[1].of_due == pytest.approx(1.0, abs=0.1)


def test_who_has_used_the_machine_lately_lets_the_others_go_first() -> None:
    alice, bob = users("alice,bob")
    people = (replace(alice, used_s=3_600.0), bob)
    works = jobs_of(people, count=20)
    found = shares_until(ran(people, works).history, works, 900)
    assert found["bob"] > 0.9
    # Half an hour of one GPU counts little after a half-life of a minute.
    soon = shares_until(ran(people, works, rules=Rules(half_life=60.0)).history, works, 900)
    assert soon["bob"] < 0.8


def test_a_limit_of_each_users_own_leaves_the_rest_to_the_others() -> None:
    people = users("alice,bob")
    works = jobs_of(people)
    result = ran(people, works, where="8x80GB", rules=Rules(max_gpus=2))
    for gpu_seconds in shares_until(result.history, works, 3600).values():
        assert gpu_seconds == pytest.approx(0.5, abs=0.01)
    assert result.figures.makespan_s == pytest.approx(20 * 180, rel=0.01)


# --- turns that are predicted -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_one_who_comes_late_has_a_turn_when_it_was_predicted(seed: int) -> None:
    chance = Random(seed)
    people = users(",".join(f"user{number}:{chance.choice((1, 2, 3))}" for number in range(chance.choice((2, 3, 6)))))
    people = (*people[:-1], replace(people[-1], arrives_s=chance.uniform(600, 2_400)))
    works = jobs_of(people, chance.choice(("3m", "uniform:1m,10m", "lognormal:5m,1")), count=60, seed=seed)
    late = ran(people, works, where=chance.choice(("4x80GB", "8x80GB"))).users[-1]
    assert late.first_gpu_s is not None and late.predicted_s is not None
    waited_s, predicted_s = late.first_gpu_s - late.arrives_s, late.predicted_s - late.arrives_s
    assert waited_s > 0
    assert predicted_s == pytest.approx(waited_s, rel=0.1, abs=0.5)


def test_the_turn_of_a_large_job_is_predicted_when_lengths_are_known() -> None:
    alice, bob = users("alice,bob")
    people = (alice, replace(bob, arrives_s=400.0))
    works = jobs_of(people, gpus={"bob": 4})
    late = ran(people, works).users[1]
    assert late.first_gpu_s is not None and late.predicted_s is not None
    assert late.predicted_s - 400.0 == pytest.approx(late.first_gpu_s - 400.0, rel=0.1)


@pytest.mark.parametrize("length", ["3m", "lognormal:5m,1"])
@pytest.mark.parametrize("gpus", [2, 4])
def test_jobs_on_several_gpus_are_not_starved_by_many_small_ones(length: str, gpus: int) -> None:
    people = users("alice,bob,carol")
    works = jobs_of(people, length, count=200, gpus={"bob": gpus})
    history = ran(people, works).history
    starts = [each.start for each in history.attempts if works[each.job].user == "bob"]
    small_s = max(each.end for each in history.attempts if works[each.job].user != "bob")
    # Well before the small jobs of the others are done.
    assert min(starts) < small_s / 4
    assert sum(start < small_s for start in starts) >= 3
    assert history.done == 600


# --- one alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (where, *_) in SCENARIOS.items() if not where.startswith("4x4x")])
def test_a_user_alone_has_the_same_history_as_without_turns(name: str) -> None:
    where, recipe, rules, strangers = SCENARIOS[name]
    works = drawn(150, recipe, Random(7))
    begin = start_time("Mon 07:00")
    plain = Simulation(machine(where), works, rules, strangers, 7, begin).run()
    (alone,) = users("alice")
    shared = SharedSimulation(machine(where), works_of([(alone, works)]), (alone,), rules, strangers, 7, begin).run()
    assert shared.attempts == plain.attempts
    assert shared.visits == plain.visits
    assert (shared.done, shared.failed, shared.cancelled, shared.refused) == (
        plain.done,
        plain.failed,
        plain.cancelled,
        plain.refused,
    )


def test_one_whose_others_have_gone_has_the_whole_machine() -> None:
    alice, bob = users("alice,bob:5")
    works = works_of([(alice, drawn(60, Recipe(seconds=spread("3m")), Random(0))), (bob, _one(60.0))])
    result = ran((alice, bob), works)
    assert result.figures.makespan_s == pytest.approx((60 * 180 + 60) / 4, rel=0.07)


def _one(seconds: float) -> tuple[Work, ...]:
    return (Work(Job(name="only", argv=("x",)), (Trial(seconds),)),)


# --- what must hold of every run ----------------------------------------------------------------------------


@st.composite
def any_users(draw: st.DrawFn) -> tuple[tuple[User, ...], tuple[Work, ...]]:
    people = tuple(
        User(f"user{number}", draw(st.sampled_from([1.0, 2.0, 0.5])), float(draw(st.sampled_from([0, 0, 70, 400]))))
        for number in range(draw(st.integers(1, 4)))
    )
    jobs = []
    for user in people:
        recipe = Recipe(
            seconds=spread(draw(st.sampled_from(["1m", "uniform:1s,5m", "exponential:90"]))),
            gpus=Mix((0, 1, 2, 4), (0.5, 6.0, draw(st.sampled_from([0.0001, 2.0])), 1.0)),
            memory_mb=draw(st.sampled_from([None, Mix((8_000, 30_000), (2.0, 1.0))])),
            every=draw(st.sampled_from([None, spread("exponential:30")])),
            guess=draw(st.sampled_from([0.0, 0.5])),
        )
        jobs.append((user, with_expected_costs(drawn(draw(st.integers(1, 15)), recipe, Random(user.name)))))
    return people, works_of(jobs)


@settings(max_examples=40, deadline=None)
@given(
    given_users=any_users(),
    where=st.sampled_from(["4x80GB", "2x80GB+2x24GB", "8x40GB"]),
    rules=st.builds(
        Rules,
        max_checks=st.sampled_from([None, 1, 10]),
        share=st.booleans(),
        turns=st.booleans(),
        order=st.sampled_from(["age", "longest"]),
        max_gpus=st.sampled_from([None, 4]),
        keep_share=st.sampled_from([None, 0.5]),
    ),
    strangers=st.sampled_from([None, None, Background(0.3, 300.0, 0.3)]),
)
def test_no_gpu_has_two_users_and_every_job_has_its_turn(
    given_users: tuple[tuple[User, ...], tuple[Work, ...]], where: str, rules: Rules, strangers: Background | None
) -> None:
    people, works = given_users
    history = SharedSimulation(machine(where), works, people, rules, strangers).run()
    assert history.stuck == 0
    assert history.done + history.failed == len(works)
    assert history.failed == len(history.refused)
    assert history == SharedSimulation(machine(where), works, people, rules, strangers).run()
    quiet_s = IdleRule(max_checks=rules.max_checks or (2 if strangers is None else 10)).quiet_s
    spans = {user.name: busy_spans(replace(history, attempts=tuple(_of(user.name, history, works)))) for user in people}
    for gpu in range(history.gpus):
        mixed = sorted((start, end, name) for name, own in spans.items() for start, end in own.get(gpu, ()))
        for (_, end, name), (start, _, following) in pairwise(mixed):
            if name == following:
                assert start >= end + TURNAROUND_S - 1e-9 or rules.share
            else:
                assert start >= end + quiet_s - 1e-6, "a GPU that another's job left must be quiet first"
    found = user_figures(history, works)
    assert sum(user.gpu_hours for user in found) == pytest.approx(
        sum(end - start for own in spans.values() for each in own.values() for start, end in each) / 3600
    )
    assert sum(user.contended_gpu_hours for user in found) == pytest.approx(sum(user.due_gpu_hours for user in found))
    for user in history.users:
        assert all(start <= end for start, end in user.waiting)
        assert [*user.waiting] == sorted(user.waiting)


def _of(name: str, history: History, works: Sequence[Work]) -> list:  # type: ignore[type-arg]
    return [each for each in history.attempts if works[each.job].user == name]


def test_a_job_of_a_name_that_nobody_has_is_refused() -> None:
    (alice,) = users("alice")
    with pytest.raises(ValueError, match="one of the users"):
        SharedSimulation(machine("4x80GB"), works_of([(User("bob"), _one(1.0))]), (alice,), Rules())


def test_the_figures_of_users_are_worked_out_from_the_time_in_which_several_wait() -> None:
    """Alice holds two GPUs for 3,600 s and Bob one. Both wait for the first half, then only Alice does."""

    def span(job: int, gpu: int, start: float, end: float) -> FinishedAttempt:
        return FinishedAttempt(job, (gpu,), start, end, start, Ending.DONE)

    works = [replace(work, user=name) for name in ("alice", "alice", "bob") for work in _one(1.0)]
    history = History(
        machines=(3,),
        attempts=(span(0, 0, 0, 3600), span(1, 1, 0, 3600), span(2, 2, 0, 3600)),
        visits=(),
        done=3,
        failed=0,
        cancelled=0,
        refused={},
        users=(UserHistory("alice", 1.0, ((0.0, 3600.0),), 7.0), UserHistory("bob", 3.0, ((0.0, 1800.0),))),
    )
    alice, bob = user_figures(history, works)
    assert (alice.gpu_hours, bob.gpu_hours) == (2.0, 1.0)
    assert (alice.share, bob.share) == pytest.approx((2 / 3, 1 / 3))
    # One and a half GPU-hours for both while both waited, of which a quarter was due to Alice.
    assert (alice.contended_gpu_hours, alice.due_gpu_hours) == pytest.approx((1.0, 0.375))
    assert (bob.contended_gpu_hours, bob.due_gpu_hours) == pytest.approx((0.5, 1.125))
    assert (alice.of_due, bob.of_due) == pytest.approx((8 / 3, 4 / 9))
    assert (alice.predicted_s, bob.predicted_s) == (7.0, None)
    assert alice.first_gpu_s == 0.0
    cells = user_shares(history, works, 4)
    assert cells == {"alice": pytest.approx([2 / 3] * 4), "bob": pytest.approx([1 / 3] * 4)}


def test_needs_are_between_the_jobs_of_one_user() -> None:
    def chain() -> tuple[Work, ...]:
        first, then = Job(name="first", argv=("x",)), Job(name="then", argv=("x",), needs=("first",))
        return Work(first, (Trial(10.0),)), Work(then, (Trial(10.0),))

    alice, bob = users("alice,bob")
    works = works_of([(alice, chain()), (bob, chain())])
    result = ran((alice, bob), works)
    assert result.figures.done == 4
    assert result.figures.least_s == 20.0
    ends = {(works[each.job].user, works[each.job].job.name): each for each in result.history.attempts}
    for name in ("alice", "bob"):
        assert ends[name, "then"].start >= ends[name, "first"].end


# --- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("", "no name of a user"),
        ("alice:0", "a weight is a number above 0"),
        ("alice:nan", "a weight is a number above 0"),
        ("alice,alice", "twice"),
        ("al ice", "no name of a user"),
        ("../x", "no name of a user"),
        ("alice\x1b[31m", "no name of a user"),
        (",".join(f"u{number}" for number in range(65)), "at most 64"),
    ],
)
def test_users_that_do_not_parse(word: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        users(word)


def test_values_by_user() -> None:
    assert arrivals("bob=30m, carol=1h") == {"bob": 1800.0, "carol": 3600.0}
    assert hours_used("alice=0.5") == {"alice": 1800.0}
    for word in ("bob", "bob=soon", "bob=1m,bob=2m", "=1m"):
        with pytest.raises(ValueError):
            arrivals(word)
