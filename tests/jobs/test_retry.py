"""How a job is tried again: the ladder, the table, and that no job is tried for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.attempts import diagnosed

from gpuherd.jobs.attempts.complete import RULES, next_try
from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass
from gpuherd.jobs.completion import NextTry, Observed
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import QueuedJob, ResourceRequest

OOM = diagnosed(code=1, log_tail="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
FAULT = diagnosed(code=1, gpu_problem="Xid 79")
DISK = diagnosed(code=1, log_tail="OSError: [Errno 28] No space left on device")


def waiting(
    spec: Job | None = None,
    *,
    tries: int = 0,
    avoid: frozenset[str] = frozenset(),
    gpus: int = 1,
    memory_mb: int | None = None,
    share: bool = False,
) -> QueuedJob:
    """A job as the queue has it, with what it requests now."""
    return QueuedJob(
        id=1,
        job=spec or job(),
        tries=tries,
        attempts=1,
        not_before=0.0,
        avoid=avoid,
        ready_at=0.0,
        adapted=ResourceRequest(gpus, memory_mb, share),
    )


def after(queued: QueuedJob, found: NextTry) -> QueuedJob:
    """The same job as it waits for its next try."""
    return replace(queued, tries=queued.tries + found.costs_try, adapted=found.request, avoid=found.avoid)


def job(**fields: object) -> Job:
    return replace(Job(name="j", argv=("x",), retries=1), **fields)  # type: ignore[arg-type]


ON_A = Observed(gpus=("GPU-a",), gpu_total_mb=40_000)


def again(queued: QueuedJob, diagnosis: Diagnosis, seen: Observed = ON_A) -> NextTry:
    found = next_try(queued, diagnosis, seen, 100.0)
    assert found is not None
    return found


def test_a_crash_on_a_gpu_on_trial_costs_no_try_once() -> None:
    crash = diagnosed(code=1, log_tail="RuntimeError: x")
    on_trial = replace(ON_A, on_trial=True)
    first = again(waiting(job(retries=0)), crash, on_trial)
    assert (first.costs_try, first.avoid) == (False, frozenset({"GPU-a"}))
    assert next_try(waiting(job(retries=0), avoid=first.avoid), crash, on_trial, 100.0) is None
    assert next_try(waiting(job(retries=0)), crash, ON_A, 100.0) is None
    assert next_try(waiting(job(retries=0)), OOM, on_trial, 100.0) is None


def test_the_ladder_of_a_job_that_runs_out_of_memory() -> None:
    """Shared, alone, a larger GPU, two, four, five, and then no more: only the larger GPU and the end cost a try."""
    queued = waiting(job(memory_mb=10_000, share=True, gpus_at_most=5), memory_mb=10_000, share=True)
    seen = replace(ON_A, larger_exists=True)
    climbed = []
    for _ in range(9):
        found = next_try(queued, OOM, seen, 100.0)
        if found is None:
            break
        climbed.append((found.request.gpus, found.request.memory_mb, found.request.share, found.costs_try))
        queued = after(queued, found)
        seen = replace(seen, larger_exists=seen.larger_exists and found.request.memory_mb == 10_000)
    assert climbed == [
        (1, 10_000, False, False),
        (1, 40_001, False, True),
        (2, 10_000, False, False),
        (4, 10_000, False, False),
        (5, 10_000, False, False),
    ]


def test_out_of_memory_with_nothing_larger_goes_to_another_gpu() -> None:
    found = again(waiting(avoid=frozenset({"GPU-b"})), OOM)
    assert (found.request.gpus, found.request.memory_mb, found.change) == (1, None, None)
    assert found.avoid == {"GPU-a", "GPU-b"}


def test_who_ran_out_asks_for_more_than_it_had_where_there_is_more() -> None:
    seen = replace(ON_A, peak_mb=25_000, most_mb=39_000)
    found = again(waiting(job(memory_mb=20_000), memory_mb=20_000), OOM, seen)
    assert (found.request.memory_mb, found.change) == (31_250, "on a GPU with 31250 MB free")
    shared = again(waiting(job(memory_mb=10_000, share=True), memory_mb=10_000, share=True), OOM, seen)
    assert (shared.request.memory_mb, shared.request.share, shared.change) == (31_250, False, "on a GPU for itself")
    # It had all that there is: only another GPU may help, and none that is smaller than what it was seen to use.
    full = again(waiting(job(memory_mb=20_000), memory_mb=20_000), OOM, replace(seen, peak_mb=39_000))
    assert (full.request.memory_mb, full.change) == (37_830, "on a GPU with 37830 MB free")
    # On more GPUs each holds less.
    more = again(waiting(job(memory_mb=20_000, gpus_at_most=2), memory_mb=20_000), OOM, seen)
    assert (more.request.gpus, more.request.memory_mb) == (2, 20_000)


def test_a_rung_that_changes_the_job_holds_nothing_against_its_gpu() -> None:
    queued = waiting(job(memory_mb=9, share=True), memory_mb=9, share=True)
    assert again(queued, OOM).avoid == frozenset()


def test_memory_of_the_machine_is_waited_for_and_not_looked_for_on_another_gpu() -> None:
    host = diagnosed(code=1, log_tail="MemoryError: Unable to allocate 3.0 GiB for an array")
    found = again(waiting(job(gpus_at_most=4)), host, replace(ON_A, larger_exists=True))
    assert (found.request.gpus, found.request.memory_mb, found.avoid, found.not_before) == (1, None, frozenset(), 105.0)


def test_on_the_cpu_there_is_no_ladder() -> None:
    found = again(waiting(job(gpus_at_most=4)), OOM, Observed())
    assert (found.request.gpus, found.costs_try) == (1, True)


def test_only_the_faulty_gpu_of_several_is_avoided() -> None:
    seen = Observed(gpus=("GPU-a", "GPU-b"), faulty=("GPU-b",))
    assert again(waiting(gpus=2), FAULT, seen).avoid == {"GPU-b"}
    assert again(waiting(gpus=2), FAULT, replace(seen, faulty=())).avoid == {"GPU-a", "GPU-b"}


def test_a_full_disk_is_waited_for_without_a_try_but_a_job_that_fills_it_itself_is_not_tried_for_ever() -> None:
    spent = waiting(tries=1)
    waits = again(spent, DISK, Observed(disk_low=True))
    assert waits.change == "when there is space on the disk again"
    assert not waits.costs_try
    assert next_try(spent, DISK, Observed(disk_low=False), 1.0) is None
    assert again(waiting(), DISK, Observed(disk_low=False)).costs_try


@pytest.mark.parametrize("failure", list(FailureClass))
def test_every_class_has_a_rule_or_is_for_good(failure: FailureClass) -> None:
    for_good = (FailureClass.BAD_INPUT, FailureClass.MISSING, FailureClass.CANNOT_WRITE, FailureClass.IDLE)
    retry = failure not in for_good
    assert (failure in RULES) == retry


def test_pauses_double_up_to_a_minute() -> None:
    waits = [again(waiting(job(retries=99), tries=tries), FAULT).not_before - 100 for tries in (0, 1, 5, 6, 60)]
    assert waits == [1, 2, 32, 60, 60]


def test_who_shared_and_used_no_more_than_it_asked_for_asks_for_as_much_again() -> None:
    """The others there took it, or it was promised less by what its family had needed."""
    queued = waiting(job(share=True, memory_mb=30_000), memory_mb=30_000, share=True)
    seen = replace(ON_A, peak_mb=12_000, most_mb=80_000)
    assert again(queued, OOM, seen).request.memory_mb == 30_000
    assert again(queued, OOM, replace(seen, peak_mb=32_000)).request.memory_mb == 40_000


def test_who_was_given_a_smaller_gpu_than_it_asked_for_gets_what_it_asked_for_without_a_try() -> None:
    """By what others of its family needed; that it was too little is not its fault."""
    queued = waiting(job(retries=0, memory_mb=30_000), memory_mb=30_000)
    small = Observed(gpus=("GPU-s",), gpu_total_mb=16_000, peak_mb=15_900, most_mb=40_000, larger_exists=True)
    found = again(queued, OOM, small)
    assert (found.request.gpus, found.request.memory_mb, found.request.share, found.costs_try) == (
        1,
        30_000,
        False,
        False,
    )
    assert found.change == "on a GPU with 30000 MB, as it asked"
    # Once: who has failed is given no less than it asks for (``QueuedJob.may_ask_less``).
    assert found.avoid == {"GPU-s"}
    assert next_try(replace(queued, avoid=found.avoid), OOM, small, 0.0) is None


@given(
    st.sampled_from([OOM, FAULT, DISK, diagnosed(code=65), diagnosed(code=3)]),
    st.booleans(),
    st.none() | st.integers(1, 16),
    st.integers(0, 4),
    st.lists(st.sampled_from([16_000, 40_000, 80_000]), min_size=1, max_size=3, unique=True),
)
def test_no_job_is_tried_for_ever(
    diagnosis: Diagnosis, share: bool, most: int | None, retries: int, sizes: list[int]
) -> None:
    """A job that fails in the same way each time ends, on any machine, after few attempts."""
    queued = waiting(
        job(memory_mb=5_000, share=share, gpus_at_most=most, retries=retries), share=share, memory_mb=5_000
    )
    for _ in range(1 + 1 + 5 + retries):
        fitting = [size for size in sizes if size >= (queued.memory_mb or 0)]
        assert fitting, "the ladder asks for a GPU that is not there"
        seen = Observed(gpus=("GPU-x",), gpu_total_mb=min(fitting), larger_exists=max(sizes) > min(fitting))
        found = next_try(queued, diagnosis, seen, 0.0)
        if found is None:
            assert queued.tries == retries or not diagnosis.retry
            return
        assert queued.gpus <= found.request.gpus <= (most or 1)
        assert not found.request.share or queued.share
        queued = replace(after(queued, found), avoid=queued.avoid)
    raise AssertionError("still tried after all rungs and all tries")
