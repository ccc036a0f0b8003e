"""A Hydra program, not ours, swept over a real SLURM by ``hydra/launcher=gpuherd``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launcher.conftest import HERE, ROOT, Sweeps
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def swept(slurm: Cluster) -> Iterator[Sweeps]:
    """Sweeps in a folder that every node and user can read."""
    paths = [ROOT / "src", ROOT / "launcher" / "src", HERE / "plugins"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="hydra-", dir="/tmp") as folder:
        found = Sweeps(Path(folder), env)
        yield found
        found.end()


def test_a_sweep_goes_through_slurm_in_order_with_gpus_of_its_own(swept: Sweeps) -> None:
    words = ("hydra/launcher=gpuherd", "hydra.launcher.engine=slurm", "hydra.launcher.partition=main", "fail=2")
    done = swept.run("multirun.py", "6", *words, "hydra.launcher.retries=0", "wait=0.5")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["num"] for each in found] == list(range(6))
    assert [each["raised"] for each in found] == [None, None, "ValueError: no fit with seed 2", None, None, None]
    values = [each["value"] for each in found if each["value"] is not None]
    for one in values:
        assert one["gpus"] in set("01234567")
        for other in values:
            apart = one["began"] >= other["ended"] or other["began"] >= one["ended"]
            assert one is other or apart or one["gpus"] != other["gpus"]
    jobs = subprocess.run(
        [sys.executable, "-m", "gpuherd", "status", "--json", str(swept.sweep_dir / ".gpuherd")],
        env=swept.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"failed": 1' in jobs.stdout
    # The same folder again: only what failed is done again.
    again = swept.run("multirun.py", "6", *words, "hydra.launcher.retries=0", "wait=0.5")
    assert again.returncode == 0, again.stderr
    assert swept.times_begun() == {"0": 1, "1": 1, "2": 2, "3": 1, "4": 1, "5": 1}


def test_of_several_processes_of_a_job_the_first_says_what_it_returned(swept: Sweeps) -> None:
    words = ("hydra/launcher=gpuherd", "hydra.launcher.engine=slurm", "hydra.launcher.ntasks_per_node=2")
    done = swept.run("multirun.py", "1", *words, "hydra.launcher.retries=0")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(each["num"], each["raised"]) for each in found] == [(0, None)]
    assert swept.times_begun() == {"0": 2}
