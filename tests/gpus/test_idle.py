"""When a GPU is free: one check, and checks in a row."""

from __future__ import annotations

import doctest
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpus.machines import gpu, process, split

from gpuherd.gpus import idle, nvml
from gpuherd.gpus.idle import Check, IdleRule, Streaks, check, clean_checks, forgotten, is_free, observe, released
from gpuherd.gpus.state import GpuProcess

RULE = IdleRule(memory_threshold_mb=500, max_checks=3)
EMPTY = Streaks()
FREE = Check(True, "")
DRAINING = Check(False, "3000 MB used (threshold 500)")
STRANGER = Check(False, "alice runs python (pid 4711, 900 MB)", stranger=True)


@pytest.mark.parametrize("module", [idle, nvml])
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


def looks_at(looks: Sequence[Check], rule: IdleRule = RULE, *, streaks: Streaks = EMPTY, start: float = 0.0) -> Streaks:
    """The streaks after these looks at GPU a, an interval apart."""
    for step, look in enumerate(looks):
        streaks = observe(streaks, {"a": look}, rule, start + step * rule.interval_s)
    return streaks


@given(
    st.lists(st.sampled_from([FREE, DRAINING, STRANGER]), max_size=30),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.02, 0.3, 1.0, 7.0]),
)
def test_a_gpu_is_free_exactly_after_max_checks_clean_checks_in_a_row(
    looks: list[Check], max_checks: int, interval: float
) -> None:
    rule = IdleRule(max_checks=max_checks, check_interval_s=interval)
    for count in range(1, len(looks) + 1):
        last = looks[max(0, count - max_checks) : count]
        free = len(last) == max_checks and all(each.free for each in last)
        streaks = looks_at(looks[:count], rule)
        assert is_free(streaks, "a", rule) is free
        assert (clean_checks(streaks, "a", rule) == max_checks) is free


@given(st.lists(st.tuples(st.floats(0.01, 8.0), st.booleans()), max_size=30))
def test_looks_at_any_times_find_it_free_after_the_quiet_time_and_not_before(looks: list[tuple[float, bool]]) -> None:
    """The oracle goes back from the last look to the first of the unbroken clean ones."""
    streaks, now, times = Streaks(), 0.0, []
    for wait, clean in looks:
        now += wait
        times.append((now, clean))
        streaks = observe(streaks, {"a": FREE if clean else DRAINING}, RULE, now)
        since = now if clean else None
        for (earlier, was_clean), (later, _) in zip(times[-2::-1], times[:0:-1], strict=True):
            if since is None or not was_clean or later - earlier > RULE.hole_s:
                break
            since = earlier
        free = since is not None and now - since >= RULE.quiet_s
        if since is None or abs(now - since - RULE.quiet_s) > 0.01:
            assert is_free(streaks, "a", RULE) is free


def test_many_quick_looks_make_no_gpu_free_sooner() -> None:
    streaks = Streaks()
    for step in range(200):
        streaks = observe(streaks, {"a": FREE}, RULE, step / 100)
        assert is_free(streaks, "a", RULE) is (step / 100 >= RULE.quiet_s - 0.001)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from([FREE, DRAINING, STRANGER])), max_size=12))
def test_gpus_do_not_influence_each_other(looks: list[dict[str, Check]]) -> None:
    together, alone = Streaks(), Streaks()
    for now, look in enumerate(looks):
        together = observe(together, look, RULE, now)
        alone = observe(alone, {uuid: found for uuid, found in look.items() if uuid == "a"}, RULE, now)
    assert is_free(together, "a", RULE) == is_free(alone, "a", RULE)


def test_after_our_own_job_one_clean_check_is_enough() -> None:
    streaks = observe(looks_at([FREE] * 3), {"b": FREE}, RULE, 3.0)
    streaks = released(streaks, "a", RULE, 3.0)
    assert not is_free(streaks, "a", RULE)
    assert is_free(observe(streaks, {"a": FREE}, RULE, 3.1), "a", RULE)
    assert not is_free(observe(streaks, {"b": FREE}, RULE, 3.1), "b", RULE)


def test_memory_that_is_still_draining_after_our_job_does_not_cost_the_quick_return() -> None:
    streaks = observe(released(Streaks(), "a", RULE, 0.0), {"a": DRAINING}, RULE, 0.1)
    assert not is_free(streaks, "a", RULE)
    assert is_free(observe(streaks, {"a": FREE}, RULE, 0.2), "a", RULE)


@pytest.mark.parametrize("between", [[STRANGER], [DRAINING] * 7])
def test_a_gpu_that_someone_took_after_our_job_needs_all_checks_again(between: list[Check]) -> None:
    streaks = looks_at(between, streaks=released(Streaks(), "a", RULE, 0.0))
    for now in range(10, 10 + RULE.max_checks - 1):
        streaks = observe(streaks, {"a": FREE}, RULE, now)
        assert not is_free(streaks, "a", RULE)
    assert is_free(observe(streaks, {"a": FREE}, RULE, 12), "a", RULE)


def test_the_quick_return_is_used_up_by_the_clean_check() -> None:
    streaks = observe(released(Streaks(), "a", RULE, 0.0), {"a": FREE}, RULE, 0.1)
    streaks = observe(observe(streaks, {"a": DRAINING}, RULE, 0.2), {"a": FREE}, RULE, 0.3)
    assert not is_free(streaks, "a", RULE)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    streaks = released(looks_at([FREE] * 3), "b", RULE, 2.0)
    assert forgotten(streaks, RULE, 4.0) == streaks
    assert forgotten(streaks, RULE, 100.0) == Streaks()
    later = observe(streaks, {"a": FREE, "b": FREE}, RULE, 100.0)
    assert (is_free(later, "a", RULE), is_free(later, "b", RULE)) == (False, False)
