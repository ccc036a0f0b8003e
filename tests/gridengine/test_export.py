"""Exported files, submitted to a real Grid Engine by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gridengine.cluster import Cluster
from tests.patience import wait_until
from tests.slurm.running import run, write_jobs

pytestmark = pytest.mark.slow


def test_what_was_exported_runs_in_the_order_of_its_needs_and_is_told_of_its_end(
    gridengine: Cluster, shared: Path
) -> None:
    hostile = "$(touch no) 'b'"
    jobs = [
        {"name": "a1", "command": ["bash", "-c", "echo a1 has $CUDA_VISIBLE_DEVICES"], "gpus": 2},
        {"name": "a2", "command": ["bash", "-c", "exit 100"], "gpus": 2},
        {"name": "b", "command": ["echo", hostile], "needs": ["a1"], "gpus": 0, "cpus": 2},
        {"name": "c", "command": ["echo", "c"], "needs": ["a2"], "gpus": 0},
        {"name": "finds", "command": ["python", "-c", "import sys; print(sys.executable)"], "gpus": 0, "cpus": 3},
        {"name": "saves", "command": ["bash", "-c", "trap 'echo saved; exit 0' TERM; sleep 60"], "gpus": 0},
    ]
    place = shared / "by hand"
    words = ["--output", str(place), "--time-limit", "6s", "--notice", "4s", "--setup", "echo set up"]
    run("export", "--to", "gridengine", write_jobs(shared, jobs), *words)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(place / "submit.sh")], check=True, capture_output=True, env={**os.environ, "PATH": path}
    )
    wait_until(lambda: gridengine.command("qstat") == "", every_s=0.5)
    logs = {path.name.removesuffix(".log"): path.read_text().splitlines()[1:] for path in (place / "logs").iterdir()}
    assert logs["01-a.1"] == ["a1 has 0,1"] or logs["01-a.1"] == ["a1 has 2,3"]
    assert logs["02-b"] == [hostile]
    assert logs["03-c"] == ["left out: done/01-a.2 is not there, it has not succeeded"]
    assert logs["05-saves"][-1] == "saved"
    assert logs["04-finds"] == [sys.executable]
    assert list(shared.rglob("no")) == []


def test_jobs_over_several_nodes_are_refused(gridengine: Cluster, shared: Path) -> None:
    jobs = [{"name": "a", "command": ["true"], "nodes": 2}]
    words = ["export", "--to", "gridengine", write_jobs(shared, jobs), "--output", str(shared / "by hand")]
    assert "exported files can't start that in Grid Engine" in run(*words, code=2)
