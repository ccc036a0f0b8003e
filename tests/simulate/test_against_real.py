"""A small scenario simulated and really run, on GPUs of the stand-in driver: the same order, the same makespan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from gpuherd.jobs import GpuOptions, Job, Queue, RunDirectory, run_jobs
from gpuherd.simulate.engine import Simulation
from gpuherd.simulate.options import Rules
from gpuherd.simulate.results import History
from gpuherd.simulate.workload import Session, Trial, Work, machine, read_queue, replayed
from gpuherd.standin.machine import SimulatedMachine


def jobs_of(kinds: Sequence[tuple[float, int, int]]) -> list[Job]:
    """A job that sleeps for each (seconds, GPUs, priority)."""
    return [
        Job(name=f"job-{number}", argv=("sleep", str(seconds)), gpus=gpus, priority=priority)
        for number, (seconds, gpus, priority) in enumerate(kinds)
    ]


def really_run(jobs: Sequence[Job], folder: Path, options: GpuOptions) -> tuple[list[str], float]:
    """Names in the order of their starts, and seconds from the call to the last end."""
    began = time.time()
    outcome = run_jobs(jobs, options, RunDirectory(folder))
    assert outcome.done == len(jobs)
    queue = Queue(RunDirectory(folder).queue)
    attempts = list(queue.attempts())
    queue.close()
    return [each.job for each in attempts], max(each.ended_at or 0.0 for each in attempts) - began


def simulated(jobs: Sequence[Job], kinds: Sequence[tuple[float, int, int]], gpus: str, rules: Rules) -> History:
    works = [Work(job, (Trial(kind[0]),)) for job, kind in zip(jobs, kinds, strict=True)]
    return Simulation(machine(gpus), works, rules).run()


def starts(history: History, kinds: Sequence[tuple[float, int, int]]) -> list[str]:
    """Names by their starts; those that start together in the order in which the policy takes them."""
    return [
        f"job-{ran.job}" for ran in sorted(history.attempts, key=lambda ran: (ran.start, -kinds[ran.job][2], ran.job))
    ]


def closest_ends_s(history: History) -> float:
    """The shortest time between two ends: with less than a real dispatcher needs for one, the order says nothing."""
    ends = sorted(ran.end for ran in history.attempts)
    return min(after - one for one, after in pairwise(ends))


SHORT = [(1.0, 1, 0), (1.35, 1, 0), (2.1, 2, 0), (1.2, 1, 0), (1.6, 1, 0), (0.8, 2, 1), (1.45, 1, 0), (2.55, 1, 0)]


def test_a_small_run_goes_as_simulated(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    standin("4x40GB")
    jobs = jobs_of(SHORT)
    rules = Rules(max_checks=4, check_interval=0.1)
    foreseen = simulated(jobs, SHORT, "4x40GB", rules)
    assert closest_ends_s(foreseen) > 0.04
    for attempt in range(3):
        folder = tmp_path / f"run{attempt}"
        order, makespan_s = really_run(jobs, folder, GpuOptions(max_gpus=4, max_checks=4, check_interval=0.1))
        if order == starts(foreseen, SHORT) and makespan_s == pytest.approx(foreseen.makespan_s, rel=0.05):
            break
        # A machine that does much else beside stretches real seconds, and no simulated ones: it has three tries.
    assert order == starts(foreseen, SHORT)
    assert makespan_s == pytest.approx(foreseen.makespan_s, rel=0.05)

    # The folder itself, replayed with the lengths that its attempts had, goes the same way.
    works = replayed(read_queue(RunDirectory(folder).queue), None, Random(0))
    again = Simulation(machine("4x40GB"), works, rules).run()
    assert starts(again, SHORT) == order
    assert makespan_s == pytest.approx(again.makespan_s, rel=0.05)


@pytest.mark.slow
def test_a_longer_run_beside_a_stranger_goes_as_simulated(
    standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    lengths = [2.0 + 0.83 * (number * 7 % 11) for number in range(24)]
    kinds = [(length, 2 if number % 6 == 5 else 1, 0) for number, length in enumerate(lengths)]
    real = standin("4x40GB")
    stranger = real.occupy(3, 20_000)
    gone = threading.Timer(10.0, stranger.release)
    gone.start()
    jobs = jobs_of(kinds)
    order, makespan_s = really_run(jobs, tmp_path / "run", GpuOptions(max_gpus=4, max_checks=4, check_interval=0.25))
    gone.join()
    foreseen = _with_a_stranger(jobs, kinds, 10.0)
    assert sorted(order) == sorted(starts(foreseen, kinds))
    assert order[:8] == starts(foreseen, kinds)[:8]
    assert makespan_s == pytest.approx(foreseen.makespan_s, rel=0.05)


def _with_a_stranger(jobs: Sequence[Job], kinds: Sequence[tuple[float, int, int]], until_s: float) -> History:
    """The same with a stranger on GPU 3 from the start until then."""

    class OneStranger:
        def sessions(self, seed: int, gpu: str) -> Iterator[Session]:
            return iter([Session(0.0, until_s, False)] if gpu.endswith("-3") else [])

    works = [Work(job, (Trial(kind[0]),)) for job, kind in zip(jobs, kinds, strict=True)]
    rules = Rules(max_checks=4, check_interval=0.25)
    return Simulation(machine("4x40GB"), works, rules, OneStranger()).run()
