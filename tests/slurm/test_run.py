"""``gpuherd run --engine slurm``: srun with the command, in a real SLURM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.patience import wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Plan

from gpuherd.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN = (sys.executable, "-m", "gpuherd", "run", "--engine=slurm")


def gpuherd(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *words], input=text, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_has_what_was_asked_for(slurm: Cluster) -> None:
    asks = ("--num-gpus=2", "--cpus=3", "--host-mem=100MB", "--time-limit=5m", "--account=lab", "--name=mine")
    script = (
        'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $SLURM_CPUS_PER_TASK $SLURM_JOB_NAME ${SLURM_EXIT_ERROR-no}"'
    )
    shown = gpuherd(*asks, "--", "sh", "-c", f"{script}; cat; exit 7", text="typed\n")
    gpus, rest = shown.stdout.splitlines()[0].split(" ", 1)
    assert len(gpus.split(",")) == 2 and rest == "PCI_BUS_ID 3 mine no", shown
    assert (shown.stdout.splitlines()[1], shown.returncode) == ("typed", 7)
    assert gpuherd("--num-gpus=0", "--", "sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]"').stdout == "[]\n"


def test_what_can_not_be_is_told_before_anything_waits(slurm: Cluster) -> None:
    for words, code, told in (
        (("--partition=nope", "--", "true"), ExitCode.USAGE, "there is no partition nope in SLURM"),
        (("--num-gpus=9", "--", "true"), ExitCode.USAGE, "can never run there"),
        (("--", "no-such-program"), 127, "not found"),
    ):
        shown = gpuherd(*words)
        assert shown.returncode == code and told in shown.stderr, shown
    dry = gpuherd("--dry-run", "--num-gpus=2", "--time-limit=1h", "--", "python", "a b.py")
    assert dry.stdout.startswith("would ask slurm for 2 GPUs, 60 min, as srun ") and "'a b.py'" in dry.stdout


def test_an_mpi_type_that_srun_does_not_know_is_told_before_anything_is_submitted(
    slurm: Cluster, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs.txt"
    jobs.write_text("true\n")
    asks = ["--ntasks-per-node=2", "--account=lab"]
    commands = {
        "run": ["run", "--engine=slurm", "--name=odd-mpi", *asks, "--", "true"],
        "batch": ["batch", str(jobs), "--engine=slurm", *asks, f"--output-dir={tmp_path}/out"],
        "dry run": ["batch", str(jobs), "--engine=slurm", *asks, f"--output-dir={tmp_path}/out", "--dry-run"],
        "export": ["export", str(jobs), "--to=slurm", *asks, f"--output={tmp_path}/scripts"],
    }
    for name, words in commands.items():
        command = [sys.executable, "-m", "gpuherd", words[0], "--mpi=pmx", *words[1:]]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert shown.returncode == ExitCode.USAGE, (name, shown)
        assert "--mpi pmx: there is no MPI type pmx in SLURM; did you mean pmix?" in shown.stderr, (name, shown)
        assert "none, pmi2, pmix" in shown.stderr
    assert not (tmp_path / "scripts").exists()
    assert slurm.command("squeue", "-h", "--states=all", "--name=odd-mpi").strip() == ""
    shown = gpuherd(*asks, "--mpi=pmi2", "--", "sh", "-c", "echo $PMI_RANK/$PMI_SIZE")
    assert sorted(shown.stdout.split()) == ["0/2", "1/2"], shown


def test_it_gives_up_when_the_gpus_are_not_there(slurm: Cluster, tmp_path: Path) -> None:
    holder = subprocess.Popen(["srun", "--gres=gpu:8", "-Alab", "sh", "-c", f"touch {tmp_path}/up; sleep 200"])
    try:
        wait_until((tmp_path / "up").exists)
        assert gpuherd("--no-wait", "--account=lab", "--", "true").returncode == ExitCode.BUSY
        assert gpuherd("--wait=2s", "--account=lab", "--", "true").returncode == ExitCode.BUSY
    finally:
        holder.terminate()
        holder.wait()


def test_ctrl_c_is_the_commands(slurm: Cluster, tmp_path: Path) -> None:
    script = f"trap 'exit 42' INT; touch {tmp_path}/up; while true; do sleep 0.1; done"
    with subprocess.Popen([*RUN, "--account=lab", "--", "sh", "-c", script], stderr=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "up").exists)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 42


SEVERAL = (
    "sleep 0.$SLURM_NODEID; echo $(hostname) $MASTER_ADDR $MASTER_PORT $PET_NNODES $PET_NODE_RANK [$RANK/$WORLD_SIZE]"
)


def test_several_nodes_meet_and_end_together(own_cluster: Callable[[Plan], Cluster]) -> None:
    own_cluster(Plan(nodes=2, apart=True, gpus=2, accounting=False))
    # The first step over two nodes of a new test cluster loses its output and ends with 0, also of a plain srun.
    assert gpuherd("--nodes=2", "--", "true").returncode == 0
    shown = gpuherd("--nodes=2", "--num-gpus=2", "--", "sh", "-c", SEVERAL)
    told = sorted(line.split() for line in shown.stdout.splitlines())
    port = told[0][2]
    assert told == [["n1", "n1", port, "2", "0", "[/]"], ["n2", "n1", port, "2", "1", "[/]"]], shown
    began = time.monotonic()
    failed = gpuherd("--nodes=2", "--", "sh", "-c", "test $NODE_RANK = 0 || exit 9; sleep 100")
    assert failed.returncode != 0 and time.monotonic() - began < 60, failed
    assert "Exited with exit code 9" in failed.stderr


def test_srun_starts_several_processes_on_each_node(slurm: Cluster, tmp_path: Path) -> None:
    asks = ("--ntasks-per-node=3", "--cpus=6", "--num-gpus=2", "--account=lab")
    shown = gpuherd(*asks, "--", "sh", "-c", "echo $RANK/$WORLD_SIZE $LOCAL_RANK $NNODES $SLURM_CPUS_PER_TASK")
    assert sorted(shown.stdout.splitlines()) == [f"{rank}/3 {rank} 1 2" for rank in range(3)], shown
    jobs = tmp_path / "jobs.txt"
    jobs.write_text("sh -c 'echo $RANK/$WORLD_SIZE $SLURM_CPUS_PER_TASK; test $RANK != 1 || exit 9; sleep 100'\n")
    batch = [sys.executable, "-m", "gpuherd", "batch", str(jobs), "--engine=slurm", "--account=lab", "--retries=0"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        words = ("--ntasks-per-node=2", "--cpus-per-job=4", f"--output-dir={folder}/out")
        done = subprocess.run([*batch, *words], capture_output=True, text=True, timeout=120, check=False)
        log = next(Path(folder, "out", "logs").glob("*.log")).read_text()
    assert "exit code 9" in done.stdout + done.stderr and {"0/2 2", "1/2 2"} <= set(log.splitlines()), (done, log)


def test_inside_an_allocation_the_command_is_a_step_of_it(slurm: Cluster, tmp_path: Path) -> None:
    def salloc(*words: str) -> subprocess.CompletedProcess[str]:
        asks = ("--account=lab", "--gres=gpu:2", "--ntasks=1", "--cpus-per-task=4", "--mem=1000")
        return subprocess.run(["salloc", *asks, *words], capture_output=True, text=True, timeout=120, check=False)

    ours = " ".join(RUN)
    tells = "sh -c 'echo $SLURM_JOB_ID.$SLURM_STEP_ID [$CUDA_VISIBLE_DEVICES] $SLURM_CPUS_PER_TASK'"
    script = f"""\
echo $SLURM_JOB_ID
{ours} --num-gpus=1 -- {tells}
for each in a b; do
    {ours} -- sh -c 'touch {tmp_path}/'$each'; until [ -e {tmp_path}/a ] && [ -e {tmp_path}/b ]; do sleep 0.1; done' &
done
wait
{ours} --num-gpus=3 --in-allocation -- true || echo $?
{ours} --num-gpus=3 --dry-run -- true
srun --gres=gpu:2 {ours} --num-gpus=2 -- {tells}
"""
    shown = salloc("bash", "-c", script)
    number, step, never, dry, nested = shown.stdout.splitlines()
    # Half of its GPUs and of its cores; two such steps run side by side.
    assert step.startswith(f"{number}.0 [") and step.endswith("] 2") and "," not in step, shown
    assert never == "2" and "n1 gives it 2 GPUs, 4 CPUs and 1000 MB" in shown.stderr
    assert dry.startswith("would ask slurm for 3 GPUs") and "asking for a job of its own" in shown.stderr
    assert nested.startswith(f"{number}.") and nested.count(",") == 1
    outside = gpuherd("--in-allocation", "--", "true")
    assert outside.returncode == ExitCode.USAGE and "salloc starts one" in outside.stderr


@pytest.mark.parametrize("how", ["srun", "srun --in-allocation", "salloc --in-allocation"])
def test_a_batch_runs_inside_of_an_allocation(slurm: Cluster, tmp_path: Path, how: str) -> None:
    jobs = tmp_path / "jobs.txt"
    jobs.write_text("#gpuherd gpus=0\nsh -c 'echo in $SLURM_JOB_ID on $SLURMD_NODENAME'\n")
    batch = f"{sys.executable} -m gpuherd batch {jobs} --engine=slurm --account=lab"
    starter, *insists = how.split()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        # Of all GPUs that there are: jobs of its own would wait for ever. The shell of salloc runs on no node.
        line = f"echo $SLURM_JOB_ID; {batch} --output-dir={folder}/out {' '.join(insists)}"
        words = [starter, "--account=lab", "--gres=gpu:8", "sh", "-c", line]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done
        log = next(Path(folder, "out", "logs").glob("*.1.log")).read_text()
    assert "gpuherd: the jobs run in SLURM job" in done.stderr, done
    assert log.split() == ["in", done.stdout.split()[0], "on", "n1"], (done, log)


def test_what_does_not_fit_into_an_allocation_is_submitted(slurm: Cluster, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.txt"
    jobs.write_text("#gpuherd gpus=1\nsh -c 'echo in $SLURM_JOB_ID'\n")
    batch = f"{sys.executable} -m gpuherd batch {jobs} --engine=slurm --account=lab"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for starter in ("srun", "salloc"):
            words = [starter, "--account=lab", "--ntasks=1", "sh", "-c", f"{batch} --output-dir={folder}/{starter}"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done
            assert "new jobs are submitted, and wait in SLURM's queue: " in done.stderr, done
            reason = "n1 gives it 0 GPUs" if starter == "srun" else "this does not run on n1"
            assert reason in done.stderr, done
