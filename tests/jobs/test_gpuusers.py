"""Who uses our GPUs, and what the driver says against them, on simulated GPUs with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpuherd.gpus import nvml
from gpuherd.jobs.gpu.watch import GpuWatch
from gpuherd.jobs.options import GpuOptions
from gpuherd.standin.machine import SimulatedMachine

TAG = "queue/7"
SLEEP = "import time; time.sleep(60)"
# Starts a process that has neither our environment nor our session, and tells its pid.
DETACHES = """
import subprocess, sys, time
words = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(words, env={}, start_new_session=True).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def machine(standin: Callable[..., SimulatedMachine]) -> SimulatedMachine:
    return standin("2x40GB")


@pytest.fixture
def watch(machine: SimulatedMachine) -> GpuWatch:
    return GpuWatch(GpuOptions(max_checks=1), "queue")


@contextmanager
def running(tag: str | None, code: str = SLEEP) -> Iterator[tuple[int, int]]:
    """A process with this tag in its environment: its pid, and the number that it tells."""
    environment = {name: value for name, value in os.environ.items() if name != "GPUHERD_ATTEMPT"}
    if tag is not None:
        environment["GPUHERD_ATTEMPT"] = tag
    process = subprocess.Popen([sys.executable, "-S", "-c", code], env=environment, stdout=subprocess.PIPE)
    told = 0
    assert process.stdout is not None
    try:
        if code is not SLEEP:
            told = int(process.stdout.readline())
        time.sleep(0.02)
        yield process.pid, told
    finally:
        if told:
            os.kill(told, signal.SIGKILL)
        process.kill()
        process.communicate()


def own(machine: SimulatedMachine, *tags: str) -> dict[str, tuple[str, ...]]:
    return {machine.uuid(0): tags or (TAG,)}


def test_our_job_is_no_stranger_and_another_process_is(watch: GpuWatch, machine: SimulatedMachine) -> None:
    with running(TAG) as (ours, _), running(None) as (other, _):
        machine.occupy(0, 3_000, pid=ours)
        machine.occupy(1, 9_000, pid=other)  # on a GPU where we have nothing
        assert watch.strangers(own(machine)) == ()
        machine.occupy(0, 900, pid=other)
        (stranger,) = watch.strangers(own(machine))
        assert (stranger.pid, stranger.memory_mb, stranger.label) == (other, 900, "0")
        assert f"(pid {other}, 900 MB)" in stranger.sentence
        assert watch.usage.peaks == {TAG: 3_000}


def test_a_job_of_another_queue_is_a_stranger(watch: GpuWatch, machine: SimulatedMachine) -> None:
    with running("other/7") as (pid, _):
        machine.occupy(0, 900, pid=pid)
        assert [stranger.pid for stranger in watch.strangers(own(machine))] == [pid]
        assert watch.strangers(own(machine, "other/7")) == ()


def test_what_our_job_starts_without_its_environment_is_ours_as_well(
    watch: GpuWatch, machine: SimulatedMachine
) -> None:
    with running(TAG, DETACHES) as (_, child):
        machine.occupy(0, 900, pid=child)
        assert watch.strangers(own(machine)) == ()
        assert watch.usage.peaks == {TAG: 900}


def test_displays_and_processes_that_have_gone_are_no_strangers(watch: GpuWatch, machine: SimulatedMachine) -> None:
    machine.occupy(0, 100, graphics=True)
    with running(None) as (pid, _):
        machine.occupy(0, 900, pid=pid)
        assert len(watch.strangers(own(machine))) == 1
    assert watch.strangers(own(machine)) == ()


def test_the_peak_is_the_most_on_one_gpu_and_stays(watch: GpuWatch, machine: SimulatedMachine) -> None:
    both = {machine.uuid(0): (TAG, "queue/8"), machine.uuid(1): (TAG,)}
    with running(TAG) as (one, _), running(TAG) as (two, _), running("queue/8") as (three, _):
        large = machine.occupy(0, 5_000, pid=one)
        machine.occupy(0, 1_000, pid=two)
        machine.occupy(0, 700, pid=three)
        machine.occupy(1, 2_000, pid=one)
        watch.strangers(both)
        assert watch.usage.peaks == {TAG: 6_000, "queue/8": 700}
        large.release()
        watch.strangers(both)
        assert watch.usage.peaks == {TAG: 6_000, "queue/8": 700}
        watch.strangers({machine.uuid(1): (TAG,)})
        assert watch.usage.peaks == {TAG: 6_000}  # what has ended is forgotten


def test_where_pids_are_hidden_memory_tells(watch: GpuWatch, machine: SimulatedMachine) -> None:
    """As in a container: the driver lists nobody."""
    machine.set_ghost_memory(0, 300)
    watch.look(100.0, ())
    assert watch.still_free([machine.uuid(0)], 100.0) == {machine.uuid(0)}
    machine.hide_pids()
    machine.occupy(0, 8_000)
    assert watch.strangers(own(machine)) == ()  # it may be our own job, of which nobody knows how much it needs
    assert watch.usage.peaks == {TAG: 8_000}
    assert watch.strangers(own(machine), {machine.uuid(0): 8_000}) == ()
    machine.occupy(0, 2_000)
    (stranger,) = watch.strangers(own(machine), {machine.uuid(0): 8_000})
    assert (stranger.pid, stranger.memory_mb) == (None, 2_000)
    assert "2000 MB more than our jobs declare" in stranger.sentence


def test_where_the_driver_hides_memory_of_processes_the_only_jobs_is_all_that_has_come(
    watch: GpuWatch, machine: SimulatedMachine
) -> None:
    watch.look(100.0, ())
    watch.still_free([machine.uuid(0)], 100.0)
    machine.hide_process_memory()
    with running(TAG) as (pid, _):
        machine.occupy(0, 3_000, pid=pid)
        watch.strangers(own(machine))
        assert watch.usage.peaks == {TAG: 3_000}


# --- what the driver says against a GPU --------------------------------------------------------------------------


def test_a_sound_gpu_has_no_problem(watch: GpuWatch, machine: SimulatedMachine) -> None:
    assert watch.gpu_problem([machine.uuid(0), machine.uuid(1)]) is None


def test_errors_since_our_job_took_the_gpu_are_told(machine: SimulatedMachine) -> None:
    machine.set_ecc_errors(0, 5)
    watch = GpuWatch(GpuOptions(max_checks=1), "queue")
    watch.look(100.0, ())
    watch.still_free(machine.uuids, 100.0)
    machine.set_ecc_errors(0, 8)
    machine.xid(1, 79)
    assert watch.gpu_problem([machine.uuid(0)]) == "GPU 0: uncorrectable memory errors: 3"
    assert watch.gpu_problem([machine.uuid(1)]) == "GPU 1: Xid 79 (it has fallen off the bus)"
    watch.still_free(machine.uuids, 100.0)  # the next job: these were not on its watch
    assert watch.gpu_problem(machine.uuids) is None
    machine.xid(1, 79)
    assert watch.gpu_problem(machine.uuids) == "GPU 1: Xid 79 (it has fallen off the bus)"


def test_an_error_that_a_program_makes_by_itself_says_nothing_of_the_gpu(
    watch: GpuWatch, machine: SimulatedMachine
) -> None:
    machine.xid(0, 31)
    assert watch.gpu_problem(machine.uuids) is None
    assert nvml.fault(31) is None


def test_a_lost_gpu_is_told(watch: GpuWatch, machine: SimulatedMachine) -> None:
    machine.lose(1)
    assert "GPU 1: it has fallen off the bus" in str(watch.gpu_problem(machine.uuids))
