"""What people write: machines, spreads, mixes, strangers, times of the week, rules to compare."""

from __future__ import annotations

import doctest
from importlib import import_module
from random import Random
from statistics import mean, median

import pytest

from gpuherd.errors import UsageError
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.simulate.options import Rules, variants
from gpuherd.simulate.workload import background, failure_shares, machine, machines, mix, spread, start_time


@pytest.mark.parametrize(
    "name",
    ["charts", "options", "results", "state", "workload"],
)
def test_examples_in_the_code_hold(name: str) -> None:
    result = doctest.testmod(import_module(f"gpuherd.simulate.{name}"))
    assert result.attempted and not result.failed


def test_every_gpu_of_a_cluster_has_a_name_of_its_own() -> None:
    found = machines("125x8x80GB")
    assert [len(each) for each in found] == [8] * 125
    assert len({gpu.uuid for each in found for gpu in each}) == 1000


@pytest.mark.parametrize("word", ["", "8", "8x", "0x80GB", "8x80", "8xGB", "-1x80GB", "999999999x80GB", "2x8x80GB"])
def test_what_is_no_machine_is_refused_with_an_example(word: str) -> None:
    with pytest.raises(ValueError, match=r"8x80GB|can be simulated|--machines"):
        machine(word)


@pytest.mark.parametrize(
    ("word", "low", "high"),
    [
        ("300", 300, 300),
        ("uniform:100,500", 290, 310),
        ("exponential:5m", 290, 310),
        ("lognormal:300,0.2", 300, 315),
        ("pareto:200,3", 295, 305),
    ],
)
def test_spreads_have_the_mean_that_their_figures_say(word: str, low: float, high: float) -> None:
    chance = Random(1)
    drawn = [spread(word).draw(chance) for _ in range(20_000)]
    assert low <= mean(drawn) <= high
    assert min(drawn) >= 0


def test_a_lognormal_is_given_by_its_median() -> None:
    chance = Random(2)
    assert median(spread("lognormal:300,1").draw(chance) for _ in range(20_001)) == pytest.approx(300, rel=0.03)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("lognormol:3,1", "did you mean lognormal"),
        ("lognormal:3", "takes median and sigma"),
        ("lognormal:3,-1", "sigma"),
        ("uniform:9,3", "least is above the most"),
        ("zipf:3", "fixed, uniform"),
        ("soon", "length of time"),
    ],
)
def test_what_is_no_spread_is_refused(word: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        spread(word)


def test_mixes_are_drawn_by_weight() -> None:
    chance = Random(3)
    drawn = [mix("1:8,4:2", int).draw(chance) for _ in range(10_000)]
    assert drawn.count(4) / len(drawn) == pytest.approx(0.2, abs=0.02)
    with pytest.raises(ValueError, match="weight"):
        mix("1:0", int)


def test_failures_are_named_by_class() -> None:
    assert failure_shares("gpu-fault=0.1,Crash=0.2") == {FailureClass.GPU_FAULT: 0.1, FailureClass.CRASH: 0.2}
    with pytest.raises(ValueError, match="did you mean crash"):
        failure_shares("crahs=0.1")
    with pytest.raises(ValueError, match="more than 1"):
        failure_shares("crash=0.7,killed=0.7")
    with pytest.raises(ValueError, match="from 0 to 1"):
        failure_shares("crash=often")


def test_strangers_use_the_share_of_time_that_was_said() -> None:
    strangers = background("busy=0.3,mean=1h,barge=0.25")
    until, used, barging, count = 3600.0 * 20_000, 0.0, 0, 0
    for session in strangers.sessions(7, "GPU-a"):
        if session.start > until:
            break
        used += min(session.end, until) - session.start
        barging, count = barging + session.barges, count + 1
    assert used / until == pytest.approx(0.3, abs=0.02)
    assert barging / count == pytest.approx(0.25, abs=0.03)


def test_strangers_do_the_same_again_with_the_same_seed() -> None:
    def first(seed: int, gpu: str) -> object:
        plan = background("busy=0.5").sessions(seed, gpu)
        return [next(plan) for _ in range(5)]

    assert first(1, "GPU-a") == first(1, "GPU-a")
    assert first(1, "GPU-a") != first(2, "GPU-a") != first(2, "GPU-b")


@pytest.mark.parametrize("word", ["mean=2h", "busy=1.5", "busy=1", "bussy=0.3", "busy=0.1,busy=0.2", "busy", ""])
def test_strangers_that_cannot_be_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"busy"):
        background(word)


@pytest.mark.parametrize("word", ["", "Moon 09:00", "Mon 25:00", "Mon 09:99", "09:00"])
def test_what_is_no_time_of_the_week_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="Mon 08:30"):
        start_time(word)


def test_rules_are_compared_in_every_combination() -> None:
    found = variants(Rules(max_checks=3), ["share=on,off", "max-checks=1,2", "yield=pause"])
    assert [each.name for each in found] == [
        "share=on max-checks=1 yield=pause",
        "share=on max-checks=2 yield=pause",
        "share=off max-checks=1 yield=pause",
        "share=off max-checks=2 yield=pause",
    ]
    assert found[1].rules == Rules(max_checks=2, share=True, yield_to_others="pause")


def test_without_anything_to_compare_there_is_one_run_without_a_name() -> None:
    (only,) = variants(Rules(max_checks=3), [])
    assert (only.name, only.rules) == ("", Rules(max_checks=3))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("ordre=age", "did you mean order="),
        ("order", "names no rule"),
        ("order=oldest", "possible: age, longest|did you mean"),
        ("max_checks=0", "whole number above 0"),
        ("share=maybe", "neither on nor off"),
        ("quiet_hours=Mun 09:00-10:00", "quiet_hours"),
    ],
)
def test_rules_that_are_none_are_refused(word: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        variants(Rules(), [word])


def test_a_rule_is_compared_once() -> None:
    with pytest.raises(UsageError, match="twice"):
        variants(Rules(), ["order=age", "order=longest"])
    with pytest.raises(UsageError, match="more than 64"):
        variants(Rules(), ["max_checks=" + ",".join(map(str, range(1, 66)))])
