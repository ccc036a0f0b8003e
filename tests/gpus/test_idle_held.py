"""Which GPUs are held without being used: the rule, look by look."""

from __future__ import annotations

import doctest
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpus.machines import gpu, process, split

from gpuherd.gpus import idle_held
from gpuherd.gpus.idle_held import HOLE_S, IdleGpu, Looks, idle_gpus, is_idle, observe
from gpuherd.gpus.state import Gpu, GpuProcess

AFTER_S = 30.0


def held(use: int | None = 0, *pids: int, used_mb: int = 30_720) -> Gpu:
    """Alice's GPU: 30 GB held, and used to so many percent."""
    on_it = tuple(process(pid, memory_mb=used_mb // len(pids)) for pid in pids)
    return gpu(0, used_mb=used_mb, utilisation_percent=use, processes=on_it)


def after(looks: Sequence[tuple[float, Gpu]], known: Mapping[str, float] | None = None) -> IdleGpu | None:
    """What is found after these looks, at the time of the last one."""
    seen: Looks = {}
    for now, found in looks:
        seen = observe(seen, [found], 500, now=now)
    now, last = looks[-1]
    return idle_gpus(seen, [last], after_s=AFTER_S, now=now, known=known or {}).get(last.uuid)


def test_the_examples_in_the_docstrings_hold() -> None:
    ran = doctest.testmod(idle_held)
    assert (ran.attempted > 0, ran.failed) == (True, 0)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (held(), True),
        (held(0, 1), True),
        (held(1, 1), False),
        (held(None, 1), False),  # the driver reports no utilisation: nobody can say
        (gpu(0, used_mb=499, utilisation_percent=0), False),
        (gpu(0, used_mb=500, utilisation_percent=0), True),
        (gpu(0, used_mb=900, utilisation_percent=0, problem="lost"), False),
        (gpu(0, used_mb=900, utilisation_percent=0, processes=(process(compute=False),)), False),
        (gpu(0, used_mb=900, utilisation_percent=0, processes=(process(1, compute=False), process(2))), True),
        (split(0, [0])[0], False),
    ],
)
def test_a_gpu_is_idle_when_its_memory_is_held_and_it_is_not_used(found: Gpu, expected: bool) -> None:
    assert is_idle(found, 500) is expected


def test_even_with_a_threshold_of_0_an_empty_gpu_is_not_held() -> None:
    assert not is_idle(gpu(0, used_mb=0, utilisation_percent=0), 0)


def test_it_is_named_after_the_time_and_not_before() -> None:
    assert after([(0.0, held(0, 7)), (29.9, held(0, 7))]) is None
    found = after([(0.0, held(0, 7)), (30.0, held(0, 7))])
    assert found is not None
    assert (found.idle_s, found.used_mb) == (30.0, 30_720)
    assert found.sentence == "idle for 30 s: alice holds 30 GB (pid 7, python)"


def test_one_look_that_sees_it_at_work_ends_the_row() -> None:
    looks = [(0.0, held(0, 7)), (20.0, held(3, 7)), (21.0, held(0, 7)), (50.0, held(0, 7))]
    assert after(looks) is None
    found = after([*looks, (51.0, held(0, 7))])
    assert found is not None and found.idle_s == 30.0


def test_a_newcomer_may_load_its_data_and_one_who_goes_changes_nothing() -> None:
    assert after([(0.0, held(0, 7)), (30.0, held(0, 7, 8)), (40.0, held(0, 7, 8))]) is None
    found = after([(0.0, held(0, 7, 8)), (20.0, held(0, 7)), (40.0, held(0, 7))])
    assert found is not None and found.idle_s == 40.0


def test_time_without_looks_is_unknown() -> None:
    gap = HOLE_S + 1
    assert after([(0.0, held(0, 7)), (gap, held(0, 7))]) is None
    found = after([(0.0, held(0, 7)), (gap, held(0, 7)), (gap + 40, held(0, 7))])
    assert found is not None and found.idle_s == 40.0


def test_the_ledger_knows_of_the_time_before_our_first_look() -> None:
    known = {held().uuid: 2520.0}
    found = after([(0.0, held(0, 7))], known)
    assert found is not None
    assert found.sentence == "idle for 42 min: alice holds 30 GB (pid 7, python)"
    # What we have seen with our own eyes comes before that.
    assert after([(0.0, held(50, 7)), (2.0, held(0, 7))], known) is None
    assert after([(0.0, held(50, 7))], known) is None


def test_unknown_holders_and_several_of_them() -> None:
    found = after([(0.0, held()), (30.0, held())])
    assert found is not None and found.sentence == "idle for 30 s: someone holds 30 GB"
    strange = GpuProcess(pid=9, user=None, command="\x1b[31mrm\n-rf", memory_mb=None)
    several = gpu(0, used_mb=2000, utilisation_percent=0, processes=(strange, process(7, memory_mb=900)))
    found = after([(0.0, several), (30.0, several)])
    assert found is not None
    wanted = "idle for 30 s: alice holds 900 MB (pid 7, python); someone holds memory (pid 9, rm -rf)"
    assert found.sentence == wanted


def test_work_on_the_cpu_is_told() -> None:
    seen = observe({}, [held(0, 7)], 500, now=0.0, cpu_s={7: 10.0})
    seen = observe(seen, [held(0, 7)], 500, now=40.0, cpu_s={7: 130.0})
    found = idle_gpus(seen, [held(0, 7)], after_s=AFTER_S, now=40.0)[held().uuid]
    assert found.cores == 3.0
    assert found.sentence.endswith("(pid 7, python), and uses 3.0 CPU cores meanwhile")
    seen = observe(seen, [held(0, 7)], 500, now=50.0, cpu_s={7: 130.5})
    assert idle_gpus(seen, [held(0, 7)], after_s=AFTER_S, now=50.0)[held().uuid].on_cpu == ""


def test_a_gpu_that_is_gone_is_forgotten() -> None:
    seen = observe({}, [held(0, 7)], 500, now=0.0)
    assert observe(seen, [], 500, now=1.0) == {}
    assert idle_gpus(seen, [held(0, 7)], after_s=0.0, now=HOLE_S + 1) == {}


LOOK = st.tuples(
    st.floats(0.1, 90.0),
    st.sampled_from([0, 0, 0, 5, None]),
    st.sets(st.sampled_from([1, 2, 3]), max_size=3),
    st.sampled_from([100, 30_000]),
)


@given(st.lists(LOOK, min_size=1, max_size=25), st.one_of(st.none(), st.floats(0, 1e6)))
def test_nothing_counts_as_idle_for_longer_than_was_seen_or_is_known(
    looks: list[tuple[float, int | None, set[int], int]], known_s: float | None
) -> None:
    """Against a plain model: a GPU's idle time never reaches back beyond the last look that saw something else."""
    now = 0.0
    seen: Looks = {}
    times: list[tuple[float, bool]] = []
    uuid = held().uuid
    known = {} if known_s is None else {uuid: known_s}
    for wait, use, pids, used_mb in looks:
        now += wait
        one = held(use, *sorted(pids), used_mb=used_mb)
        seen = observe(seen, [one], 500, now=now)
        times.append((now, is_idle(one, 500)))
        found = idle_gpus(seen, [one], after_s=AFTER_S, now=now, known=known).get(uuid)
        busy_at = max((at for at, idle in times if not idle), default=None)
        if found is None:
            continue
        assert times[-1][1] and found.idle_s >= AFTER_S
        if busy_at is not None and now - busy_at <= HOLE_S:
            assert found.idle_s <= now - busy_at
        else:
            assert found.idle_s <= max(now - times[0][0], known_s or 0.0)
