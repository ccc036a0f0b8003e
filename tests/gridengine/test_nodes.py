"""Attempts over several nodes of a real Grid Engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gridengine.cluster import Cluster
from tests.gridengine.configuration import Plan
from tests.slurm.running import labels, run, write_jobs

SHOW = 'echo "$NODE_RANK of $NNODES at $MASTER_ADDR on $(hostname) $CUDA_VISIBLE_DEVICES"'


@pytest.mark.slow
def test_each_node_knows_its_place_and_the_first_failure_ends_all(
    own_gridengine: Callable[[Plan], Cluster], shared: Path
) -> None:
    cluster = own_gridengine(Plan(nodes=2, gpus=0))
    jobs = [
        {"name": "both", "command": ["bash", "-c", SHOW], "gpus": 0, "nodes": 2},
        {
            "name": "bad",
            "command": ["bash", "-c", '[ "$NODE_RANK" = 0 ] && exec sleep 600; exit 7'],
            "gpus": 0,
            "nodes": 2,
            "retries": 0,
        },
        {"name": "many", "command": ["true"], "gpus": 0, "nodes": 3},
    ]
    out = shared / "out"
    told = run("batch", write_jobs(shared, jobs), "--engine", "gridengine", "--output-dir", str(out), code=1)
    assert "1 done" in told
    log = next((out / "logs").glob("both.*.log")).read_text()
    lines = sorted(line for line in log.splitlines() if " of 2 at " in line)
    first = lines[0].split()[4]
    assert [line.split(" on ")[0] for line in lines] == [f"0 of 2 at {first}", f"1 of 2 at {first}"]
    assert {line.split(" on ")[1].strip() for line in lines} == set(cluster.names)
    assert "exit code 7" in told
    assert "only offers" in told
    assert labels(out) == ()
