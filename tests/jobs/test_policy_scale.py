"""Decisions at the size of a large cluster: 10,000 GPUs on 1,250 machines, by a pool that lasts and without reasons, as
in a simulation, are those of the plain way, and of rules that fit on a screen."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.gpus.choose import choose
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.scheduler.policy import decide, decide_with
from gpuherd.jobs.scheduler.pool import Pool
from gpuherd.jobs.scheduler.types import Decision, GpuView, Limits, WaitingJob

MACHINES, EACH = 1250, 8
LIMITS = Limits(max_gpus=1_000_000, cpu_slots=1)


def pick(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, count, memory_mb=memory_mb)


def gpu(machine: int, index: int) -> Gpu:
    return Gpu(index, f"GPU-{machine}-{index}", "G", 80_000, 0, 80_000)


def view(machine: int, index: int, *, ours: bool) -> GpuView:
    return GpuView(gpu(machine, index), "our own job" if ours else None, ours=ours, node=f"m{machine:04}")


def said(decision: Decision) -> tuple[object, ...]:
    starts = [(start.job, sorted(each.uuid for each in start.gpus)) for start in decision.starts]
    return (starts, {wait.job for wait in decision.waits}, {wait.job for wait in decision.refused})


def plainly(free: list[int], jobs: Sequence[WaitingJob]) -> list[tuple[int, int]]:
    """What starts, and on which machine: the rules for jobs that wait for our own GPUs, in the order of their ids."""
    left, kept, found = list(free), None, []
    for job in jobs:
        fits = [place for place, count in enumerate(left) if count >= job.gpus and place != kept]
        if fits:
            place = min(fits, key=lambda place: (left[place], place))
            left[place] -= job.gpus
            found.append((job.id, place))
        elif job.gpus > 1 and kept is None:
            # All else will come back to us, so that the machine with the most free ones is the nearest to enough.
            kept = max(range(len(left)), key=lambda place: (left[place], -place))
    return found


@settings(max_examples=10, deadline=None)
@given(
    crowded=st.lists(
        st.tuples(st.integers(0, MACHINES - 1), st.integers(1, EACH)), max_size=30, unique_by=lambda x: x[0]
    ),
    asked=st.lists(st.sampled_from([1, 1, 1, 2, 4, 8]), max_size=40),
)
def test_decisions_on_ten_thousand_gpus_are_those_of_the_plain_rules(
    crowded: list[tuple[int, int]], asked: list[int]
) -> None:
    free = [0] * MACHINES
    for place, count in crowded:
        free[place] = count
    jobs = [WaitingJob(number, gpus) for number, gpus in enumerate(asked)]
    views = [view(place, index, ours=index >= free[place]) for place in range(MACHINES) for index in range(EACH)]
    lasting = pool()
    for place, count in crowded:
        for index in range(count):
            lasting.update(view(place, index, ours=False))
    short = decide_with(lasting, jobs, LIMITS, pick, explain=False)
    assert said(short) == said(decide(jobs, views, LIMITS, pick))
    assert [(start.job, int(start.gpus[0].uuid.split("-")[1])) for start in short.starts] == plainly(free, jobs)
    for place, count in crowded:
        for index in range(count):
            lasting.update(view(place, index, ours=True))
    assert lasting.free == 0


_POOL: list[Pool] = []


def pool() -> Pool:
    """The same for all examples, as a dispatcher keeps it."""
    if not _POOL:
        _POOL.append(Pool(view(place, index, ours=True) for place in range(MACHINES) for index in range(EACH)))
    return _POOL[0]


@given(
    st.lists(
        st.builds(
            WaitingJob,
            id=st.integers(1, 1000),
            gpus=st.sampled_from([0, 1, 1, 2, 4, 9]),
            memory_mb=st.sampled_from([None, 40_000, 79_000, 90_000]),
            priority=st.integers(0, 1),
            avoid=st.frozensets(st.sampled_from(["GPU-0-0", "GPU-1-1"]), max_size=1),
            share=st.just(False),
            limit_s=st.sampled_from([None, None, 50.0, 500.0]),
        ),
        max_size=20,
        unique_by=lambda job: job.id,
    ),
    st.lists(
        st.sampled_from(["free", "ours", "ours till 100", "returning", "stranger", "shared"]), min_size=8, max_size=8
    ),
    st.integers(1, 9),
)
def test_what_is_not_explained_is_decided_in_the_same_way(jobs: list[WaitingJob], kinds: list[str], most: int) -> None:
    views = [
        GpuView(
            gpu(number // 4, number % 4),
            None if kind == "free" else kind,
            ours=kind in ("ours", "ours till 100", "shared"),
            returning=kind == "returning",
            shareable_mb=5_000 if kind == "shared" else None,
            over_at=100.0 if kind == "ours till 100" else None,
            node=f"m{number // 4}",
        )
        for number, kind in enumerate(kinds)
    ]
    limits = Limits(max_gpus=most, cpu_slots=1)
    told, short = (decide_with(Pool(views), jobs, limits, pick, explain=explain) for explain in (True, False))
    assert said(told) == said(short)
    assert (told.backfill_s, told.gpus_left, told.room_left_mb) == (
        short.backfill_s,
        short.gpus_left,
        short.room_left_mb,
    )
