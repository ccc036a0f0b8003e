"""Jobs handed to an engine beyond this machine, end to end: real leaders, real files, a small real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.jobs.handover.conftest import Cluster, MakeJob, Run

from gpuherd.jobs import EventKind, Queue


def test_jobs_are_done_there_and_recorded_here(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path) -> None:
    jobs = [sh(f"j{i}", f"echo out {i}; echo $CUDA_VISIBLE_DEVICES > {tmp_path}/seen{i}", gpus=2) for i in range(3)]
    outcome = run([*jobs, sh("cpu", "sleep 0.1"), sh("bad", "echo ValueError: no; exit 3", retries=0)])
    assert (outcome.done, outcome.failed, outcome.exit_code) == (4, 1, 1)
    assert outcome.failures[0].reason == "ValueError: no"
    assert [(Path(run.directory.logs) / f"j{i}.1.log").read_text() for i in range(3)] == [
        f"out {i}\n" for i in range(3)
    ]
    with Queue(run.directory.queue) as queue:
        attempts = {attempt.job: attempt for attempt in queue.attempts()}
    assert all(len((tmp_path / f"seen{i}").read_text().split(",")) == 2 for i in range(3))
    assert len(attempts["j0"].gpus) == 2 and attempts["j0"].gpus[0].startswith(("n1:", "n2:"))
    assert attempts["cpu"].gpus == () and (attempts["cpu"].run_s or 0) >= 0.1
    assert {batch["gpus"]: len(batch["titles"]) for batch in cluster.orders.batches()} == {2: 3, 0: 2}
    assert [path.name for path in run.directory.handover.iterdir() if not path.name.endswith(".out")] == ["engine.json"]
    assert run.metrics()["gpu_hours"] > 0
    assert len(run.told(EventKind.HANDED)) == 2 and len(run.told(EventKind.STARTED)) == 5
