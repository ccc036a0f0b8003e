"""What must hold for every decision, whatever the machine and the queue look like."""

from __future__ import annotations

import doctest
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.gpus.choose import choose
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.monitor import status as status_module
from gpuherd.jobs.scheduler import ordering as order_module
from gpuherd.jobs.scheduler import pool as pool_module
from gpuherd.jobs.scheduler.ordering import DOUBLES_EVERY_S, rank
from gpuherd.jobs.scheduler.policy import decide, decide_with
from gpuherd.jobs.scheduler.pool import Pool
from gpuherd.jobs.scheduler.types import Decision, GpuView, Limits, WaitingJob, why_never

LARGE = Limits(max_gpus=99, cpu_slots=99)


def gpu(index: int, total_mb: int = 40_000, used_mb: int = 0) -> Gpu:
    return Gpu(
        index=index, uuid=f"GPU-{index}", name="G", total_mb=total_mb, used_mb=used_mb, free_mb=total_mb - used_mb
    )


def pick(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, count, memory_mb=memory_mb)


def views(free: int, ours: int = 0, busy: int = 0) -> list[GpuView]:
    made = [GpuView(gpu(i)) for i in range(free)]
    made += [GpuView(gpu(free + i), busy="we", ours=True) for i in range(ours)]
    return made + [GpuView(gpu(free + ours + i), busy="alice runs python") for i in range(busy)]


def started(decision: Decision) -> list[int]:
    return [start.job for start in decision.starts]


jobs_strategy = st.lists(
    st.builds(
        WaitingJob,
        id=st.integers(1, 10_000),
        gpus=st.integers(0, 5),
        memory_mb=st.sampled_from([None, 10_000, 30_000, 90_000]),
        priority=st.integers(-2, 2),
        avoid=st.frozensets(st.sampled_from([f"GPU-{i}" for i in range(8)]), max_size=3),
    ),
    max_size=12,
    unique_by=lambda job: job.id,
)
views_strategy = st.lists(
    st.tuples(st.sampled_from(["free", "ours", "busy"]), st.sampled_from([24_000, 80_000])), max_size=8
).map(
    lambda kinds: [
        GpuView(gpu(i, total), None if kind == "free" else kind, kind == "ours")
        for i, (kind, total) in enumerate(kinds)
    ]
)
limits_strategy = st.builds(Limits, max_gpus=st.integers(1, 8), cpu_slots=st.integers(1, 3), cpu_only=st.just(False))


@given(jobs_strategy, views_strategy, limits_strategy, st.integers(0, 3))
def test_every_decision_keeps_the_rules(
    jobs: list[WaitingJob], gpus: list[GpuView], limits: Limits, cpu_running: int
) -> None:
    decision = decide(jobs, gpus, limits, pick, cpu_running=cpu_running)
    by_id = {job.id: job for job in jobs}
    free = {view.gpu.uuid: view.gpu for view in gpus if view.busy is None}
    taken = [chosen.uuid for start in decision.starts for chosen in start.gpus]
    # No GPU twice, none that is busy or ours, each job as many as it asks for, none too small.
    assert len(taken) == len(set(taken))
    assert set(taken) <= free.keys()
    for start in decision.starts:
        job = by_id[start.job]
        assert len(start.gpus) == job.gpus
        assert all(job.memory_mb is None or chosen.free_mb >= job.memory_mb for chosen in start.gpus)
    # Never more than max_gpus and cpu_slots.
    assert len(taken) + sum(view.ours for view in gpus) <= limits.max_gpus or not taken
    on_cpu = sum(not start.gpus for start in decision.starts)
    assert on_cpu + cpu_running <= limits.cpu_slots or on_cpu == 0
    # Every job is answered once, every answer that is no start has a reason.
    answered = [*started(decision), *(w.job for w in decision.waits), *(w.job for w in decision.refused)]
    assert sorted(answered) == sorted(by_id)
    assert all(wait.reason for wait in (*decision.waits, *decision.refused))
    # Refused is exactly what could never run.
    never = {job.id for job in jobs if why_never(job, [view.gpu for view in gpus], limits) is not None}
    assert {wait.job for wait in decision.refused} == never


@given(jobs_strategy, views_strategy, limits_strategy)
def test_of_equal_jobs_the_first_in_order_start(jobs: list[WaitingJob], gpus: list[GpuView], limits: Limits) -> None:
    """Jobs that differ only in priority and age: those that start come before all that wait."""
    alike = [WaitingJob(job.id, 1, priority=job.priority) for job in jobs]
    decision = decide(alike, gpus, limits, pick)
    order = [job.id for job in sorted(alike, key=lambda job: (-job.priority, job.id))]
    assert started(decision) == order[: len(decision.starts)] or decision.refused


@given(jobs_strategy, views_strategy, limits_strategy)
def test_no_gpu_idles_that_the_next_one_gpu_job_could_use(
    jobs: list[WaitingJob], gpus: list[GpuView], limits: Limits
) -> None:
    singles = [replace(job, gpus=1, memory_mb=None, avoid=frozenset()) for job in jobs]
    decision = decide(singles, gpus, limits, pick)
    free = sum(view.busy is None for view in gpus)
    room = limits.max_gpus - sum(view.ours for view in gpus)
    assert len(decision.starts) == max(0, min(len(singles), free, room))


def test_a_large_job_is_not_starved_by_small_ones() -> None:
    """Small jobs keep coming; as each of our jobs ends its GPU is kept until the large job has its two."""
    large, running = WaitingJob(1, 2), {"GPU-0", "GPU-1"}
    for step in range(2):
        freed = {f"GPU-{i}" for i in range(step)}
        seen = [GpuView(gpu(i), None if f"GPU-{i}" in freed else "we", f"GPU-{i}" not in freed) for i in range(2)]
        small = [WaitingJob(10 + step, 1)]
        assert started(decide([large, *small], seen, LARGE, pick)) == [], (step, running)
    assert started(decide([large, WaitingJob(20, 1)], views(free=2), LARGE, pick)) == [1]


def test_a_large_job_that_waits_for_others_holds_nothing_back() -> None:
    decision = decide([WaitingJob(1, 2), WaitingJob(2, 1)], views(free=1, busy=1), LARGE, pick)
    assert started(decision) == [2]
    assert "alice runs python" in decision.waits[0].reason


def test_a_large_jobs_part_of_max_gpus_is_kept() -> None:
    limits = Limits(max_gpus=2, cpu_slots=1)
    decision = decide([WaitingJob(1, 2), WaitingJob(2, 1)], views(free=3, ours=1), limits, pick)
    assert started(decision) == []


def test_small_jobs_use_what_a_large_one_cannot() -> None:
    seen = [GpuView(gpu(0, 24_000)), GpuView(gpu(1, 80_000), "we", True), GpuView(gpu(2, 80_000))]
    decision = decide([WaitingJob(1, 2, memory_mb=50_000), WaitingJob(2, 1)], seen, LARGE, pick)
    assert [(start.job, start.gpus[0].index) for start in decision.starts] == [(2, 0)]


def test_a_failed_job_goes_elsewhere_if_there_is_an_elsewhere() -> None:
    job = WaitingJob(1, 1, avoid=frozenset({"GPU-0"}))
    assert decide([job], views(free=2), LARGE, pick).starts[0].gpus[0].uuid == "GPU-1"
    assert decide([job], views(free=1), LARGE, pick).starts[0].gpus[0].uuid == "GPU-0"
    assert decide([job], views(free=1, busy=1), LARGE, pick).starts[0].gpus[0].uuid == "GPU-0"
    assert decide([job], views(free=1, ours=1), LARGE, pick).starts == ()


def test_jobs_without_gpus_and_machines_without_gpus() -> None:
    limits = Limits(max_gpus=4, cpu_slots=2, cpu_only=True)
    decision = decide([WaitingJob(i, i % 2) for i in range(4)], [], limits, pick, cpu_running=1)
    assert started(decision) == [0]
    assert why_never(WaitingJob(1, 2), [], limits) == "asks for 2 GPUs; this machine has none"


def test_reasons_that_can_never_change() -> None:
    gpus = [gpu(0, 24_000), gpu(1, 80_000)]
    assert why_never(WaitingJob(1, 3), gpus, LARGE) == "asks for 3 GPUs; there are 2 to use"
    assert why_never(WaitingJob(1, 2), gpus, Limits(1, 1)) == "asks for 2 GPUs; max_gpus is 1"
    assert why_never(WaitingJob(1, 2, memory_mb=50_000), gpus, LARGE) == (
        "asks for 50000 MB on each of 2 GPUs; 1 of 2 have as much"
    )
    assert why_never(WaitingJob(1, 1, memory_mb=90_000), gpus, LARGE) == (
        "asks for 90000 MB on a GPU; the largest has 80000 MB"
    )
    mig = [replace(gpu(i), uuid=f"MIG-{i}", mig_parent="GPU-9", mig_position=i) for i in range(2)]
    assert "one MIG instance at most" in str(why_never(WaitingJob(1, 2), mig, LARGE))
    assert why_never(WaitingJob(1, 1), mig, LARGE) is None


def test_a_gpu_on_which_our_job_runs_is_never_free_whatever_the_last_look_said() -> None:
    seen_free = [GpuView(gpu(0), busy=None, ours=True), GpuView(gpu(1))]
    decision = decide([WaitingJob(1, 1), WaitingJob(2, 1)], seen_free, Limits(4, 1), pick)
    assert [[chosen.index for chosen in start.gpus] for start in decision.starts] == [[1]]


def test_a_gpu_whose_memory_still_drains_counts_as_one_that_comes() -> None:
    """Our job on GPU 1 has just ended: GPU 0 stays kept for the large job, though GPU 1 is nobody's for a moment."""
    draining = [GpuView(gpu(0)), GpuView(gpu(1), "our own job has just left it", returning=True)]
    assert started(decide([WaitingJob(1, 2), WaitingJob(2, 1)], draining, LARGE, pick)) == []
    a_stranger_came = [GpuView(gpu(0)), GpuView(gpu(1), "alice runs python")]
    assert started(decide([WaitingJob(1, 2), WaitingJob(2, 1)], a_stranger_came, LARGE, pick)) == [2]


# --- time limits -----------------------------------------------------------------------------------------------


def timed(ours: list[float | None], free: int = 0) -> list[GpuView]:
    """GPUs with our jobs, each over at this time or nobody knows when, and free ones."""
    running = [GpuView(gpu(n), "our job", ours=True, over_at=at) for n, at in enumerate(ours)]
    return running + [GpuView(gpu(len(ours) + n)) for n in range(free)]


def test_a_kept_gpu_is_lent_to_a_job_that_is_surely_over_in_time() -> None:
    limits = replace(LARGE, now=100.0)
    jobs = [WaitingJob(1, 2), WaitingJob(2, 1), WaitingJob(3, 1, limit_s=51.0), WaitingJob(4, 1, limit_s=50.0)]
    decision = decide(jobs, timed([150.0], free=1), limits, pick)
    assert started(decision) == [4]
    assert decide([jobs[0]], timed([150.0], free=1), limits, pick).backfill_s == 50.0


@pytest.mark.parametrize(
    "ours", [[None], [90.0], [None, 150.0, 150.0]], ids=["nobody knows when", "any moment", "one of three unknown"]
)
def test_nothing_is_lent_when_nobody_knows_for_how_long(ours: list[float | None]) -> None:
    jobs = [WaitingJob(1, len(ours) + 1), WaitingJob(2, 1, limit_s=1.0)]
    decision = decide(jobs, timed(ours, free=1), replace(LARGE, now=100.0), pick)
    assert started(decision) == []
    assert decision.backfill_s is None


def test_the_soonest_gpus_that_are_enough_say_for_how_long_one_is_lent() -> None:
    jobs = [WaitingJob(1, 3), WaitingJob(2, 1, limit_s=40.0), WaitingJob(3, 1, limit_s=20.0)]
    assert started(decide(jobs, timed([200.0, 130.0, 120.0], free=1), replace(LARGE, now=100.0), pick)) == [3]


def test_a_job_that_shares_borrows_nothing() -> None:
    jobs = [WaitingJob(1, 2), replace(sharer(2, 1_000), limit_s=1.0)]
    assert started(decide(jobs, timed([150.0], free=1), replace(LARGE, now=100.0), pick)) == []


def test_what_is_lent_is_within_the_limit() -> None:
    limits = replace(LARGE, now=100.0, max_gpus=4)
    jobs = [WaitingJob(1, 4), *(WaitingJob(n, 1, limit_s=10.0) for n in range(2, 6))]
    assert started(decide(jobs, timed([150.0, 150.0], free=3), limits, pick)) == [2, 3]


def test_of_several_large_jobs_gpus_are_kept_for_the_first() -> None:
    jobs = [WaitingJob(1, 2), WaitingJob(2, 2), WaitingJob(3, 1)]
    two_machines = cluster([1, 1], size=2)
    assert started(decide(jobs, two_machines, LARGE, pick)) == [3]
    assert started(decide(jobs, two_machines, replace(LARGE, reservations=2), pick)) == []


def test_the_part_of_the_limit_that_is_in_use_on_the_kept_machine_is_not_kept_twice() -> None:
    seen = [GpuView(gpu(n), "our job", ours=True, node="m0") for n in range(3)] + [GpuView(gpu(3), node="m0")]
    seen += [GpuView(gpu(4 + n), node="m1") for n in range(2)]
    # When the three on the first machine are over, five may be in use: four for job 1, and one more until then.
    jobs = [WaitingJob(1, 4), WaitingJob(2, 1), WaitingJob(3, 1)]
    assert started(decide(jobs, seen, replace(LARGE, max_gpus=5), pick)) == [2]
    assert started(decide(jobs, seen, replace(LARGE, max_gpus=4), pick)) == []


# --- limits ---------------------------------------------------------------------------------------------------


def test_no_more_jobs_than_may_run_at_once_on_gpus_or_not() -> None:
    limits = Limits(max_gpus=9, cpu_slots=9, max_concurrent=3, running=1)
    decision = decide([WaitingJob(n, n % 2) for n in range(4)], views(free=4), limits, pick)
    assert started(decision) == [0, 1]
    assert {wait.reason for wait in decision.waits} == {"3 jobs run, which is the most at once"}


def test_nothing_starts_while_it_is_closed_but_what_can_never_run_is_still_refused() -> None:
    limits = Limits(max_gpus=9, cpu_slots=9, closed="less than 200 MB of disk are free")
    decision = decide([WaitingJob(1, 1), WaitingJob(2, 0), WaitingJob(3, 8)], views(free=4), limits, pick)
    assert started(decision) == []
    assert [wait.reason for wait in decision.waits] == ["less than 200 MB of disk are free"] * 2
    assert [wait.job for wait in decision.refused] == [3]


def test_in_quiet_hours_a_large_job_waits_for_their_end_and_holds_nothing_back() -> None:
    limits = Limits(max_gpus=4, cpu_slots=1, gpus_now=2, gpus_now_why="quiet hours until 18:00")
    decision = decide([WaitingJob(1, 3), WaitingJob(2, 1), WaitingJob(3, 1), WaitingJob(4, 1)], views(4), limits, pick)
    assert started(decision) == [2, 3]
    assert [wait.reason for wait in decision.waits] == ["quiet hours until 18:00", "2 of at most 2 GPUs are in use"]
    assert decision.refused == ()


# --- order ----------------------------------------------------------------------------------------------------


def test_the_longest_first_where_costs_are_known_and_priority_before_all() -> None:
    limits = Limits(max_gpus=9, cpu_slots=1, longest_first=True)
    jobs = [
        WaitingJob(1, 1),
        WaitingJob(2, 1, rank=rank(3.0, 0.0)),
        WaitingJob(3, 1, rank=rank(7.0, 0.0)),
        WaitingJob(4, 1, rank=rank(3.0, 0.0)),
        WaitingJob(5, 1, rank=rank(0.0, 0.0), priority=1),
    ]
    assert started(decide(jobs, views(free=8), limits, pick)) == [5, 3, 2, 4, 1]
    assert started(decide(jobs, views(free=8), LARGE, pick)) == [5, 1, 2, 3, 4]


@given(long=st.floats(1.0, 1e12), times=st.floats(1.0, 1e6), since=st.floats(0.0, 2e9), unit=st.floats(1e-3, 1e9))
def test_no_short_job_starves_behind_longer_ones_whatever_the_unit(
    long: float, times: float, since: float, unit: float
) -> None:
    short = WaitingJob(1, 1, rank=rank(long * unit / times, since))
    passes_after = math.log2(times) * DOUBLES_EVERY_S
    limits = Limits(max_gpus=1, cpu_slots=1, longest_first=True)
    for wait, first in ((passes_after - 60.0, 2), (passes_after + 60.0, 1)):
        if wait > 0:
            newcomer = WaitingJob(2, 1, rank=rank(long * unit, since + wait))
            assert started(decide([short, newcomer], views(free=1), limits, pick)) == [first]


def test_a_job_of_unknown_cost_goes_last_and_ages_too() -> None:
    limits = Limits(max_gpus=1, cpu_slots=1, longest_first=True)
    unknown = WaitingJob(1, 1, rank=rank(None, 0.0))
    assert started(decide([unknown, WaitingJob(2, 1, rank=rank(1e-6, 0.0))], views(free=1), limits, pick)) == [2]
    late = WaitingJob(3, 1, rank=rank(1024.0, 41 * DOUBLES_EVERY_S))
    assert started(decide([unknown, late], views(free=1), limits, pick)) == [1]


def shared_view(number: int, room_mb: int) -> GpuView:
    return GpuView(gpu(number), "we", ours=True, shareable_mb=room_mb)


def test_a_sharing_job_is_told_how_much_room_there_is_and_how_much_it_asks_for() -> None:
    job = WaitingJob(1, 1, 8_000, share=True)
    pool = [shared_view(0, 1_500), shared_view(1, 2_500), *(GpuView(gpu(number)) for number in (2, 3))]
    full = decide([job], pool, Limits(max_gpus=2, cpu_slots=1), pick)
    assert full.waits[0].reason == (
        "asks for 8000 MB; at most 2500 MB are left on a shared GPU, and no other may be used (2 at most)"
    )
    many = [shared_view(number, 100 + number) for number in range(80)]
    told = decide([job], many, Limits(max_gpus=99, cpu_slots=1), pick).waits[0].reason
    assert told == "asks for 8000 MB; at most 179 MB are left on a shared GPU, and no other is free"
    before = WaitingJob(0, 1, 9_000, share=True)
    kept = decide([before, job], [shared_view(0, 1_500)], Limits(max_gpus=1, cpu_slots=1), pick).waits[1].reason
    assert kept.startswith("asks for 8000 MB; nothing more is promised on the shared GPUs, which are kept")


# --- several machines -----------------------------------------------------------------------------------------


def cluster(free: Sequence[int], size: int = 4) -> list[GpuView]:
    """Machines of so many GPUs, with so many of them free; our own jobs are on the others."""
    return [
        replace(GpuView(gpu(100 * number + index), None if index < count else "we", index >= count), node=f"m{number}")
        for number, count in enumerate(free)
        for index in range(size)
    ]


def test_a_job_has_its_gpus_on_one_machine() -> None:
    assert started(decide([WaitingJob(1, 3)], cluster([2, 2]), LARGE, pick)) == []
    (start,) = decide([WaitingJob(1, 3)], cluster([2, 3]), LARGE, pick).starts
    assert [chosen.index for chosen in start.gpus] == [100, 101, 102]
    reason = decide([WaitingJob(1, 5)], cluster([4, 4]), LARGE, pick).refused[0].reason
    assert reason == "asks for 5 GPUs; there are 4 to use"


def test_small_jobs_fill_the_machine_with_the_fewest_free() -> None:
    """So that whole machines stay for jobs that need them."""
    starts = decide([WaitingJob(n, 1) for n in range(3)], cluster([4, 2]), LARGE, pick).starts
    assert [start.gpus[0].index for start in starts] == [100, 101, 0]


def test_for_a_large_job_one_machine_is_kept_and_not_the_cluster() -> None:
    jobs = [WaitingJob(1, 4), WaitingJob(2, 1), WaitingJob(3, 1), WaitingJob(4, 1)]
    decision = decide(jobs, cluster([1, 2, 1]), LARGE, pick)
    assert [start.gpus[0].index for start in decision.starts] == [0, 200]


# --- sharing --------------------------------------------------------------------------------------------------


def shared(index: int, left_mb: int | None, total_mb: int = 80_000) -> GpuView:
    """A GPU on which sharing jobs of ours run."""
    return GpuView(gpu(index, total_mb), "we", ours=True, shareable_mb=left_mb)


def sharer(id_: int, memory_mb: int, priority: int = 0) -> WaitingJob:
    return WaitingJob(id_, 1, memory_mb, priority, share=True)


def test_sharing_jobs_fill_the_fullest_gpu_that_has_room() -> None:
    seen = [shared(0, 50_000), shared(1, 12_000), GpuView(gpu(2, 80_000))]
    decision = decide([sharer(1, 10_000), sharer(2, 10_000), sharer(3, 45_000)], seen, LARGE, pick)
    assert [(start.job, start.gpus[0].index, start.shared) for start in decision.starts] == [
        (1, 1, True),
        (2, 0, True),
        (3, 2, True),
    ]


def test_what_starts_on_a_free_gpu_in_one_decision_leaves_the_rest_of_it_to_the_next() -> None:
    decision = decide([sharer(n, 15_000) for n in range(6)], [GpuView(gpu(0, 80_000))], LARGE, pick)
    assert started(decision) == [0, 1, 2, 3, 4]
    assert "5000 of 15000 MB can be promised" in decision.waits[0].reason


def test_a_shared_gpu_costs_no_further_part_of_the_limit() -> None:
    limits = Limits(max_gpus=1, cpu_slots=1)
    decision = decide([sharer(1, 10_000), WaitingJob(2, 1)], [shared(0, 50_000), GpuView(gpu(1))], limits, pick)
    assert started(decision) == [1]


def test_jobs_that_do_not_share_get_no_shared_gpu() -> None:
    assert started(decide([WaitingJob(1, 1, 10_000)], [shared(0, 50_000)], LARGE, pick)) == []
    closed_one = [shared(0, None)]
    assert started(decide([sharer(1, 10)], closed_one, LARGE, pick)) == []


def test_room_is_kept_for_the_first_sharing_job_that_fits_nowhere() -> None:
    """The emptiest GPU is kept for the large one; small ones go on with the other."""
    seen = [shared(0, 30_000), shared(1, 20_000)]
    decision = decide([sharer(1, 40_000), sharer(2, 10_000), sharer(3, 10_000), sharer(4, 10_000)], seen, LARGE, pick)
    assert [(start.job, start.gpus[0].index) for start in decision.starts] == [(2, 1), (3, 1)]


def test_for_a_job_that_wants_gpus_for_itself_shared_ones_are_closed() -> None:
    seen = [shared(0, 30_000), shared(1, 20_000), shared(2, 10_000)]
    decision = decide([WaitingJob(1, 2), sharer(2, 5_000), sharer(3, 10_000)], seen, LARGE, pick)
    assert [(start.job, start.gpus[0].index) for start in decision.starts] == [(2, 2)]


def test_each_job_that_wants_a_gpu_for_itself_has_one_closed() -> None:
    seen = [shared(0, 30_000), shared(1, 20_000)]
    assert started(decide([WaitingJob(1, 1), WaitingJob(2, 1), sharer(3, 5_000)], seen, LARGE, pick)) == []
    assert started(decide([WaitingJob(1, 1), sharer(3, 5_000)], seen, LARGE, pick)) == [3]
    # One whose exclusive job will end needs no closing.
    ours = GpuView(gpu(2, 80_000), "we", ours=True)
    assert started(decide([WaitingJob(1, 1), sharer(3, 5_000)], [*seen, ours], LARGE, pick)) == [3]


def test_shared_gpus_are_closed_when_the_limit_stands_in_the_way() -> None:
    """GPU 2 is free and one more is allowed only when a shared one has emptied."""
    limits = Limits(max_gpus=2, cpu_slots=1)
    seen = [shared(0, 30_000), shared(1, 20_000), GpuView(gpu(2, 80_000)), GpuView(gpu(3, 80_000))]
    decision = decide([WaitingJob(1, 1), sharer(2, 5_000)], seen, limits, pick)
    assert [(start.job, start.gpus[0].index) for start in decision.starts] == [(2, 1)]


def test_a_limit_that_was_lowered_empties_shared_gpus_too() -> None:
    """Two are in use and one is allowed: the emptier of them is closed, and no new one is opened."""
    seen = [shared(0, 50_000), shared(1, 20_000), GpuView(gpu(2, 80_000))]
    one = Limits(max_gpus=4, cpu_slots=1, gpus_now=1)
    decision = decide([sharer(1, 10_000), sharer(2, 10_000), sharer(3, 10_000)], seen, one, pick)
    assert [(start.job, start.gpus[0].index) for start in decision.starts] == [(1, 1), (2, 1)]
    assert started(decide([sharer(1, 10_000)], seen, replace(one, gpus_now=0), pick)) == []


def test_of_shared_gpus_on_several_machines_the_emptiest_is_closed_whatever_else_is_free_there() -> None:
    """Else small GPUs that come and go would move the keeping from machine to machine, and the job would starve."""
    first = [replace(shared(0, 30_000), node="a"), replace(GpuView(gpu(1, 24_000)), node="a")]
    second = [replace(shared(10, 50_000), node="b"), replace(GpuView(gpu(11, 24_000), "we", ours=True), node="b")]
    decision = decide([WaitingJob(1, 1, 60_000), sharer(2, 10_000)], [*first, *second], LARGE, pick)
    assert [(start.job, start.gpus[0].index) for start in decision.starts] == [(2, 0)]


def test_a_gpu_whose_rest_a_stranger_holds_is_not_kept_for_a_job_that_needs_all_of_it() -> None:
    seen = [GpuView(gpu(0, used_mb=300)), GpuView(gpu(1), "we", ours=True)]
    decision = decide([WaitingJob(1, 2, 39_900), WaitingJob(2, 1)], seen, LARGE, pick)
    assert started(decision) == [2]
    assert "39700 of 39900 MB are free" in decision.waits[0].reason
    # Where that is enough it is kept, with the one that our job will leave.
    assert started(decide([WaitingJob(1, 2, 39_700), WaitingJob(2, 1)], seen, LARGE, pick)) == []


# --- a pool that lasts ----------------------------------------------------------------------------------------


def test_documented_example_of_a_pool() -> None:
    assert sum(doctest.testmod(module).failed for module in (pool_module, order_module, status_module)) == 0


def test_a_gpu_that_is_taken_out_of_the_pool_is_given_to_nobody() -> None:
    pool = Pool([GpuView(gpu(0)), GpuView(gpu(1)), shared(2, 40_000)])
    for uuid in ("GPU-0", "GPU-2", "GPU-9"):
        pool.remove(uuid)
    assert (pool.free, pool.in_use, pool.open_count) == (1, 0, 0)
    jobs = [WaitingJob(1, 2), WaitingJob(2, 1), sharer(3, 9_000)]
    decision = decide_with(pool, jobs, LARGE, pick)
    assert decision == decide(jobs, [GpuView(gpu(1))], LARGE, pick)
    assert started(decision) == [2]
    assert [wait.job for wait in decision.refused] == [1]
    pool.update(GpuView(gpu(0)))
    assert started(decide_with(pool, jobs, LARGE, pick)) == [1]


def test_a_decision_leaves_the_pool_as_it_was_also_when_the_chooser_fails() -> None:
    pool = Pool([GpuView(gpu(0)), GpuView(gpu(1))])

    def broken(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
        if len(candidates) < 2:
            raise RuntimeError("the driver is gone")
        return pick(candidates, count, memory_mb)

    with pytest.raises(RuntimeError):
        decide_with(pool, [WaitingJob(1, 1), WaitingJob(2, 1)], LARGE, broken)
    assert (pool.free, pool.in_use) == (2, 0)
    assert started(decide_with(pool, [WaitingJob(1, 2)], LARGE, pick)) == [1]


def test_unexplained_waits_are_short_and_all_else_is_the_same() -> None:
    jobs = [WaitingJob(1, 2), WaitingJob(2, 1), WaitingJob(3, 9)]
    told, short = (decide_with(Pool(views(1, 1)), jobs, LARGE, pick, explain=explain) for explain in (True, False))
    assert (told.starts, told.refused) == (short.starts, short.refused)
    assert [wait.reason for wait in short.waits] == ["waits for GPUs"] * 2
    assert "our own jobs run on GPU 1" in told.waits[0].reason


def test_in_a_large_cluster_the_reason_counts_and_does_not_name() -> None:
    (wait,) = decide([WaitingJob(1, 4)], cluster([3] * 30), LARGE, pick).waits
    assert wait.reason == "90 of 120 GPUs are free, our own jobs run on 30"


def test_nothing_is_kept_for_a_job_that_needs_more_than_an_empty_gpu_gives() -> None:
    """The driver's own part is missing on each; while our jobs run there the driver can't show it."""
    greedy = WaitingJob(1, 2, 40_000, priority=1)
    ours = [GpuView(gpu(i), busy="we", ours=True, room_mb=39_500) for i in range(2)]
    free = [GpuView(gpu(2, used_mb=500), room_mb=39_500), GpuView(gpu(3, used_mb=500), room_mb=39_500)]
    decision = decide([greedy, WaitingJob(2, 1), WaitingJob(3, 1)], [*ours, *free], LARGE, pick)
    assert started(decision) == [2, 3]
    assert "39500 of 40000 MB are free at best" in decision.waits[0].reason
    modest = replace(greedy, memory_mb=39_500)
    assert started(decide([modest, WaitingJob(2, 1)], [*ours, free[0]], LARGE, pick)) == []


def test_no_shared_gpu_is_closed_for_a_job_that_an_empty_one_could_not_hold() -> None:
    view = replace(shared(0, 20_000), room_mb=79_500)
    assert started(decide([sharer(1, 80_000), sharer(2, 10_000)], [view], LARGE, pick)) == [2]
    assert started(decide([sharer(1, 79_500), sharer(2, 10_000)], [view], LARGE, pick)) == []


def test_a_pool_that_lasts_learns_how_much_an_empty_gpu_gives() -> None:
    pool = Pool([GpuView(gpu(0), busy="we", ours=True), GpuView(gpu(1), busy="we", ours=True)])
    job = WaitingJob(1, 2, 40_000)
    assert pool.has_enough(job)
    pool.update(GpuView(gpu(0), busy="we", ours=True, room_mb=39_500))
    assert not pool.has_enough(job)


def test_who_asks_for_more_than_they_may_ever_hold_is_refused_and_in_quiet_hours_waits() -> None:
    job = WaitingJob(1, 3)
    ever = decide([job], views(4), replace(LARGE, most_ever=2), pick)
    assert [wait.reason for wait in ever.refused] == [
        "asks for 3 GPUs; you may hold 2, by your settings or this machine's policy"
    ]
    quiet = decide([job], views(4), replace(LARGE, most_ever=3, gpus_now=0, gpus_now_why="hush"), pick)
    assert (quiet.refused, [wait.reason for wait in quiet.waits]) == ((), ["hush"])


def test_a_job_that_asks_for_more_main_memory_than_there_is_can_never_run() -> None:
    limits = Limits(max_gpus=9, cpu_slots=1, host_memory_mb=1000)
    decision = decide([WaitingJob(1, 0, host_memory_mb=1001), WaitingJob(2, 0, host_memory_mb=1000)], [], limits, pick)
    assert [(wait.job, wait.reason) for wait in decision.refused] == [
        (1, "asks for 1001 MB of main memory; there are 1000 MB to use")
    ]
    assert [start.job for start in decision.starts] == [2]
    unknown = decide([WaitingJob(1, 0, host_memory_mb=10**9)], [], LARGE, pick)
    assert [start.job for start in unknown.starts] == [1]
