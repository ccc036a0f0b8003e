"""Dispatching beside its peers, in one run: how soon a GPU works again, jobs a second, CPU a job, GPUs freed by others.

Every peer gets the same commands: a small C program that writes its start and its end (one clock, one file). A place's
turnaround is the time from a job's end to the next one's start there: the k-th end and the (k + 8)-th start, since with
eight places that are always filled the next start comes from the next end. The GPUs are the stand-in's. The guides'
loop is modelled from its published constants in virtual time: it would take a minute and a half a job.

CPU figures are per job and, for the peers, with the job's own part (the same for all); for ours both are told apart.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._peers import PEERS, PLACES, Absent, Task
from gpuherd.standin.driver import compiler
from gpuherd.standin.machine import SimulatedMachine

# Writes "S <ns> <GPUs>" at once and "E <ns> <GPUs>" after sleeping: argv is the file and the seconds.
_STAMP = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static void stamp(int file, char kind) {
    struct timespec now;
    char line[120], *gpus = getenv("CUDA_VISIBLE_DEVICES");
    clock_gettime(CLOCK_MONOTONIC, &now);
    long long ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    int n = snprintf(line, sizeof line, "%c %lld %.40s\n", kind, ns, gpus ? gpus : "");
    if (write(file, line, n) != n) exit(74);
}
int main(int argc, char **argv) {
    if (argc < 3) return 64;
    int file = open(argv[1], O_WRONLY | O_APPEND | O_CREAT, 0666);
    double seconds = atof(argv[2]);
    struct timespec wait = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    if (file < 0) return 73;
    stamp(file, 'S');
    if (seconds > 0) nanosleep(&wait, NULL);
    stamp(file, 'E');
    return 0;
}
"""

_OURS = """
import json, os, resource, sys
from pathlib import Path
from gpuherd.jobs import Job, RunDirectory, run_jobs
from gpuherd.jobs.options import DispatchOptions
commands, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
jobs = [Job(name=f"job-{i}", argv=tuple(command), gpus=1) for i, command in enumerate(commands)]
def cpu_s(who):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime
before = cpu_s(resource.RUSAGE_SELF)  # Python's own start is no cost of a job
outcome = run_jobs(jobs, DispatchOptions(**json.loads(sys.argv[3])), RunDirectory(folder / "run"))
print(json.dumps({"own": cpu_s(resource.RUSAGE_SELF) - before, "jobs": cpu_s(resource.RUSAGE_CHILDREN)}))
sys.exit(outcome.exit_code)
"""
_STARTS_AT_ONCE = {"max_checks": 1, "check_interval": 0.05, "max_gpus": PLACES}


def run(*, quick: bool) -> dict[str, Any]:
    """All figures. Times in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="gpuherd-dispatch-") as name:
        folder = Path(name)
        stamp = _compile(folder)
        jobs, rounds = (80, 1) if quick else (1000, 3)
        return {
            "places": PLACES,
            "noop": side_by_side(folder, stamp, jobs=jobs, seconds=0.0, rounds=rounds),
            "one_second": side_by_side(folder, stamp, jobs=16 if quick else 80, seconds=1.0, rounds=1),
            "freed_by_a_stranger": freed_by_a_stranger(folder, stamp, samples=3 if quick else 30),
            "guides_loop_64_jobs_of_300_s": guides_loop(jobs=64, seconds=300.0),
        }


def _compile(folder: Path) -> str:
    words = compiler()
    if words is None:
        raise SystemExit("this benchmark needs a C compiler (cc, gcc, clang or the ziglang wheel)")
    source, program = folder / "stamp.c", folder / "stamp"
    source.write_text(_STAMP)
    subprocess.run([*words, "-O2", "-o", str(program), str(source)], check=True)
    return str(program)


# --- all of them, the same jobs -----------------------------------------------------------------------------------


def side_by_side(folder: Path, stamp: str, *, jobs: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Each peer ``rounds`` times, in turn, so that what else goes on here meets all of them alike."""
    peers: dict[str, Callable[[Task], float | dict[str, float]]] = {"gpuherd": ours, **PEERS}
    found: dict[str, list[Any]] = {name: [] for name in peers}
    skipped: dict[str, str] = {}
    for number in range(rounds):
        for name, peer in peers.items():
            # What starts for many seconds before its first job is measured once.
            if name in skipped or (name == "ray" and number):
                continue
            place = folder / f"{name}-{seconds:g}-{number}"
            place.mkdir()
            events = place / "events"
            task = Task([[stamp, str(events), f"{seconds:g}"] for _ in range(jobs)], place)
            try:
                began = time.monotonic()
                cpu = peer(task)
                wall_s = time.monotonic() - began
            except (Absent, subprocess.SubprocessError) as problem:
                skipped[name] = str(problem)
                continue
            found[name].append(_figures(events, jobs, wall_s, cpu))
    figures: dict[str, Any] = {}
    for name, runs in found.items():
        if runs:
            figures[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    figures["gpuherd_times_popen_threads"] = beside_the_plain_loop(folder, stamp, jobs=jobs, seconds=seconds)
    return {"jobs": jobs, "seconds": seconds, "rounds": rounds, "peers": figures, "skipped": skipped}


def beside_the_plain_loop(folder: Path, stamp: str, *, jobs: int, seconds: float, rounds: int = 5) -> float:
    """gpuherd's jobs a second by those of a thread for each GPU that starts and waits: the median of short rounds, one
    straight after the other, so that what else goes on here meets both alike."""
    ratios = []
    for number in range(rounds if seconds == 0 else 1):
        rates = []
        for name, peer in (("gpuherd", ours), ("popen_threads", PEERS["popen_threads"])):
            place = folder / f"pair-{name}-{seconds:g}-{number}"
            place.mkdir()
            events, count = place / "events", max(2 * PLACES, jobs // rounds)
            cpu = peer(Task([[stamp, str(events), f"{seconds:g}"] for _ in range(count)], place))
            rates.append(_figures(events, count, 1.0, cpu)["jobs_a_second"])
        ratios.append(rates[0] / rates[1])
    return statistics.median(ratios)


def _figures(events: Path, jobs: int, wall_s: float, cpu: float | dict[str, float]) -> dict[str, float]:
    lines = [line.split() for line in events.read_text(encoding="utf-8").splitlines()]
    starts = sorted(int(line[1]) for line in lines if line[0] == "S")
    ends = sorted(int(line[1]) for line in lines if line[0] == "E")
    if len(ends) != jobs:
        raise Absent(f"only {len(ends)} of {jobs} jobs came to their end")
    turnaround = sorted(max(0, start - end) / 1e6 for end, start in zip(ends, starts[PLACES:], strict=False))
    split = cpu if isinstance(cpu, dict) else {"cpu_ms_a_job": cpu}
    return {
        "turnaround_p50_ms": _quantile(turnaround, 0.5),
        "turnaround_p95_ms": _quantile(turnaround, 0.95),
        "jobs_a_second": (jobs - 1) / ((ends[-1] - starts[0]) / 1e9),
        "jobs_a_second_with_start": jobs / wall_s,
        **{key: 1000 * value / jobs for key, value in split.items()},
    }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ours(task: Task) -> dict[str, float]:
    """gpuherd's own queue and dispatcher, in a fresh process, on eight stand-in GPUs."""
    environment = environment_of(SimulatedMachine.create(task.folder / "machine", f"{PLACES}x40GB"), task.folder)
    plan = task.folder / "plan.json"
    plan.write_text(json.dumps(task.commands))
    words = [sys.executable, "-c", _OURS, str(plan), str(task.folder), json.dumps(_STARTS_AT_ONCE)]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    cpu = json.loads(done.stdout.splitlines()[-1])
    return {"cpu_ms_a_job": cpu["own"] + cpu["jobs"], "own_cpu_ms_a_job": cpu["own"]}


def environment_of(machine: SimulatedMachine, folder: Path) -> dict[str, str]:
    """This process's, with the simulated machine and leases of its own."""
    return {**os.environ, **machine.environment(), "GPUHERD_LEASE_DIR": str(folder / "leases")}


# --- a GPU that somebody else frees -------------------------------------------------------------------------------


def freed_by_a_stranger(folder: Path, stamp: str, *, samples: int) -> dict[str, Any]:
    """One GPU, used by a stranger who leaves at a random moment; how soon a waiting job starts, and what waiting costs.

    With ``max_checks`` 1: the shortest quiet time. With the default (10 checks, 1 s) the quiet time comes on top.
    """
    place = folder / "stranger"
    place.mkdir()
    machine = SimulatedMachine.create(place / "machine", "1x40GB")
    events, chance = place / "events", random.Random(7)
    plan = place / "plan.json"
    plan.write_text(json.dumps([[stamp, str(events), "0.05"]] * samples))
    stranger = machine.occupy(0, 10_000)
    words = [sys.executable, "-c", _OURS, str(plan), str(place), json.dumps({"max_checks": 1})]
    noticed: list[float] = []
    with subprocess.Popen(words, env=environment_of(machine, place), stdout=subprocess.DEVNULL) as dispatcher:
        time.sleep(2.0)
        # Over a long wait in which nothing happens: the kernel counts in hundredths of a second.
        cpu, began = _cpu_s(dispatcher.pid), time.monotonic()
        time.sleep(samples)
        share = (_cpu_s(dispatcher.pid) - cpu) / (time.monotonic() - began)
        for number in range(samples):
            time.sleep(chance.uniform(0.8, 1.6))
            freed = time.monotonic_ns()
            stranger.release()
            start = _wait_for_line(events, 2 * number)
            # While the job runs, the next stranger comes: it finds the GPU taken when it has ended.
            stranger = machine.occupy(0, 10_000)
            noticed.append((start - freed) / 1e6)
            _wait_for_line(events, 2 * number + 1)
        stranger.release()
    noticed.sort()
    return {
        "samples": samples,
        "noticed_p50_ms": _quantile(noticed, 0.5),
        "noticed_p95_ms": _quantile(noticed, 0.95),
        "noticed_max_ms": noticed[-1],
        "cpu_percent_of_a_core_while_waiting": 100 * share,
    }


def _wait_for_line(events: Path, number: int, within_s: float = 60.0) -> int:
    """The time stamp in the ``number``-th line, waited for."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        if len(lines) > number:
            return int(lines[number].split()[1])
        time.sleep(0.002)
    raise SystemExit("the waiting job was not started within a minute")


def _cpu_s(pid: int) -> float:
    """CPU seconds by the scheduler's own account, in nanoseconds: a clock tick would be too coarse."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


# --- the guides' loop ---------------------------------------------------------------------------------------------


def guides_loop(*, jobs: int, seconds: float) -> dict[str, float]:
    """The polling loop of the guides in virtual time: 10 checks of 10 s with a fresh counter for each start, one start
    at a time, 0.5 s until the first look and 5 s of sleep after each start: 95.5 s a start, however many GPUs are free.
    """
    now, running = 0.0, [0.0] * PLACES
    for _ in range(jobs):
        # A GPU is counted from the first check that finds it free on; the counting begins with the request.
        free_at = heapq.heappop(running)
        checks_begin = max(now, free_at)
        started = checks_begin + 9 * 10.0 + 0.5
        now = started + 5.0
        heapq.heappush(running, started + seconds)
    makespan, ideal = max(running), jobs * seconds / PLACES
    return {"makespan_s": makespan, "ideal_s": ideal, "times_ideal": makespan / ideal}
