"""The processes of one training: what they see, how they are asked to stop, and the exit code of all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpus.machines import gpu

from gpuherd.errors import ExitCode
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.runs.launch import MODULE, StopRequest, command, environment


def test_processes_see_their_gpus_alone() -> None:
    gpus = [gpu(0), gpu(1)]
    found = environment({"PATH": "/bin", "OMP_NUM_THREADS": "3"}, gpus, 77, 2)
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1" and found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (found["GPUHERD_TRAIN_STARTER"], found["OMP_NUM_THREADS"], found["PATH"]) == ("77", "3", "/bin")
    assert "CUDA_VISIBLE_DEVICES" not in environment({}, None, 77, 2)


ASKED_TWICE = """
import signal, sys
from pathlib import Path
from gpuherd.posttrain.runs.launch import StopRequest
stop = Path(sys.argv[1])
with StopRequest().listen(stop):
    stop.touch()
    signal.raise_signal(signal.SIGTERM)
    print("still here")
"""


def test_a_second_request_ends_it_at_once(tmp_path: Path) -> None:
    """The first one to gpuherd train is a file; torchrun and its processes hear of the second one alone."""
    asked = StopRequest()
    with pytest.raises(Stopped) as stopped, asked.listen(tmp_path / "stop"):
        signal.raise_signal(signal.SIGTERM)
        assert asked.stopping()
        raise Stopped.after(1, 2)
    assert stopped.value.exit_code == ExitCode.TERMINATED and Stopped.exit_code == ExitCode.INTERRUPTED
    done = subprocess.run([sys.executable, "-c", ASKED_TWICE, str(tmp_path / "stop")], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGTERM and done.stdout == b""


def test_in_a_job_one_request_may_come_often(tmp_path: Path) -> None:
    """From the job's leader, from torchrun and from SLURM: it ends behind its checkpoint all the same."""
    in_a_job = {**os.environ, "GPUHERD_ATTEMPT": "queue/1"}
    words = [sys.executable, "-c", ASKED_TWICE, str(tmp_path / "stop")]
    done = subprocess.run(words, capture_output=True, timeout=60, env=in_a_job)
    assert done.returncode == 0 and done.stdout == b"still here\n"


ENDS = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == "2" and os.environ["OMP_NUM_THREADS"] == "1"
how = sys.argv[1 + rank]
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "waits":
    time.sleep(60)
if how == "71":
    with open("new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("new", "fails")
if how == "1":  # as one that loses the other does
    while not os.path.exists("fails"):
        time.sleep(0.01)
    with open("fails") as file:
        other = f"/proc/{file.read()}/stat"
    while os.path.exists(other):
        with open(other) as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                break
        time.sleep(0.01)
print(f"error: {rank} ends by {how}", file=sys.stderr, flush=True)
sys.exit(int(how))
"""


@pytest.mark.parametrize(
    ("ends", "code"),
    [(("0", "0"), 0), (("waits", "65"), 65), (("71", "1"), 71), (("1", "71"), 71), (("killed", "waits"), 137)],
)
def test_the_exit_code_is_that_of_the_process_that_failed(tmp_path: Path, ends: tuple[str, str], code: int) -> None:
    """torchrun's own is 1 for all of these, and its report would be the last line of the log."""
    (tmp_path / "ends.py").write_text(ENDS)
    words = command("ends", ends, 2)
    without = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=without)
    assert done.returncode == code, done.stderr
    if code == 65:
        assert done.stderr.splitlines()[-1] == "error: 1 ends by 65"


def test_one_process_needs_no_torchrun() -> None:
    assert command("module", ["--word"], 1, None) == [sys.executable, "-m", "module", "--word"]
    assert command("module", ["--word"], 3) == [
        *(sys.executable, "-m", MODULE, "--nproc-per-node=3", "--standalone", "-m", "module", "--word")
    ]
