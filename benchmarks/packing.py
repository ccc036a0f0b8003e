"""Many small jobs on shared GPUs: none out of memory, and hardly less dense than one who knows everything could pack.

The case of an issue that task-spooler has open: 1,000 jobs of 10 to 20 % of a GPU each, which take their memory only
some seconds after their start; a scheduler that looks at the memory in use starts all of them before the first has
taken any. Here a real dispatcher with ``share`` runs stand-in jobs that declare their memory.

*Clairvoyant*: the same jobs in the same order with the lengths that they really had, in virtual time, each put where
the least room is left over the moment it fits, at no cost. The share is its makespan by ours.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuherd.jobs import Job, RunDirectory, run_jobs
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Event, EventKind
from gpuherd.standin.machine import SimulatedMachine

GPU_MB = 80 * 1024


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory(prefix="gpuherd-packing-") as folder:
        return pack(Path(folder), jobs=60 if quick else 1000, gpus=2 if quick else 16, hold_s=3.0 if quick else 8.0)


def pack(folder: Path, *, jobs: int, gpus: int, hold_s: float, seed: int = 1) -> dict[str, Any]:
    """Runs ``jobs`` jobs on ``gpus`` stand-in GPUs. Each ramps for up to 2 s and holds its memory about ``hold_s``."""
    chance = random.Random(seed)
    machine = SimulatedMachine.create(folder / "machine", f"{gpus}x80GB")
    machine.activate()
    former = os.environ.get("GPUHERD_LEASE_DIR")
    os.environ["GPUHERD_LEASE_DIR"] = str(folder / "leases")
    events: list[Event] = []
    work = [_job(f"job-{number:04d}", folder / "events", hold_s, chance) for number in range(jobs)]
    options = DispatchOptions(max_checks=1, check_interval=0.1, max_gpus=gpus, share=True)
    try:
        outcome = run_jobs(work, options, RunDirectory(folder / "run"), on_event=events.append)
    finally:
        machine.deactivate()
        del os.environ["GPUHERD_LEASE_DIR"]
        if former is not None:
            os.environ["GPUHERD_LEASE_DIR"] = former
    spans = _spans(folder / "events")
    begun = min(start for start, _ in spans.values())
    makespan = max(end for _, end in spans.values()) - begun
    declared = [job.memory_mb or 0 for job in work]
    lengths = [spans[job.name][1] - spans[job.name][0] for job in work]
    best = clairvoyant(declared, lengths, gpus)
    return {
        "jobs": jobs,
        "gpus": gpus,
        "done": outcome.done,
        "out_of_memory": sum(event.kind in (EventKind.RETRY, EventKind.FAILED) for event in events),
        "makespan_s": makespan,
        "clairvoyant_makespan_s": best,
        "share_of_clairvoyant": best / makespan,
        "most_at_once": _most_at_once(list(spans.values())),
    }


def _job(name: str, events: Path, hold_s: float, chance: random.Random) -> Job:
    memory_mb = round(GPU_MB * chance.uniform(0.10, 0.20))
    ramp_s, held_s = chance.uniform(0.2, 2.0), chance.uniform(0.5, 1.5) * hold_s
    words = ["--memory-mb", str(memory_mb), "--ramp", f"{ramp_s:.2f}", "--hold", f"{held_s:.2f}"]
    argv = (sys.executable, "-m", "gpuherd.standin.job", *words, "--name", name, "--events", str(events))
    return Job(name=name, argv=argv, gpus=1, memory_mb=memory_mb, share=True)


def _spans(events: Path) -> dict[str, tuple[float, float]]:
    """Start and last end of each job, by its own account."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for line in events.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        if told["event"] == "start":
            starts.setdefault(told["name"], told["time_ns"] / 1e9)
        else:
            ends[told["name"]] = told["time_ns"] / 1e9
    return {name: (starts[name], end) for name, end in ends.items()}


def clairvoyant(declared_mb: Sequence[int], lengths_s: Sequence[float], gpus: int) -> float:
    """The makespan of best fit in order of age, with room for every job that fits anywhere in front of the queue.

    >>> clairvoyant([60, 60, 20], [1.0, 1.0, 1.0], 1) if GPU_MB > 140 else None
    1.0
    """
    room = [GPU_MB] * gpus
    running: list[tuple[float, int, int]] = []
    waiting = list(range(len(declared_mb)))
    now = makespan = 0.0
    while waiting:
        left = []
        for job in waiting:
            fits = [gpu for gpu in range(gpus) if room[gpu] >= declared_mb[job]]
            if not fits:
                left.append(job)
                continue
            gpu = min(fits, key=lambda one: room[one])
            room[gpu] -= declared_mb[job]
            heapq.heappush(running, (now + lengths_s[job], gpu, declared_mb[job]))
            makespan = max(makespan, now + lengths_s[job])
        waiting = left
        if waiting:
            now, gpu, freed = heapq.heappop(running)
            room[gpu] += freed
    return makespan


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    running = most = 0
    for _, change in sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]):
        running += change
        most = max(most, running)
    return most
