"""What a run says of its GPUs, in the words that people grep for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.gpus.query import machine
from gpuherd.jobs import clock
from gpuherd.jobs.records import Counts, Event, EventKind, RunSnapshot
from gpuherd.posttrain.engine.curves import GpuMemory, memory_summary
from gpuherd.posttrain.runs.folder import RoundsDirectory
from gpuherd.posttrain.runs.gpu_monitor import LOOK_EVERY_S, GpuWatcher, Looks
from gpuherd.runs.console import logged_to
from gpuherd.standin.machine import SimulatedMachine


def test_lines_are_those_of_the_guide() -> None:
    found = memory_summary([GpuMemory("0", 48_570_000_000, 52_070_000_000, 80 << 30), GpuMemory("1", None, None, None)])
    assert found == [
        "GPU Memory Summary:",
        "  GPU 0: 45.23 GB allocated, 48.49 GB reserved, 80.00 GB total",
        "  GPU 1: N/A allocated, N/A reserved, N/A total",
    ]
    assert memory_summary([])[1:] == ["  no GPUs: all was computed on the CPU"]


def test_looks_are_averaged_by_gpu_and_phase() -> None:
    looks = Looks()
    looks.add({"0": "train", "1": "collect"}, {"0": 80, "1": None})
    looks.add({"0": "train"}, {"0": 100, "1": 5})
    looks.add({"0": "evaluate"}, {})
    assert looks.lines() == [
        "GPU utilization: GPU 0, evaluate: N/A",
        "GPU utilization: GPU 0, train: mean 90 % of 2 looks",
        "GPU utilization: GPU 1, collect: N/A",
    ]


class Shown:
    """A display that remembers."""

    every_s = 60.0

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.snapshots = 0

    def event(self, event: Event) -> None:
        self.events.append(event)

    def snapshot(self, snapshot: RunSnapshot) -> None:
        self.snapshots += 1


def event(kind: EventKind, job: str | None, *gpus: str) -> Event:
    return Event(kind=kind, at=0.0, text="x", job=job, gpus=gpus)


def test_a_watcher_hears_sees_and_tells(
    tmp_path: Path, standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("2x40GB")
    now = 100.0
    monkeypatch.setattr(clock, "mono", lambda: now)
    folder, shown = RoundsDirectory(tmp_path), Shown()
    folder.usage.mkdir()
    watcher = GpuWatcher(folder, {"a": "train", "b": "collect"}, shown, lambda: machine(processes=False).gpus)
    assert watcher.every_s == LOOK_EVERY_S
    watcher.event(event(EventKind.NOTICE, None))
    watcher.event(event(EventKind.STARTED, "a", "1"))
    snapshot = RunSnapshot(Counts(0, 1, 0, 0, 0), (), None, None)
    for _ in range(13):
        now += LOOK_EVERY_S
        watcher.snapshot(snapshot)
    assert shown.snapshots == 1  # the display behind wants one a minute
    usage = {"peak_allocated": 3 << 30, "peak_reserved": 4 << 30, "total": 40 << 30}
    folder.usage_of("a").write_text(json.dumps(usage))
    watcher.event(event(EventKind.DONE, "a", "1"))
    watcher.event(event(EventKind.STARTED, "b", "1"))
    folder.usage_of("b").write_text("{")  # lost, and nothing depends on it
    watcher.event(event(EventKind.DONE, "b", "1"))
    assert len(shown.events) == 5
    with logged_to(folder.root / "run.log"):
        logging.getLogger("gpuherd.jobs").info("a: started")
        lines = watcher.write()
    assert lines == ["GPU Memory Summary:", "  GPU 1: 3.00 GB allocated, 4.00 GB reserved, 40.00 GB total"]
    log = (folder.root / "run.log").read_text()
    assert "GPU Memory Summary:" in log and "  GPU 1: 3.00 GB allocated" in log and "a: started" in log
    assert "GPU utilization: GPU 1, train: mean 0 % of 13 looks" in log or "GPU utilization: GPU 1, train: N/A" in log
    with logged_to(folder.root / "run.log"):
        logging.getLogger("gpuherd.jobs").info("again")
    assert (folder.root / "run.log").read_text().startswith(log)


def test_gpus_of_a_cluster_are_told_by_the_jobs_that_had_them(tmp_path: Path) -> None:
    """Nobody can look at them from here."""
    folder, shown = RoundsDirectory(tmp_path), Shown()
    folder.usage.mkdir()
    watcher = GpuWatcher(folder, {"a": "train", "b": "train"}, shown, lambda: ())
    usage = {"peak_allocated": 3 << 30, "peak_reserved": 4 << 30, "total": 80 << 30}
    folder.usage_of("a").write_text(json.dumps(usage))
    watcher.event(event(EventKind.STARTED, "a", "n1:0"))
    watcher.event(event(EventKind.STARTED, "b", "n2:1"))
    watcher.event(event(EventKind.DONE, "a", "n1:0"))
    watcher.event(event(EventKind.DONE, "b", "n2:1"))
    assert watcher.write() == [
        "GPU Memory Summary:",
        "  GPU n1:0: 3.00 GB allocated, 4.00 GB reserved, 80.00 GB total",
        "  GPU n2:1: N/A allocated, N/A reserved, N/A total",
    ]
