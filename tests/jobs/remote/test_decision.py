"""Which jobs are handed over, in which batches: properties of one pure function."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.engines.base import Placement
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Predecessor, QueuedJob, ResourceRequest
from gpuherd.jobs.remote.submit import LARGEST_BATCH, BatchLimits, Candidate, SubmitDecision, decide, placement_of

ONE, TWO = Predecessor(1, "1"), Predecessor(2, "2")


def candidate(
    number: int, gpus: int = 1, priority: int = 0, after: tuple[Predecessor, ...] = (), rank: float = 0.0
) -> Candidate:
    job = Job(name=f"j{number}", argv=("true",), gpus=gpus, priority=priority)
    queued = QueuedJob(
        id=number, job=job, tries=0, attempts=0, not_before=0.0, avoid=frozenset(), ready_at=0.0, rank=rank
    )
    return Candidate(queued, after)


def asks(queued: QueuedJob) -> Placement:
    return Placement(gpus=queued.gpus)


def order(decision: SubmitDecision) -> list[int]:
    return [queued.id for group in decision.groups for queued in group.jobs]


candidates = st.lists(
    st.builds(
        candidate,
        st.integers(1, 10_000),
        st.integers(0, 3),
        st.integers(-1, 1),
        st.sampled_from([(), (ONE,), (ONE, TWO)]),
        st.floats(0, 9),
    ),
    max_size=30,
    unique_by=lambda each: each.queued.id,
)


@given(candidates, st.integers(0, 20), st.integers(0, 20), st.booleans(), st.sets(st.integers(0, 3)), st.booleans())
def test_every_job_has_one_answer_and_no_limit_is_passed(
    waiting: list[Candidate], at_most: int, out: int, longest: bool, too_large: set[int], closed: bool
) -> None:
    never = {Placement(gpus=gpus): "no" for gpus in too_large}
    limits = BatchLimits(at_most=at_most, open=out, longest_first=longest, closed="closed" if closed else None)
    found = decide(waiting, asks, never, limits)
    told = [wait.job for wait in (*found.waits, *found.refused)]
    assert sorted(order(found) + told) == sorted(each.queued.id for each in waiting)
    assert len(order(found)) <= max(0, at_most - out)
    assert not (closed and found.groups)
    by_id = {each.queued.id: each for each in waiting}
    assert all(by_id[wait.job].queued.gpus in too_large for wait in found.refused)
    for group in found.groups:
        for queued in group.jobs:
            assert group.placement == asks(queued) and group.after == by_id[queued.id].after
        # In their order within a batch, which is the order in which an array begins.
        keys = [(-q.job.priority, -q.rank if longest else 0.0, q.id) for q in group.jobs]
        assert keys == sorted(keys)
    if found.waits and found.groups:
        # Who waits goes after all that go.
        def key(number: int) -> tuple[int, bool, float, int]:
            each = by_id[number]
            return -each.queued.job.priority, bool(each.after), -each.queued.rank if longest else 0.0, number

        assert max(map(key, order(found))) < min(key(wait.job) for wait in found.waits)


def test_followers_go_after_those_that_could_run_at_once_and_never_above_their_priority() -> None:
    waiting = [candidate(1, after=(ONE,)), candidate(2), candidate(3, after=(ONE,), priority=1)]
    assert order(decide(waiting, asks, {}, BatchLimits(at_most=2, open=0))) == [3, 2]


def test_a_batch_is_no_larger_than_an_array_may_be() -> None:
    found = decide([candidate(i) for i in range(LARGEST_BATCH + 1)], asks, {}, BatchLimits(at_most=5000, open=0))
    assert [len(group.jobs) for group in found.groups] == [LARGEST_BATCH, 1]


def test_the_jobs_own_words_come_first() -> None:
    options = DispatchOptions(engine="slurm", cpus_per_job=4, host_mem=1000, notice=30.0)
    job = Job(name="a", argv=("true",), gpus=2, cpus=8, host_memory_mb=1, nodes=2)
    assert placement_of(job, 4, options, 10.0) == Placement(gpus=4, nodes=2, cpus=8, memory_mb=1)
    plain = Job(name="a", argv=("true",), timeout_s=100.0)
    asked = placement_of(plain, 1, options, 10.0)
    assert asked == Placement(gpus=1, cpus=4, memory_mb=1000, time_s=240.0)
    asked = placement_of(plain, 1, replace(options, time_limit=50.0), 10.0)
    assert asked.time_s == 50.0


@given(st.floats(1.0, 1e7), st.floats(0.0, 1e4))
def test_the_time_that_is_asked_for_has_steps(whole_s: float, more_s: float) -> None:
    """It never falls short, by no more than a step is it too much, and no limit of whole quarters is stepped over."""
    first, second = (
        placement_of(
            Job(name="a", argv=("true",), timeout_s=s), 1, DispatchOptions(engine="slurm", notice=30.0), 10.0
        ).time_s
        for s in (whole_s, whole_s + more_s)
    )
    assert first is not None and second is not None
    needed = whole_s + 10.0 + 30.0 + 60.0
    step_s = 60 if needed <= 3600 else 900
    assert needed <= first < needed + step_s and first % step_s == 0
    assert first <= second


def test_jobs_whose_limits_differ_a_little_go_together() -> None:
    def asked(queued: QueuedJob) -> Placement:
        job = replace(queued.job, timeout_s=4 * 3600.0 + queued.id)
        return placement_of(job, queued.gpus, DispatchOptions(), 10.0)

    found = decide([candidate(number) for number in range(100)], asked, {}, BatchLimits(at_most=100, open=0))
    assert [len(group.jobs) for group in found.groups] == [100]


def test_a_retry_on_more_gpus_asks_for_them() -> None:
    each = candidate(1)
    more = replace(each.queued, adapted=ResourceRequest(gpus=2))
    assert decide([Candidate(more)], asks, {}, BatchLimits(at_most=1, open=0)).groups[0].placement.gpus == 2
