"""What ``gpuherd export --to slurm`` writes, submitted by hand to a real SLURM: every word arrives as it was."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.batch.export.jobs import HOSTILE, job, telling
from tests.patience import wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Plan

from gpuherd.batch import export
from gpuherd.batch.export import write
from gpuherd.engines.options import EngineOptions
from gpuherd.jobs.job import Job

pytestmark = pytest.mark.slow


@pytest.fixture
def shared() -> Iterator[Path]:
    """Where the nodes can read too."""
    with tempfile.TemporaryDirectory(prefix="export-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


def submit(cluster: Cluster, folder: Path, jobs: list[Job], options: EngineOptions) -> dict[str, str]:
    """Submits the jobs by the exported script; SLURM's number of each group."""
    write(folder, export.files(jobs, options, str(folder.parent)), force=False)
    done = subprocess.run(
        ["bash", str(folder / "submit.sh")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **cluster.environment},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ") for line in done.stdout.splitlines())


def until_gone(cluster: Cluster, numbers: dict[str, str]) -> None:
    asked = ",".join(numbers.values())
    wait_until(lambda: not cluster.command("squeue", "--noheader", f"--jobs={asked}", check=False).strip(), every_s=0.2)


def test_hostile_words_and_needs(slurm: Cluster, shared: Path) -> None:
    there = shared / "cwd `y`\n z"
    there.mkdir()
    names = [name for name in HOSTILE if not name.startswith("\udcff")]
    told = {name: shared / f"told.{number}" for number, name in enumerate(names)}
    jobs = [
        telling(
            name or "empty", told[name], *HOSTILE, env={"V": name}, cwd=str(there), gpus=2 if name == "plain" else 0
        )
        for name in names
    ]
    jobs += [
        job("fails", argv=("sh", "-c", "exit 3")),
        job("after all", argv=("sh", "-c", "ls told.* | wc -l >counted"), needs=tuple(each.name for each in jobs)),
        job("never", argv=("touch", "never"), needs=("fails",)),
        job("next round", argv=("touch", "next"), round=1),
    ]
    options = EngineOptions(engine="slurm", cpus_per_job=1, host_mem=100, time_limit=600.0, array_limit=4)
    until_gone(slurm, submit(slurm, shared / "o'dd $(x) dir", jobs, options))
    for name in names:
        words, cwd, variable, gpus = json.loads(told[name].read_bytes())
        assert [os.fsdecode(bytes.fromhex(word)) for word in words] == list(HOSTILE)
        assert (cwd, variable) == (str(there), name)
        assert len(gpus.split(",")) == 2 if name == "plain" else gpus == ""
    assert (shared / "counted").read_text().strip() == str(len(names))
    assert (shared / "next").exists() and not (shared / "never").exists()
    assert not list(shared.rglob("pwned"))
    logs = sorted(path.name for path in (shared / "o'dd $(x) dir/logs").iterdir())
    assert len(logs) == len(names) + 3  # all but the one that never began


def test_a_job_is_told_before_its_time_is_up(slurm: Cluster, shared: Path) -> None:
    script = "trap 'echo saved >saved; exit 0' TERM; echo ready >ready; while :; do sleep 0.1; done"
    options = EngineOptions(engine="slurm", host_mem=100, time_limit=600.0)
    numbers = submit(slurm, shared / "x", [job("long", argv=("bash", "-c", script), result="saved")], options)
    wait_until((shared / "ready").exists)
    # As SLURM does by itself so long before the end.
    slurm.command("scancel", "--batch", "--signal=TERM", *numbers.values())
    until_gone(slurm, numbers)
    assert (shared / "saved").read_text() == "saved\n"


def test_processes_of_a_job_are_started_by_srun(own_cluster: Callable[[Plan], Cluster], shared: Path) -> None:
    slurm = own_cluster(Plan(nodes=2, gpus=2, cpus=8, apart=True, accounting=False))
    script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK $NODE_RANK/$NNODES $SLURM_CPUS_PER_TASK $MASTER_ADDR >told.$RANK"
    options = EngineOptions(engine="slurm", cpus_per_job=4, host_mem=100, ntasks_per_node=2, mpi="pmi2")
    until_gone(slurm, submit(slurm, shared / "x", [job("a", argv=("sh", "-c", script), nodes=2, gpus=2)], options))
    told = [(shared / f"told.{rank}").read_text() for rank in range(4)]
    assert told == [f"{rank}/4 {rank % 2} {rank // 2}/2 2 n1\n" for rank in range(4)]
    assert len(list(shared.glob("told.*"))) == 4


def test_what_sbatch_understands_of_odd_options(slurm: Cluster, shared: Path) -> None:
    options = replace(EngineOptions(engine="slurm"), slurm_args=('--comment=it\'s "odd" # $(x)',), host_mem=100)
    numbers = submit(slurm, shared / "x", [job("a", argv=("sleep", "0"))], options)
    told = slurm.command("scontrol", "show", "job", *numbers.values())
    assert 'Comment=it\'s "odd" # $(x)' in told
    until_gone(slurm, numbers)
