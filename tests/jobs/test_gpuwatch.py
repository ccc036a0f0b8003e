"""The eye on the GPUs, on simulated ones: rows of checks, holes in them, leases, the last look under the lease."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gpuherd.gpus.leases import LeaseFolder
from gpuherd.jobs.dispatcher_state import DispatcherState, GpuState
from gpuherd.jobs.gpu.watch import GpuWatch
from gpuherd.jobs.options import GpuOptions
from gpuherd.standin.machine import SimulatedMachine

OPTIONS = GpuOptions(max_checks=3, check_interval=1.0)


@pytest.fixture
def machine(standin: Callable[..., SimulatedMachine]) -> SimulatedMachine:
    return standin("2x40GB")


@pytest.fixture
def watch(machine: SimulatedMachine) -> GpuWatch:
    return GpuWatch(OPTIONS, "queue")


@pytest.fixture
def ours(machine: SimulatedMachine) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "GPUHERD_ATTEMPT": "queue/1"}
    )
    yield child
    child.kill()
    child.wait()


def verdicts(watch: GpuWatch, ours: tuple[str, ...] = (), *, now: float = 104.0) -> list[str | None]:
    return [view.busy for view in watch.views(now, ours)]


def test_free_after_as_many_looks_as_asked(watch: GpuWatch) -> None:
    assert verdicts(watch) == ["not looked at yet"] * 2
    watch.look(100.0, ())
    assert verdicts(watch) == ["free for 1 of 3 checks"] * 2
    watch.look(101.0, ())
    watch.look(102.0, ())
    assert verdicts(watch) == [None, None]


def test_the_most_that_a_job_could_have_is_that_of_gpus_that_work(standin: Callable[..., SimulatedMachine]) -> None:
    """What was learned is asked for up to that: on a GPU that has failed a job would wait for ever."""
    machine = standin("1x80GB+1x40GB+1x24GB")
    watch = GpuWatch(OPTIONS, "queue")
    assert [watch.most_mb(gpus) for gpus in (0, 1, 2, 3, 4)] == [None, 81_920, 40_960, 24_576, None]
    machine.lose(0)
    watch.look(100.0, ())
    assert [watch.most_mb(gpus) for gpus in (1, 2, 3)] == [40_960, 24_576, None]


def test_mig_instances_are_for_jobs_on_one_gpu(standin: Callable[..., SimulatedMachine]) -> None:
    standin("1x40GB+1x80GB").split_mig(1, [20_000, 50_000])
    watch = GpuWatch(OPTIONS, "queue")
    assert [watch.most_mb(gpus) for gpus in (1, 2)] == [50_000, None]
    views = {gpu.label: GpuState(uuid=gpu.uuid, label=gpu.label, total_mb=gpu.total_mb) for gpu in watch.gpus}
    told = DispatcherState(pid=1, gpus=tuple(views.values()))
    assert [told.most_mb(gpus) for gpus in (1, 2)] == [50_000, None]


def test_a_hole_in_the_row_begins_it_anew(watch: GpuWatch) -> None:
    for now in (100.0, 101.0, 200.0):
        watch.look(now, ())
    assert verdicts(watch, now=200.0) == ["free for 1 of 3 checks"] * 2


def test_a_gpu_that_was_free_an_hour_ago_is_not_free_now(watch: GpuWatch, machine: SimulatedMachine) -> None:
    """While nothing waits nobody looks; what was seen before that says nothing when a job comes back to be tried."""
    for now in (100.0, 101.0, 102.0):
        watch.look(now, ())
    watch.released([machine.uuid(1)], 3_699.0)
    assert verdicts(watch, now=3_700.0) == ["not looked at lately", "our own job has just left it"]
    watch.look(3_700.0, ())
    # The second has the right to be taken after one check, for our own job has only just left it.
    assert verdicts(watch, now=3_700.0) == ["free for 1 of 3 checks", None]


def test_a_stranger_ends_the_row_and_is_named(watch: GpuWatch, machine: SimulatedMachine) -> None:
    for now in (100.0, 101.0, 102.0):
        watch.look(now, ())
    occupation = machine.occupy(0, 900)
    watch.look(103.0, ())
    assert verdicts(watch) == ["900 MB used (threshold 500)", None]
    occupation.release()
    watch.look(104.0, ())
    assert verdicts(watch)[0] == "free for 1 of 3 checks"


def test_someone_who_came_between_check_and_start_is_seen_under_the_lease(
    watch: GpuWatch, machine: SimulatedMachine
) -> None:
    for now in (100.0, 101.0, 102.0):
        watch.look(now, ())
    leases = watch.leases.take(watch.gpus, "j", 102.0)
    assert leases is not None
    machine.occupy(1, 5_000)
    assert watch.still_free({gpu.uuid for gpu in watch.gpus}, 102.0) == {machine.uuid(0)}
    for lease in leases:
        lease.close()
    assert verdicts(watch) == [None, "5000 MB used (threshold 500)"]


def test_a_lease_that_another_has_is_not_got_and_named(watch: GpuWatch, machine: SimulatedMachine) -> None:
    for now in (100.0, 101.0, 102.0):
        watch.look(now, ())
    other = LeaseFolder.default().acquire(machine.uuid(1))
    assert other is not None
    assert watch.leases.take(watch.gpus, "j", 102.0) is None
    mine = LeaseFolder.default().acquire(machine.uuid(0))  # what was taken before the refusal was given back
    assert mine is not None
    mine.close()
    assert verdicts(watch)[0] is None
    assert f"(pid {os.getpid()})" in str(verdicts(watch)[1])
    other.close()
    watch.look(103.0, ())
    assert verdicts(watch) == [None, None]


def test_a_gpu_that_our_job_left_needs_one_clean_look(watch: GpuWatch, machine: SimulatedMachine) -> None:
    watch.look(100.0, (machine.uuid(0),))
    occupation = machine.occupy(0, 3_000, pid=os.getpid())
    watch.released((machine.uuid(0),), 100.5)
    assert watch.haste_s == 0.0
    occupation.release()
    watch.hasty_look((), 100.6)
    assert verdicts(watch) == [None, "free for 1 of 3 checks"]  # the other's row is not hurried along
    assert watch.haste_s is None


def test_what_our_job_left_running_does_not_count_as_a_stranger(
    watch: GpuWatch, machine: SimulatedMachine, ours: subprocess.Popen[bytes]
) -> None:
    time.sleep(0.05)
    machine.occupy(0, 3_000, pid=ours.pid)
    watch.released((machine.uuid(0),), 100.0)
    waits = []
    for step in range(6):
        watch.hasty_look((), 100.1 + step / 100)
        waits.append(watch.haste_s)
    assert verdicts(watch)[0] == "our own job is still leaving it"
    assert waits == sorted(w for w in waits if w is not None)  # ever longer pauses, no busy waiting
    ours.kill()
    ours.wait()
    watch.hasty_look((), 100.5)
    assert verdicts(watch)[0] is None


def test_a_gpu_that_falls_off_the_bus(watch: GpuWatch, machine: SimulatedMachine) -> None:
    for now in (100.0, 101.0, 102.0):
        watch.look(now, ())
    machine.lose(0)
    watch.look(103.0, ())
    assert "has a problem" in str(verdicts(watch)[0])
    assert verdicts(watch)[1] is None


def test_a_gpu_that_our_job_has_just_left_will_come_back_until_it_is_free_or_a_stranger_has_it(
    watch: GpuWatch, machine: SimulatedMachine
) -> None:
    """So that a large job which waits for it loses no other GPU to a small one in the moment between."""

    def returning() -> list[bool]:
        return [view.returning for view in watch.views(103.0, ())]

    for now in (100.0, 101.0, 102.0):
        watch.look(now, ())
    assert returning() == [False, False]
    watch.released([machine.uuid(0)], 103.0)
    assert returning() == [True, False]
    watch.hasty_look((), 103.0)
    assert verdicts(watch, now=103.0) == [None, None]
    assert returning() == [False, False]


def test_while_all_gpus_are_ours_nobody_is_looked_for(watch: GpuWatch, machine: SimulatedMachine) -> None:
    watch.look(100.0, machine.uuids)
    assert watch.look_in_s(100.0) > 1.0
    watch.released([machine.uuid(0)], 100.5)
    assert watch.look_in_s(100.5) <= 1.0


def test_what_was_seen_for_another_reason_is_still_noticed(watch: GpuWatch, machine: SimulatedMachine) -> None:
    """A look for strangers on our own GPUs may be the first to see that another GPU is free by now."""
    stranger = machine.occupy(0, 10_000)
    machine.occupy(1, 10_000)
    watch.look(0.0, ours=())
    watch.look(5.0, ours=())
    stranger.release()
    watch.strangers({})
    assert watch.look(5.2, ours=())
    assert watch.views(5.2, ours=())[0].busy in (None, "free for 1 of 3 checks")


@pytest.mark.parametrize("chosen", [(), ("1",)])
def test_a_gpu_that_could_not_be_read_at_the_start_is_had_when_it_is_back(
    machine: SimulatedMachine, chosen: tuple[str, ...]
) -> None:
    machine.lose(1)
    watch = GpuWatch(replace(OPTIONS, gpu_list=chosen), "queue")
    watch.look(100.0, ())
    assert [view.gpu.is_unread for view in watch.views(100.0, ())][-1]
    machine.restore(1)
    for now in (101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0, 108.0):
        watch.look(now, ())
    last = watch.views(108.0, ())[-1]
    assert (last.gpu.uuid, last.busy) == (machine.uuid(1), None)
    assert watch.choose([last.gpu], 1, None) == (last.gpu,)


def looks_until_free(watch: GpuWatch, most: int = 12, *, began: float = 100.0) -> int | None:
    """So many looks, a second apart, until GPU 0 is free; None when it is not after ``most``."""
    for look in range(1, most + 1):
        watch.look(began + look, ())
        if verdicts(watch, now=began + look)[0] is None:
            return look
    return None


def test_where_nobody_else_is_two_checks_are_enough(machine: SimulatedMachine) -> None:
    machine.occupy(1, 4000, pid=os.getpid())
    assert looks_until_free(GpuWatch(GpuOptions(gpu_list=("0",)), "queue")) == 2
    assert looks_until_free(GpuWatch(GpuOptions(gpu_list=("0",), max_checks=4), "queue")) == 4, "as the user says"


@pytest.mark.parametrize("hidden", [False, True])
def test_where_somebody_else_is_on_any_gpu_ten_checks_are_made_for_ten_minutes_more(
    machine: SimulatedMachine, hidden: bool
) -> None:
    machine.hide_pids(hidden)
    theirs = machine.occupy(1, 4000)
    watch = GpuWatch(GpuOptions(gpu_list=("0",)), "queue")
    assert looks_until_free(watch) == 10
    theirs.release()
    watch.released([machine.uuids[0]], 200.0)
    another = GpuWatch(GpuOptions(), "queue")
    assert looks_until_free(another) == 2
    theirs = machine.occupy(1, 4000)
    another.look(120.0, ())
    theirs.release()
    assert looks_until_free(another, 3, began=200.0) is None
    assert looks_until_free(another, began=800.0) == 2


def test_a_lease_that_another_user_took_lately_asks_for_ten_checks(
    machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LeaseFolder.default().acquire(machine.uuids[1]) or pytest.fail("free"):
        folder = LeaseFolder.default()
    assert not folder.taken_by_others(os.geteuid(), time.time() - 600.0)
    assert folder.taken_by_others(os.geteuid() + 1, time.time() - 600.0)
    assert not folder.taken_by_others(os.geteuid() + 1, time.time() + 1.0)
    monkeypatch.setattr(LeaseFolder, "taken_by_others", lambda *_: True)
    assert looks_until_free(GpuWatch(GpuOptions(gpu_list=("0",)), "queue")) == 10
