"""gpuherd's own commands over a real SLURM: the same results as on this machine, whatever happens on the way."""

from __future__ import annotations

import csv
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import MakeModel
from tests.patience import Gate, wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Plan
from tests.slurm.running import attempts, handle_of, has_handle, labels, run, runs, sh, start, states, write_jobs

from gpuherd.jobs.records import AttemptState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OwnCluster = Callable[[Plan], Cluster]


def test_twelve_models_give_the_same_bytes_as_on_this_machine(
    slurm: Cluster, shared: Path, make_model: MakeModel
) -> None:
    rows = [(shutil.copytree(make_model(f"m{seed}", seed=seed), shared / f"m{seed}"), "base", "") for seed in range(12)]
    models = shared / "models.csv"
    with models.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("model_id", "base_model_relation", "source_model"), *rows])
    words = ["esd", "--model-list", str(models), "--output-dir"]
    run("--simulate", "4x40GB", *words, str(shared / "local"))
    said = run(*words, str(shared / "slurm"), "--engine", "slurm", "--partition", "main")
    assert "12 done" in said
    here, there = (_results(shared / name) for name in ("local", "slurm"))
    assert len(here) > 12
    assert there == here
    # The same command finds nothing left to do.
    again = run(*words, str(shared / "slurm"), "--engine", "slurm", "--partition", "main")
    assert Counter(state for _, state in attempts(shared / "slurm")) == {AttemptState.DONE: 12}, again


def _results(out: Path) -> dict[str, bytes]:
    found = [path for path in out.rglob("*") if path.is_file() and path.suffix in (".csv", ".npz", ".h5", ".parquet")]
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def test_a_chain_goes_on_in_slurm_while_nobody_of_ours_is_there(slurm: Cluster, shared: Path) -> None:
    out, gate = shared / "out", Gate(shared / "gate")
    jobs = [
        sh("first", f"{gate.wait}; echo first >> {shared}/ended"),
        sh("second", f"echo second >> {shared}/ended", needs=["first"]),
        sh("third", f"echo third >> {shared}/ended", needs=["second"]),
        sh("bad", "exit 3", retries=0),
        sh("never", f"echo never >> {shared}/ended", needs=["bad"]),
    ]
    words = ["batch", write_jobs(shared, jobs), "--output-dir", str(out), "--engine", "slurm"]
    with start(*words) as process:
        wait_until(lambda: has_handle(out, "third"), every_s=0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    gate.open()
    wait_until(lambda: runs(shared)["third"] == 1, every_s=0.2)
    assert (shared / "ended").read_text().split() == ["first", "second", "third"]
    run(*words, code=1)
    assert runs(shared) == {"first": 1, "second": 1, "third": 1}
    found = states(out)
    assert {found[name] for name in ("first", "second", "third")} == {"done"}
    assert found["bad"] == "failed"
    assert found["never"] != "done"
    assert Counter(job for job, _ in attempts(out)).most_common(1)[0][1] == 1


def _in_slurm(cluster: Cluster) -> int:
    return len(cluster.command("squeue", "-h", "-r", "-t", "pending,running", "-o", "%i").split())


def test_an_array_of_200(slurm: Cluster, shared: Path) -> None:
    out = shared / "out"
    jobs = [sh(f"j{number}", f"echo j{number} >> {shared}/ended", gpus=0) for number in range(200)]
    said = run("batch", write_jobs(shared, jobs), "--output-dir", str(out), "--engine", "slurm", "--array-limit", "6")
    assert "200 done" in said
    assert runs(shared) == Counter(f"j{number}" for number in range(200))
    assert Counter(state for _, state in attempts(out)) == {AttemptState.DONE: 200}


def test_cancelled_here_and_cancelled_there(slurm: Cluster, shared: Path) -> None:
    out, gate = shared / "out", Gate(shared / "gate")
    jobs = [sh(name, f"{gate.wait}; echo {name} >> {shared}/ended") for name in ("here", "there", "stays")]
    words = ["batch", write_jobs(shared, jobs), "--output-dir", str(out), "--engine", "slurm"]
    with start(*words) as process:
        wait_until(
            lambda: slurm.command("squeue", "-h", "-r", "-t", "running", "-o", "%i").count("\n") == 3, every_s=0.2
        )
        run("cancel", "--run", str(out), "here")
        slurm.command("setpriv", "--reuid=65534", "--clear-groups", "scancel", handle_of(out, "there"))
        wait_until(lambda: Counter(states(out).values())["cancelled"] == 2, every_s=0.2)
        gate.open()
        printed, _ = process.communicate(timeout=120)
    assert "cancelled by nobody in SLURM" in printed
    assert runs(shared) == {"stays": 1}
    assert states(out) == {"here": "cancelled", "there": "cancelled", "stays": "done"}


def test_another_turn_after_a_signal_goes_on_from_the_checkpoint(slurm: Cluster, shared: Path) -> None:
    out = shared / "out"
    script = f"""
        if [ -e {shared}/saved ]; then echo went on from $(cat {shared}/saved) >> {shared}/ended; exit 0; fi
        trap 'echo 7 > {shared}/saved; exit 143' TERM
        touch {shared}/ready; while :; do sleep 0.05; done
    """
    words = ["batch", write_jobs(shared, [sh("saves", script)]), "--output-dir", str(out), "--engine", "slurm"]
    with start(*words) as process:
        wait_until((shared / "ready").exists, every_s=0.1)
        wait_until(lambda: has_handle(out, "saves"), every_s=0.2)
        slurm.command("scancel", "--signal=USR1", "--batch", handle_of(out, "saves"))
        printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    assert (shared / "ended").read_text() == "went on from 7\n"
    assert [job for job, _ in attempts(out)] == ["saves", "saves"]


def test_the_controller_is_restarted_in_mid_run(slurm: Cluster, shared: Path) -> None:
    out, gate = shared / "out", Gate(shared / "gate")
    jobs = [sh(f"j{number}", f"{gate.wait}; echo j{number} >> {shared}/ended") for number in range(12)]
    words = ["batch", write_jobs(shared, jobs), "--output-dir", str(out), "--engine", "slurm"]
    with start(*words) as process:
        wait_until(
            lambda: slurm.command("squeue", "-h", "-r", "-t", "running", "-o", "%i").count("\n") == 8, every_s=0.2
        )
        slurm.stop_controller()
        gate.open()
        wait_until(lambda: sum(runs(shared).values()) >= 8, every_s=0.2)
        slurm.start_controller()
        printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    assert runs(shared) == Counter(f"j{number}" for number in range(12))
    assert Counter(state for _, state in attempts(out)) == {AttemptState.DONE: 12}


TORCHRUN = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
loss = model(torch.full((2, 4), float(rank + 1))).sum()
loss.backward()
hosts = [None] * size
dist.all_gather_object(hosts, os.uname().nodename)
if rank == 0:
    gradient = model.module.weight.grad.flatten().tolist()
    with open(os.environ["TOLD"], "w") as file:
        print(size, sorted(set(hosts)), gradient, file=file)
dist.destroy_process_group()
"""


def test_torchrun_over_two_nodes_that_share_no_network_address(own_cluster: OwnCluster, shared: Path) -> None:
    own_cluster(Plan(nodes=3, apart=True, gpus=2, accounting=False))
    program = shared / "train.py"
    program.write_text(TORCHRUN)
    job = {
        "name": "ddp",
        "command": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)],
        "gpus": 2,
        "nodes": 2,
        "env": {"TOLD": str(shared / "told"), "GLOO_SOCKET_IFNAME": "eth0"},
    }
    run("batch", write_jobs(shared, [job]), "--output-dir", str(shared / "out"), "--engine", "slurm")
    # The gradient is the mean over four ranks of 2 * (rank + 1).
    assert (shared / "told").read_text() == "4 ['n1', 'n2'] [5.0, 5.0, 5.0, 5.0]\n"


def test_gpus_of_a_further_node_are_told_by_their_own_numbers(own_cluster: OwnCluster, shared: Path) -> None:
    own_cluster(Plan(nodes=2, apart=True, gpus=2, accounting=False))
    holder = subprocess.Popen(["srun", "--nodelist=n2", "--gres=gpu:1", "sh", "-c", f"touch {shared}/held; sleep 200"])
    try:
        wait_until((shared / "held").exists)
        script = f'echo "$(hostname):$CUDA_VISIBLE_DEVICES" > {shared}/on.$NODE_RANK'
        gate = Gate(shared / "gate")
        words = ["--output-dir", str(shared / "out"), "--engine", "slurm"]
        with start("batch", write_jobs(shared, [sh("wide", f"{script}; {gate.wait}", nodes=2)]), *words) as process:
            wait_until(lambda: labels(shared / "out") == ("n1:0", "n2:1"), every_s=0.2)
            gate.open()
            printed, _ = process.communicate(timeout=300)
    finally:
        holder.terminate()
        holder.wait()
    # n2 reports its GPU's number when it starts: before or after this line is printed.
    assert process.returncode == 0 and re.search(r"started on GPU n1:0, n2(:1)?\n", printed), printed
    assert [(shared / f"on.{rank}").read_text() for rank in range(2)] == ["n1:0\n", "n2:1\n"]


def test_a_node_is_killed_with_its_jobs_and_every_job_ends_once(own_cluster: OwnCluster, shared: Path) -> None:
    made = own_cluster(Plan(nodes=3, apart=True, gpus=2, slurmd_timeout_s=6, accounting=False))
    out, gate = shared / "out", Gate(shared / "gate")
    jobs = [
        sh(f"j{number}", f"hostname > {shared}/on.{number}; {gate.wait}; echo j{number} >> {shared}/ended")
        for number in range(9)
    ]
    words = ["batch", write_jobs(shared, jobs), "--output-dir", str(out), "--engine", "slurm"]
    with start(*words) as process:
        wait_until(lambda: len(list(shared.glob("on.*"))) == 6, every_s=0.2)
        on_it = [path.name for path in shared.glob("on.*") if path.read_text() == "n2\n"]
        made.kill_node("n2")
        wait_until(
            lambda: made.command("sinfo", "-h", "-n", "n2", "-p", "main", "-o", "%T").startswith("down"), every_s=0.5
        )
        gate.open()
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert len(on_it) == 2
    assert runs(shared) == Counter(f"j{number}" for number in range(9))
    tried = Counter(job for job, _ in attempts(out))
    assert {job for job, times in tried.items() if times > 1} == {f"j{name.removeprefix('on.')}" for name in on_it}
    assert set(states(out).values()) == {"done"}


def test_what_no_node_has_is_refused_before_anything_is_changed(slurm: Cluster, shared: Path) -> None:
    out = shared / "out"
    jobs = write_jobs(shared, [sh("big", "true", gpus=9)])
    words = ["batch", jobs, "--output-dir", str(out), "--engine", "slurm"]
    assert "no node of SLURM's partition main has 9 GPUs: the most is 8 (n1)" in run(*words, code=2)
    assert "did you mean main?" in run(*words, "--partition", "mian", code=2)
    assert "did you mean theory?" in run(*words, "--account", "thoery", code=2)
    assert _in_slurm(slurm) == 0
