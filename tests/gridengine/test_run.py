"""gpuherd's commands over a real Grid Engine: what is its own, beyond what all engines keep to (``tests/engines``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gridengine.cluster import Cluster
from tests.gridengine.configuration import Plan
from tests.patience import Gate, wait_until
from tests.slurm.running import handle_of, has_handle, labels, run, sh, start, states, write_jobs

from gpuherd.engines.gridengine.engine import find_grid_engine
from gpuherd.engines.gridengine.options import GridEngineOptions
from gpuherd.standin.machine import SimulatedMachine

slow = pytest.mark.slow
OwnCluster = Callable[[Plan], Cluster]


def batch(folder: Path, jobs: list[dict[str, object]], *more: str) -> list[str]:
    words = ["batch", write_jobs(folder, jobs), "--engine", "gridengine", "--output-dir", str(folder / "out")]
    return [*words, *more]


def test_the_doctor_finds_it_well(gridengine: Cluster) -> None:
    found = {each.name: each for each in find_grid_engine(GridEngineOptions(engine="gridengine"))}
    assert [str(each.status) for each in found.values()] == ["ok"] * 4
    assert found["Grid Engine"].detail == "sge_qmaster answers; queues: brief, closed, main"
    assert found["Grid Engine GPUs"].detail == "jobs request them by -l gpu=N, counted by slot"
    assert found["Grid Engine parallel environments"].detail == "fill, smp, spread1, spread2"
    other = find_grid_engine(GridEngineOptions(engine="gridengine", sge_gpu="mem_free"))
    assert "not counted" in other[1].detail


def test_the_doctor_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = find_grid_engine(GridEngineOptions(engine="gridengine"))
    assert found.detail.startswith("not here: qsub, qstat, qdel")
    assert "submit hosts" in str(found.remedy)


@slow
def test_deleted_by_somebody_it_is_cancelled_for_good(gridengine: Cluster, shared: Path) -> None:
    gate = Gate(shared / "gate")
    jobs = [sh("runs", f"touch {shared}/begun; {gate.wait}"), sh("waits", "true", gpus=8), sh("goes-on", gate.wait)]
    with start(*batch(shared, jobs)) as process:
        wait_until(lambda: (shared / "begun").exists() and has_handle(shared / "out", "waits"))
        out = shared / "out"
        wait_until(lambda: "because it offers only hc:gpu=" in run("status", "--json", str(out)), every_s=0.5)
        gridengine.command("qdel", handle_of(shared / "out", "runs"))
        gridengine.command("qdel", handle_of(shared / "out", "waits"))
        wait_until(lambda: states(out)["runs"] == "cancelled" and states(out)["waits"] == "cancelled", every_s=0.2)
        gate.open()
        told, _ = process.communicate(timeout=200)
    assert states(out) == {"runs": "cancelled", "waits": "cancelled", "goes-on": "done"}
    assert told.count("cancelled by somebody in Grid Engine") == 2, told


@slow
def test_where_the_site_does_not_say_which_gpus_gpuherds_leases_do(
    own_gridengine: OwnCluster, shared: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    """The node's driver is the stand-in's, with 4 GPUs; both jobs run at once."""
    standin("4x40GB")
    own_gridengine(Plan(assigns=False, gpus=4))
    setup = [f"export {name}='{value}'" for name, value in os.environ.items() if name.startswith(("GPUHERD_", "LD_"))]
    wait = f"until [ -e {shared}/one ] && [ -e {shared}/two ]; do sleep 0.05; done"
    jobs = [sh(name, f"touch {shared}/{name}; {wait}; echo $CUDA_VISIBLE_DEVICES", gpus=2) for name in ("one", "two")]
    told = run(*batch(shared, jobs, "--setup", *setup))
    assert "2 done" in told
    logs = [next((shared / "out" / "logs").glob(f"{name}.*.log")).read_text() for name in ("one", "two")]
    given = [each for text in logs for each in text.strip().split(",")]
    assert len(set(given)) == 4, logs
    assert len(labels(shared / "out")) == 2


@slow
def test_more_jobs_than_an_array_of_the_site_holds_go_as_several(own_gridengine: OwnCluster, shared: Path) -> None:
    own_gridengine(Plan(max_aj_tasks=3))
    jobs = [sh(f"j{number}", "true", gpus=0) for number in range(7)]
    told = run(*batch(shared, jobs))
    assert "7 done" in told
    assert "takes no more jobs now" in told


@slow
def test_what_setup_changes_reaches_the_job_and_so_does_the_users_environment(
    gridengine: Cluster, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAID", "by the user; $(touch no)\nin two lines")
    monkeypatch.setenv("CHANGED", "before")
    jobs = [sh("a", 'echo "$SAID|$CHANGED|$PATH|$OMP_NUM_THREADS|$JOB_ID"', gpus=0)]
    setup = ["export PATH=/of/the/setup:$PATH", "export CHANGED=after"]
    run(*batch(shared, jobs, "--setup", *setup))
    said = next((shared / "out" / "logs").glob("a.*.log")).read_text().strip()
    text, changed, path, threads, job = said.split("|")
    assert text == "by the user; $(touch no)\nin two lines"
    assert changed == "after"
    assert path == f"/of/the/setup:{os.environ['PATH']}"
    assert threads == os.environ.get("OMP_NUM_THREADS", "1")
    assert job.isdigit()


@slow
def test_a_command_in_the_foreground_and_the_own_queue(
    gridengine: Cluster, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUHERD_QUEUE", str(shared / "queue"))
    monkeypatch.chdir(shared)
    told = run("run", "--engine", "gridengine", "--num-gpus", "1", "--", "bash", "-c", "echo here; exit 4", code=4)
    assert "here\n" in told
    run("submit", "--engine", "gridengine", "--name", "later", "--", "touch", f"{shared}/was-run")
    run("up", "--engine", "gridengine")
    wait_until((shared / "was-run").exists)
    run("down", "--engine", "gridengine")
    assert states(shared / "queue-gridengine") == {"later": "done"}
