"""What may be promised on a shared GPU."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.gpus.state import Gpu
from gpuherd.jobs.scheduler import memory
from gpuherd.jobs.scheduler.memory import Tenant, baseline_mb, overuses, shareable_mb


def gpu(used_mb: int, total_mb: int = 40_000, problem: str | None = None) -> Gpu:
    return Gpu(0, "GPU-a", "G", total_mb, used_mb, total_mb - used_mb, problem=problem)


tenants_strategy = st.lists(
    st.builds(
        Tenant,
        job=st.just("j"),
        declared_mb=st.integers(1, 20_000),
        learned_mb=st.none() | st.integers(1, 20_000),
        now_mb=st.none() | st.integers(0, 10_000),
    ),
    max_size=5,
)


@given(st.integers(0, 40_000), tenants_strategy, st.none() | st.integers(0, 1_000))
def test_what_is_promised_is_there_when_everybody_takes_it(used: int, tenants: list[Tenant], idle: int | None) -> None:
    """All tenants at the most that is expected of them, the newcomer and the strangers fit together."""
    more = shareable_mb(gpu(used), tenants, idle)
    assert 0 <= more <= 40_000 - used
    if more:
        promised = sum(max(t.declared_mb, t.learned_mb or 0, t.now_mb or 0) for t in tenants)
        assert promised + more + baseline_mb(gpu(used), tenants, idle) <= 40_000


def test_what_a_job_has_not_yet_taken_is_kept_for_it() -> None:
    """The ramp: nothing is in use yet, and all the same only what is left of 40 GB after 3 x 10 GB is given."""
    tenants = [Tenant(f"j{n}", 10_000, now_mb=0) for n in range(3)]
    assert shareable_mb(gpu(0), tenants) == 10_000
    assert shareable_mb(gpu(500), tenants) == 9_500


def test_learned_and_seen_memory_count_when_they_are_more() -> None:
    assert shareable_mb(gpu(0), [Tenant("j", 10_000, learned_mb=15_000, now_mb=0)]) == 25_000
    assert shareable_mb(gpu(22_000), [Tenant("j", 10_000, learned_mb=15_000, now_mb=22_000)]) == 18_000
    assert shareable_mb(gpu(0), [Tenant("j", 10_000, learned_mb=2_000, now_mb=0)]) == 30_000


def test_strangers_and_the_driver_are_not_given_away() -> None:
    assert shareable_mb(gpu(9_300), [Tenant("j", 10_000, now_mb=9_000)]) == 29_700


def test_where_the_driver_hides_who_uses_what_the_idle_use_stands_for_the_rest() -> None:
    hidden = [Tenant("j", 10_000)]
    assert shareable_mb(gpu(8_300), hidden, idle_mb=300) == 29_700
    # Not known either: what is in use may be anybody's.
    assert shareable_mb(gpu(8_300), hidden) == 21_700


def test_a_broken_gpu_takes_nobody() -> None:
    assert shareable_mb(gpu(0, problem="fallen off the bus"), []) == 0


def test_who_uses_more_than_declared_is_told() -> None:
    tenants = [Tenant("a", 1_000, now_mb=1_600), Tenant("b", 1_000, now_mb=900), Tenant("c", 1_000)]
    (over,) = overuses(tenants)
    assert (over.job, over.declared_mb, over.used_mb) == ("a", 1_000, 1_600)
    assert "mem=1600MB" in over.sentence
    assert overuses(tenants, allowance_mb=600) == ()


def test_documented_examples() -> None:
    ran = doctest.testmod(memory)
    assert ran.attempted and not ran.failed
