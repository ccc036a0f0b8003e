"""What each part costs as it grows: a queue of up to a million jobs, up to 10,000 GPUs, up to 100,000 reports.

Times are milliseconds of CPU, of the process that does it, unless they say otherwise: so that they mean something on a
machine where others work, too. Each size is measured in a process of its own, which tells its peak of memory. What
follows from the figures is told in docs/scale.md.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, TypeVar

from gpuherd.engines.local.process import Exit
from gpuherd.engines.slurm.commands import read_sacct, read_squeue
from gpuherd.gpus.choose import choose
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import Job, JobState, Queue, RunDirectory
from gpuherd.jobs.completion import Known, Settlement
from gpuherd.jobs.monitor.job_status import JobSelection
from gpuherd.jobs.monitor.status import read_status
from gpuherd.jobs.records import AttemptRecord, AttemptState, Begun, Handed, StartRecord
from gpuherd.jobs.remote.protocol import (
    Claim,
    EndReport,
    Manifest,
    Order,
    order_of,
    portable,
    present,
    read_ended,
    take,
    to_json,
    write_ended,
)
from gpuherd.jobs.scheduler.policy import decide_with
from gpuherd.jobs.scheduler.pool import Pool
from gpuherd.jobs.scheduler.types import GpuView, Limits, WaitingJob
from gpuherd.simulate import Mix, Recipe, Rules, Scenario, drawn, machines, simulate, spread, variants

T = TypeVar("T")

# In an engine's hands at once, where the queue has as many.
_OPEN = 10_000
# What a job of a sweep is called, and what it is told.
_ARGV = ("python", "train.py", "--config", "configs/base.yaml", "--seed")


def run(*, quick: bool) -> dict[str, Any]:
    """Figures by part and size."""
    jobs = (1_000, 10_000) if quick else (1_000, 10_000, 100_000, 1_000_000)
    few = (1_000,) if quick else (1_000, 10_000, 100_000)
    return {
        "unit": "ms of CPU",
        "queue": {str(size): _child("queue", str(size)) for size in jobs},
        "decision": {str(size): _child("decision", str(size)) for size in (8, 64, 512, 4096, 10_000)},
        "one_machine": {str(size): _child("one_machine", str(size)) for size in (8, 64, 512)},
        "reports": {str(size): _child("reports", str(size)) for size in few},
        "manifest": {str(size): _child("manifest", str(size)) for size in (1, 100, 1_000, 10_000)},
        "slurm_text": {str(size): _child("slurm_text", str(size)) for size in few},
        "start": _start(3 if quick else 15),
        "simulation": {
            f"{policy}, {case}": _child("simulation", "2000" if quick else "1000000", policy, case)
            for policy in ("gpuherd", "handover")
            for case in ("1 GPU", "1, 2 and 8 GPUs")
        },
        "at_most": _child("at_most", "4000" if quick else "100000"),
    }


def _child(part: str, *words: str) -> Any:
    """The figures of one part, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", part, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def main(words: Sequence[str]) -> None:
    """Measures one part and prints its figures as JSON."""
    parts: dict[str, Callable[..., Any]] = {
        "queue": queue,
        "decision": decision,
        "one_machine": one_machine,
        "reports": reports,
        "manifest": manifest,
        "slurm_text": slurm_text,
        "simulation": simulation,
        "at_most": at_most,
    }
    size, *more = words[1:]
    print(json.dumps(parts[words[0]](int(size), *more)))


def _peak_mb() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


class _Clock:
    """Measures one thing after the other. ``told``: milliseconds of CPU, by what was done."""

    def __init__(self) -> None:
        self.told: dict[str, float] = {}

    def __call__(self, name: str, what: Callable[[], T], times: int = 1) -> T:
        """Does it so many times; the median counts."""
        spent = []
        for _ in range(times):
            began = time.process_time()
            result = what()
            spent.append((time.process_time() - began) * 1000)
        self.told[name] = round(median(spent), 4)
        return result


# --- the queue ------------------------------------------------------------------------------------------------


def queue(size: int) -> dict[str, Any]:
    """A queue of so many jobs: filled, asked, handed over in part, and begun again."""
    with tempfile.TemporaryDirectory(prefix="gpuherd-scale-") as name:
        run_folder = RunDirectory(name)
        run_folder.create()
        return _Filled(size, run_folder).measured()


class _Filled:
    def __init__(self, size: int, folder: RunDirectory):
        self._size = size
        self._folder = folder
        self._clock = _Clock()
        self._numbers = count(1)
        self._run = 0

    def measured(self) -> dict[str, Any]:
        clock, path = self._clock, self._folder.queue
        jobs = [
            Job(name=f"job-{n:07}", argv=(*_ARGV, str(n)), gpus=1 + (n % 16 == 0), memory_mb=8000)
            for n in range(self._size)
        ]
        with Queue(path) as queue:
            clock("submit", lambda: queue.submit(jobs))
        file_mb = round(path.stat().st_size / 1e6, 2)
        with Queue(path, check=False) as queue:
            self._ask(queue)
            self._hand_over(queue)
        clock("open", lambda: Queue(path, check=False).close(), 3)
        clock("open_and_check", lambda: Queue(path).close())
        clock("status_page_of_40", lambda: read_status(self._folder, JobSelection(limit=40)), 3)
        clock("status_by_name", lambda: read_status(self._folder, JobSelection(names=(jobs[-1].name,))), 3)
        clock("status_search", lambda: read_status(self._folder, JobSelection(text="job-00009", limit=40)))
        with Queue(path, check=False) as queue:
            clock("submit_again", lambda: queue.submit(jobs))
            clock("cancel_all", lambda: queue.cancel((), "someone"))
        return {
            **clock.told,
            "file_mb": file_mb,
            "file_mb_at_the_end": round(path.stat().st_size / 1e6, 2),
            "peak_mb": _peak_mb(),
        }

    def _ask(self, queue: Queue) -> None:
        clock, now = self._clock, time.time()
        clock("head_of_9", lambda: queue.head(9, now), 50)
        clock("head_of_1000", lambda: queue.head(1000, now), 3)
        clock("first_of_kinds", lambda: queue.first_of_kinds(8, now), 20)
        clock("round", queue.round, 50)
        numbers = count()
        clock("add_one", lambda: queue.add([Job(name=f"later-{next(numbers)}", argv=("true",))]), 20)
        clock(
            "add_one_that_needs_another",
            lambda: queue.add([Job(name=f"later-{next(numbers)}", argv=("true",), needs=("later-0",))]),
            5,
        )
        clock("count", lambda: _counted_anew(queue), 3)

    def _hand_over(self, queue: Queue) -> None:
        clock = self._clock
        open_ = min(_OPEN, self._size // 2)
        self._run = queue.begin_run(time.time(), time.monotonic(), "slurm")
        heads = queue.head(open_, time.time())
        starts = [self._start(queued) for queued in heads]
        started = [start.attempt for start in starts]
        ids = [attempt.id for attempt in started]
        clock("record_starts_of_one", lambda: queue.record_starts([starts.pop()], self._run), min(50, open_ // 4))
        began = len(starts)
        clock("record_starts", lambda: queue.record_starts(starts, self._run))
        clock("record_handles", lambda: queue.record_handles({number: f"1_{number}" for number in ids}))
        clock("record_begun", lambda: queue.record_begun([_begun(number) for number in ids]))
        clock("open_attempts", queue.running)
        clock("orphaned", queue.orphaned, 3)
        clock("record_ends_of_one", lambda: queue.record_ends([_end(started.pop())]), min(50, open_ // 4))
        ended = len(started)
        clock("record_ends", lambda: queue.record_ends([_end(attempt) for attempt in started]))
        for name, many in (
            ("record_starts", began),
            ("record_handles", open_),
            ("record_begun", open_),
            ("open_attempts", open_),
            ("record_ends", ended),
        ):
            clock.told[f"{name}_each"] = round(clock.told.pop(name) / many, 5)

    def _start(self, queued: Any) -> StartRecord:
        number = next(self._numbers)
        attempt = AttemptRecord(
            id=number,
            queued=queued,
            number=1,
            gpus=(),
            labels=(),
            process=None,
            log=str(self._folder.attempt_log(queued.job.name, 1)),
            started_at=time.time(),
            started_mono=time.monotonic(),
            handed=Handed("slurm", f"batch-{number // 1000}", number % 1000),
        )
        return StartRecord(attempt, 0.0, None)


def _counted_anew(queue: Queue) -> Any:
    queue.note(time.time(), "notice", "something")  # so that the file has changed
    return queue.counts()


def _begun(number: int) -> Begun:
    labels = ("n0001:0",)
    return Begun(attempt=number, node="n0001", gpus=labels, labels=labels, at=time.time(), mono=time.monotonic())


def _end(attempt: AttemptRecord) -> Settlement:
    known = Known(record=attempt, exit=Exit(started=True, code=0), at=time.time(), mono=time.monotonic())
    return Settlement(known, AttemptState.DONE, JobState.DONE)


# --- decisions ------------------------------------------------------------------------------------------------


def decision(gpus: int) -> dict[str, float]:
    """A decision on so many GPUs, 8 to a machine; all but one machine's are in use."""
    return _decisions(Pool(_views(gpus, 8)), 8)


def one_machine(gpus: int) -> dict[str, float]:
    """The same where one machine has them all: first all are free, then all but eight are in use."""
    clock = _Clock()
    pool, jobs = Pool(_views(gpus, gpus, free=gpus)), [WaitingJob(n, 1) for n in range(gpus)]
    clock("all_free_and_as_many_jobs", lambda: decide_with(pool, jobs, _LIMITS, _pick, explain=False))
    return clock.told | _decisions(Pool(_views(gpus, gpus)), 8)


_LIMITS = Limits(1_000_000, 4)


def _decisions(pool: Pool, free: int) -> dict[str, float]:
    clock = _Clock()
    for waiting in (free + 8, 1_000):
        jobs = [WaitingJob(n, 1 + (n % 16 == 0)) for n in range(waiting)]
        clock(f"{waiting}_jobs_looked_at", partial(decide_with, pool, jobs, _LIMITS, _pick), 20)
    return clock.told


def _views(gpus: int, each: int, free: int = 8) -> list[GpuView]:
    return [
        GpuView(
            Gpu(n % each, f"GPU-{n}", "G", 80_000, 0, 80_000),
            None if n < free else "our own job runs on it",
            ours=n >= free,
            node=f"m{n // each}",
        )
        for n in range(gpus)
    ]


def _pick(candidates: Sequence[Gpu], number: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, number, memory_mb=memory_mb)


# --- what goes to nodes, and comes from there ---------------------------------------------------------------------


def reports(size: int) -> dict[str, float]:
    """A folder with so many reports of ends, on the disk of this machine: to look into it, to write and to read one."""
    clock = _Clock()
    with tempfile.TemporaryDirectory(prefix="gpuherd-scale-") as name:
        folder, numbers = Path(name), count()
        ended = EndReport(at=time.time(), ran_s=1.0, code=0)
        for number in range(size):
            (folder / f"{number:08}.ended").write_bytes(b"{}")
        clock("look", lambda: present(folder), 5)
        clock("claim", lambda: take(folder / f"{next(numbers):08}.claim", Claim(at=time.time(), node="n1")), 50)
        clock("tell_an_end", lambda: write_ended(folder / "own.ended", ended), 50)
        clock("read_an_end", lambda: read_ended(folder / "own.ended"), 200)
    return clock.told


def manifest(size: int) -> dict[str, float]:
    """What the nodes are told of so many attempts of a batch: written once, read by each."""
    clock = _Clock()
    with tempfile.TemporaryDirectory(prefix="gpuherd-scale-") as name:
        root = RunDirectory(name)
        orders = tuple(_order(root, number) for number in range(size))
        text = clock(
            "make",
            lambda: to_json(Manifest(batch="b", engine="slurm", environment=portable(os.environ), orders=orders)),
        )
        path = Path(name) / "manifest.json"
        path.write_text(text)
        clock("read", lambda: order_of(path, size // 2), 5)
        return {**clock.told, "kb": round(len(text) / 1000, 1)}


def _order(root: RunDirectory, number: int) -> Order:
    name = f"job-{number:07}"
    return Order(
        attempt=number,
        tag=f"0123456789ab.1234567.{number}",
        job=Job(name=name, argv=(*_ARGV, str(number))),
        log=str(root.attempt_log(name, 1)),
        progress=str(root.attempt_progress(number)),
        claim=str(root.attempt_claim(number)),
        ended=str(root.attempt_ended(number)),
        gpus=1,
    )


def slurm_text(size: int) -> dict[str, float]:
    """So many lines of squeue and of sacct."""
    clock = _Clock()
    of_squeue = "".join(f"4711|{n}|RUNNING|n{n % 1250:04}|gpuherd-0123456789ab|None\n" for n in range(size))
    of_sacct = "".join(f"4711_{n}|COMPLETED|n{n % 1250:04}|None|gpuherd-0123456789ab\n" for n in range(size))
    assert sum(1 for _ in read_squeue(of_squeue)) == sum(1 for _ in read_sacct(of_sacct)) == size
    clock("squeue", lambda: sum(1 for _ in read_squeue(of_squeue)), 3)
    clock("sacct", lambda: sum(1 for _ in read_sacct(of_sacct)), 3)
    return clock.told


def _start(times: int) -> dict[str, float]:
    """Milliseconds of CPU that a process takes before it does anything: children's, from start to exit."""
    programs = {
        "python": "pass",
        "leader_on_a_node": "import gpuherd.jobs.remote.agent",
        "gpuherd_status_imports": "import gpuherd.cli.status, gpuherd.jobs.monitor.status",
    }
    return {name: round(median(_cpu_of_child(text) for _ in range(times)), 1) for name, text in programs.items()}


def _cpu_of_child(program: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


# --- simulated ------------------------------------------------------------------------------------------------

_MIXES = {"1 GPU": Mix((1,), (1.0,)), "1, 2 and 8 GPUs": Mix((1, 2, 8), (80.0, 15.0, 5.0))}


def simulation(size: int, policy: str, case: str) -> dict[str, Any]:
    """So many jobs of half an hour on average on 1,250 machines of 8 GPUs, by our policy or by a cluster's own."""
    began = time.process_time()
    works = drawn(size, Recipe(seconds=spread("exponential:30m"), gpus=_MIXES[case]), Random(0))
    drawn_s = time.process_time() - began
    scenario = Scenario(machines=machines("1250x8x80GB"), works=works)
    rules = Rules(policy="handover", at_most=12_000) if policy == "handover" else Rules()
    (result,) = simulate(scenario, variants(rules, []))
    told = result.figures.to_dict()
    return {
        "jobs": size,
        "cpu_seconds": round(time.process_time() - began, 1),
        "of_that_drawing": round(drawn_s, 1),
        "peak_mb": _peak_mb(),
        "decisions": result.figures.decisions,
        **{
            key: told[key]
            for key in ("done", "makespan_seconds", "over_least_possible", "utilisation_until_last_start")
        },
    }


def at_most(size: int) -> list[dict[str, Any]]:
    """What it costs to keep few jobs in a cluster's hands, to look seldom, and to have a slow scheduler: the share of
    1,000 GPUs that is used while jobs wait, with jobs of five minutes on average."""
    works = drawn(size, Recipe(seconds=spread("exponential:5m")), Random(0))
    scenario = Scenario(machines=machines("125x8x80GB"), works=works)
    found: list[dict[str, Any]] = []
    for words in (
        ["at_most=500,1000,1020,1050,1100,1500,2000", "look=2,10,60"],
        ["at_most=2000", "array_limit=10,100,1000"],
        ["at_most=2000", "engine_rate=2,3,4,30"],
        ["at_most=2000", "engine_cycle=1,30"],
    ):
        for result in simulate(scenario, variants(Rules(policy="handover"), words)):
            used = result.figures.used_until_last_start
            found.append({"rules": result.variant.name, "used": None if used is None else round(used, 4)})
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
