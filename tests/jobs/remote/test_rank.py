"""Attempts on several nodes: SLURM's srun and Ray's other nodes are played by processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.jobs.remote.orders import end, order, shell, written
from tests.patience import wait_until

from gpuherd.engines.process_tree import tagged
from gpuherd.engines.slurm.node import NODE
from gpuherd.engines.world import NodeFailure, Stop, World, port_of
from gpuherd.jobs.remote.agent import join, lead
from gpuherd.jobs.remote.protocol import INTERRUPTED

# What srun does that matters here: a process on each node with its variables, all ended when one fails, and the highest
# exit code of all. It takes the same words, and refuses what it does not know.
_SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
words = sys.argv[1:]
known = [words.pop(0) for word in sys.argv[1:] if word.startswith("--") and words and words[0] == word]
nodes = int(known[0].partition("=")[2])
assert known == [f"--nodes={{nodes}}", f"--ntasks={{nodes}}", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
                 "--input=none", "--export=ALL", "--cpus-per-task=3"], known
def start(rank):
    more = {{"SLURM_NODEID": str(rank), "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NODELIST": f"none[1-{{nodes}}]",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURMD_NODENAME": f"none{{rank + 1}}"}}
    return subprocess.Popen(words, env={{**os.environ, **more}}, process_group=0)
tasks = [start(rank) for rank in range(nodes)]
with open(os.environ["TASKS"], "w") as told:
    print(*[task.pid for task in tasks], file=told)
def hand_on(number, _frame=None):
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)
signal.signal(signal.SIGTERM, hand_on)
told = False
while any(task.poll() is None for task in tasks):
    if not told and any(task.poll() not in (None, 0) for task in tasks):
        told = True
        hand_on(signal.SIGTERM)
    time.sleep(0.01)
sys.exit(max(task.returncode for task in tasks))
"""


# What scancel does for us: a signal to all that srun has started, and none to srun.
_SCANCEL = f"""#!{sys.executable}
import os, signal, sys
assert sys.argv[1:] == ["--signal=TERM", "77"], sys.argv
with open(os.environ["TASKS"]) as told:
    for pid in told.read().split():
        os.killpg(int(pid), signal.SIGTERM)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun and scancel are there, and we are in a SLURM job."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", _SRUN), ("scancel", _SCANCEL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TASKS", str(tmp_path / "tasks"))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")


def test_words_of_srun() -> None:
    assert NODE.start_ranks(2, 1, None, {}) == [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--export=ALL",
    ]
    several = NODE.start_ranks(3, 4, "pmix", {"SLURM_CPUS_PER_TASK": "2"})
    assert several[1:4] == ["--nodes=3", "--ntasks=12", "--ntasks-per-node=4"]
    assert several[7:9] == ["--mpi=pmix", "--cpus-per-task=2"]


@pytest.mark.usefixtures("slurm")
def test_nodes_of_slurm(tmp_path: Path) -> None:
    """Each learns its place, and the words are those of the job; only the first tells of progress."""
    script = (
        'echo "$NODE_RANK $NNODES $MASTER_ADDR $MASTER_PORT $PET_NODE_RANK ${GPUHERD_PROGRESS:+tells}" '
        f'"$GPUHERD_ATTEMPT" "$@" >{tmp_path}/$NODE_RANK.said'
    )
    job = order(tmp_path, ("/bin/sh", "-c", script, "sh", "a b", "--nodes=9"), nodes=2)
    assert lead(written(tmp_path, job, engine="slurm"), 0) == 0
    assert end(job).well
    first, second = [(tmp_path / f"{rank}.said").read_text() for rank in (0, 1)]
    port = first.split()[3]
    assert port_of(job.tag) <= int(port) < port_of(job.tag) + 100
    assert first == f"0 2 127.0.0.1 {port} 0 tells {job.tag} a b --nodes=9\n"
    assert second == f"1 2 127.0.0.1 {port} 1  {job.tag} a b --nodes=9\n"


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("fails", "code", "number"), [("exit 3", 3, None), ("kill -9 $$", None, 9), ("exec no-such-program", 127, None)]
)
def test_first_failure_counts(tmp_path: Path, fails: str, code: int | None, number: int | None) -> None:
    """The second node fails, and the first is ended for it: what is told is how the second failed."""
    ready = tmp_path / "ready"
    script = (
        f"test $NODE_RANK = 0 && {{ touch {ready}; exec sleep 1000; }}; until [ -e {ready} ]; do sleep 0.02; done; "
    )
    job = shell(tmp_path, script + fails, nodes=2)
    assert lead(written(tmp_path, job, engine="slurm"), 0) == 1
    told = end(job)
    assert (told.code, told.signal, told.interrupted, told.started) == (code, number, False, True)
    assert told.problem is not None and told.problem.startswith("node 1 (none2): ")
    assert "gpuherd: node 1 (none2): " in Path(job.log).read_text()
    assert not job.first_failure.exists()


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("answers", [True, False])
def test_make_room_on_all(tmp_path: Path, answers: bool) -> None:
    """Every node's part hears of it; also when SLURM's controller does not answer: then srun is told, as it must be."""
    if not answers:
        (tmp_path / "bin" / "scancel").write_text("#!/bin/sh\nexit 1\n")
    script = f"trap 'echo >{tmp_path}/$NODE_RANK.saved; exit 0' TERM; echo >{tmp_path}/$NODE_RANK.ready; "
    job = shell(tmp_path, script + "while :; do sleep 0.02; done", nodes=2, grace_s=60.0)
    codes = []
    with Stop() as stop:
        manifest = written(tmp_path, job, engine="slurm")
        leader = threading.Thread(target=lambda: codes.append(lead(manifest, 0, stop)))
        leader.start()
        wait_until(lambda: all((tmp_path / f"{rank}.ready").exists() for rank in (0, 1)))
        stop.ask()
        leader.join()
    assert codes == [0] and end(job).interrupted and end(job).well
    assert all((tmp_path / f"{rank}.saved").exists() for rank in (0, 1))


# --- where the engine starts the nodes one by one -------------------------------------------------------------


@dataclass
class Nodes:
    """The other nodes, as threads; ``lost`` are those of which nobody hears any more."""

    manifest: str
    nodes: int = 2
    lost: bool = False
    address: str = "127.0.0.1"
    names: tuple[str, ...] = ("here", "n2")
    told: list[NodeFailure | None] = field(default_factory=list)
    ended: int = 0
    _stops: list[Stop] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, port: int) -> None:
        for rank in range(1, self.nodes):
            stop, world = Stop(), World(rank, self.nodes, self.address, port)
            self._stops.append(stop)
            self._threads.append(threading.Thread(target=self._run, args=(world, stop)))
            self._threads[-1].start()

    def _run(self, world: World, stop: Stop) -> None:
        self.told.append(join(self.manifest, 0, world, stop))

    def over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def failure(self) -> NodeFailure | None:
        if self.lost:
            return NodeFailure(1, "n2")
        return next((each for each in self.told if each is not None), None)

    def end(self) -> None:
        self.ended += 1
        for stop in self._stops:
            stop.ask()

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        for stop in self._stops:
            stop.close()


def test_nodes_that_join(tmp_path: Path) -> None:
    job = shell(tmp_path, "echo $NODE_RANK of $NNODES at $MASTER_ADDR; test $NODE_RANK = 0 || sleep 0.2", nodes=3)
    manifest = written(tmp_path, job)
    others = Nodes(manifest, 3)
    assert lead(manifest, 0, others=others) == 0
    others.close()
    assert others.told == [None, None] and end(job).well
    logs = [Path(job.log), *(Path(job.on_node(rank).log) for rank in (1, 2))]
    assert [log.read_text() for log in logs] == [f"{rank} of 3 at 127.0.0.1\n" for rank in range(3)]


def test_node_that_fails(tmp_path: Path) -> None:
    """Its failure is that of the attempt, and its last words come into the log that people read."""
    job = shell(tmp_path, "test $NODE_RANK = 0 && exec sleep 1000; echo 'ValueError: nan' >&2; exit 3", nodes=2)
    manifest = written(tmp_path, job)
    others = Nodes(manifest)
    assert lead(manifest, 0, others=others) == 1
    others.close()
    told = end(job)
    assert (told.code, told.interrupted) == (3, False)
    assert told.problem == f"node 1 ({os.uname().nodename}): exit code 3"
    assert Path(job.log).read_text().rstrip().endswith("ValueError: nan")


def test_first_node_that_fails(tmp_path: Path) -> None:
    """The others are ended for it, and their ends are none of their own."""
    job = shell(tmp_path, "test $NODE_RANK = 1 && exec sleep 1000; exit 4", nodes=2)
    manifest = written(tmp_path, job)
    others = Nodes(manifest)
    assert lead(manifest, 0, others=others) == 1
    others.close()
    assert (end(job).code, end(job).problem) == (4, None)
    assert not list(tagged(job.tag))


def test_node_that_is_lost(tmp_path: Path) -> None:
    """Nobody's fault: the attempt may run again."""
    job = shell(tmp_path, "exec sleep 1000", nodes=2)
    manifest = written(tmp_path, job)
    others = Nodes(manifest, lost=True)
    assert lead(manifest, 0, others=others) == INTERRUPTED
    others.close()
    assert end(job).interrupted and end(job).problem == "node 1 (n2): lost"


_TRAINING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), float(rank))).sum().backward()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    if rank == 0:
        gradient = model.module.weight.grad.tolist()
        print("total", total.item(), "gradient", gradient, dist.get_world_size(), flush=True)
    dist.barrier()

dist.init_process_group("gloo")
main()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    """DDP over gloo, two processes on each of two nodes, started by nothing but ``torchrun --nproc-per-node 2``."""
    program = tmp_path / "train.py"
    program.write_text(_TRAINING)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program))
    job = order(tmp_path, torchrun, nodes=2, env={"OMP_NUM_THREADS": "1"})
    code = lead(written(tmp_path, job, engine="slurm"), 0)
    log = Path(job.log).read_text()
    assert code == 0, log
    # 1 + 2 + 3 + 4 over all four; the gradient is the mean of the inputs 0, 1, 2, 3.
    assert "total 10.0 gradient [[1.5, 1.5, 1.5, 1.5]] 4" in log


def test_wrong_use(tmp_path: Path) -> None:
    rank = [sys.executable, "-m", "gpuherd.jobs.remote.agent", "rank", "slurm"]
    done = subprocess.run([*rank, "1", "f"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage" in done.stderr
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run([*rank, "1", str(tmp_path / "f"), "--", "true"], capture_output=True, text=True, env=outside)
    assert done.returncode == 2 and "srun has not started this" in done.stderr
