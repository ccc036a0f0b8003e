"""When a GPU is free: one check, and checks in a row."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpus.machines import gpu, process, split

from gpuherd.gpus import idle, nvml_read
from gpuherd.gpus.idle import Check, IdleRule, Streaks, check, is_free, observe, released
from gpuherd.gpus.state import GpuProcess

RULE = IdleRule(memory_threshold_mb=500, max_checks=3)
FREE = Check(True, "")
DRAINING = Check(False, "3000 MB used (threshold 500)")
STRANGER = Check(False, "alice runs python (pid 4711, 900 MB)", stranger=True)


@pytest.mark.parametrize("module", [idle, nvml_read])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    ran = doctest.testmod(module)  # type: ignore[arg-type]
    assert ran.attempted > 0
    assert ran.failed == 0


@pytest.mark.parametrize(("used_mb", "free"), [(0, True), (499, True), (500, False), (1234, False)])
def test_memory_under_the_threshold_is_free(used_mb: int, free: bool) -> None:
    found = check(gpu(0, used_mb=used_mb), RULE)
    assert found.free is free
    assert found.reason == ("" if free else f"{used_mb} MB used (threshold 500)")


def test_memory_counts_even_when_no_process_is_listed_as_in_a_container() -> None:
    assert not check(gpu(0, used_mb=9000, processes=()), RULE).free


def test_a_computing_process_is_busy_under_the_threshold_too() -> None:
    found = check(gpu(0, used_mb=300, processes=(process(memory_mb=300),)), RULE)
    assert found == Check(False, "alice runs python (pid 4711, 300 MB)", stranger=True)


def test_the_largest_process_is_named_and_an_unknown_one_is_still_a_sentence() -> None:
    small, large = process(1, memory_mb=10), process(2, memory_mb=20)
    assert "(pid 2, 20 MB)" in check(gpu(0, processes=(small, large)), RULE).reason
    unknown = GpuProcess(pid=7, user=None, command=None, memory_mb=None)
    assert check(gpu(0, processes=(unknown,)), RULE).reason == "someone runs a process (pid 7)"


def test_display_processes_do_not_count_under_the_threshold_and_do_above() -> None:
    assert check(gpu(0, used_mb=150, processes=(process(memory_mb=150, compute=False),)), RULE).free
    found = check(gpu(0, used_mb=600, processes=(process(memory_mb=600, compute=False),)), RULE)
    assert found == Check(False, "600 MB used (threshold 500)", stranger=False)


def test_our_own_processes_count_neither_by_pid_nor_by_memory() -> None:
    mine = gpu(0, used_mb=20_000, processes=(process(11, memory_mb=19_900),))
    assert check(mine, RULE, own_pids=frozenset({11})).free
    shared = gpu(0, used_mb=21_000, processes=(process(11, memory_mb=19_900), process(12, memory_mb=1_000)))
    assert check(shared, RULE, own_pids=frozenset({11})).reason == "1100 MB used (threshold 500)"


def test_broken_and_split_gpus_are_never_free() -> None:
    assert check(gpu(0, problem="it has fallen off the bus"), RULE).reason == "has a problem: it has fallen off the bus"
    parent, instance = split(0, [0])
    assert check(parent, RULE) == Check(False, "split into MIG instances")
    assert check(instance, RULE).free


@given(st.lists(st.sampled_from([FREE, DRAINING, STRANGER]), max_size=30), st.integers(1, 5))
def test_a_gpu_is_free_exactly_after_max_checks_clean_checks_in_a_row(looks: list[Check], max_checks: int) -> None:
    rule = IdleRule(max_checks=max_checks)
    streaks = Streaks()
    for count, look in enumerate(looks, start=1):
        streaks = observe(streaks, {"a": look}, rule)
        last = looks[max(0, count - max_checks) : count]
        assert is_free(streaks, "a", rule) is (len(last) == max_checks and all(each.free for each in last))


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from([FREE, DRAINING, STRANGER])), max_size=12))
def test_gpus_do_not_influence_each_other(looks: list[dict[str, Check]]) -> None:
    together, alone = Streaks(), Streaks()
    for look in looks:
        together = observe(together, look, RULE)
        alone = observe(alone, {uuid: found for uuid, found in look.items() if uuid == "a"}, RULE)
    assert is_free(together, "a", RULE) == is_free(alone, "a", RULE)


def test_after_our_own_job_one_clean_check_is_enough() -> None:
    streaks = released(Streaks({"a": 3, "b": 1}, {}), "a", RULE)
    assert not is_free(streaks, "a", RULE)
    assert is_free(observe(streaks, {"a": FREE}, RULE), "a", RULE)
    assert not is_free(observe(streaks, {"b": FREE}, RULE), "b", RULE)


def test_memory_that_is_still_draining_after_our_job_does_not_cost_the_quick_return() -> None:
    streaks = observe(released(Streaks(), "a", RULE), {"a": DRAINING}, RULE)
    assert not is_free(streaks, "a", RULE)
    assert is_free(observe(streaks, {"a": FREE}, RULE), "a", RULE)


@pytest.mark.parametrize("between", [[STRANGER], [DRAINING] * RULE.max_checks])
def test_a_gpu_that_someone_took_after_our_job_needs_all_checks_again(between: list[Check]) -> None:
    streaks = released(Streaks(), "a", RULE)
    for look in between:
        streaks = observe(streaks, {"a": look}, RULE)
    for _ in range(RULE.max_checks - 1):
        streaks = observe(streaks, {"a": FREE}, RULE)
        assert not is_free(streaks, "a", RULE)
    assert is_free(observe(streaks, {"a": FREE}, RULE), "a", RULE)


def test_the_quick_return_is_used_up_by_the_clean_check() -> None:
    streaks = observe(released(Streaks(), "a", RULE), {"a": FREE}, RULE)
    streaks = observe(observe(streaks, {"a": DRAINING}, RULE), {"a": FREE}, RULE)
    assert not is_free(streaks, "a", RULE)
