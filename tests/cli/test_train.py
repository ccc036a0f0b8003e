"""``gpuherd train`` as users meet it: plans, refusals, processes on simulated GPUs, kills and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain import tiny
from tests.qa.conftest import made_once

from gpuherd.cli.main import run as in_process
from gpuherd.errors import ExitCode, JobCannotFit, MissingModel, UsageError
from gpuherd.jobs.job import Job
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptRecord, Handed, QueuedJob, StartRecord
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.learning.prepare import begin
from gpuherd.posttrain.learning.run import placed
from gpuherd.posttrain.learning.settings import read_settings
from gpuherd.posttrain.runs.folder import TrainDirectory
from gpuherd.posttrain.runs.options import Where
from gpuherd.standin.machine import SimulatedMachine

SUMS = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(12)]
FAST = ("--check-interval=0.02", "--max-checks=1")
WAIT_S = 120.0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "tiny-policy", tiny.tiny_llama)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A simulated machine of four GPUs, which outlives the commands that are killed on it."""
    yield SimulatedMachine.create(tmp_path / "machine", "4x40GB", attribute=True).path


@pytest.fixture
def file(tmp_path: Path, model: Path) -> Path:
    """A configuration: GRPO on sums, thirty steps of some hundredths of a second."""
    config: dict[str, Any] = {
        "experiment_name": "sums",
        "training": {
            "algorithm": "grpo",
            "num_iterations": 30,
            "num_rollouts_per_iteration": 8,
            "batch_size": 8,
            "learning_rate": 1e-3,
            "save_every": 3,
        },
        "model": {"model_name_or_path": str(model), "max_new_tokens": 4, "torch_dtype": "float32"},
        "policy_env": {"env_type": "math", "problems": SUMS},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    return path


# --- what is said before anything starts ------------------------------------------------------------------------------


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        in_process(["train", "--help"])
    said = capsys.readouterr().out
    assert "gpuherd train --config config.yaml --gpu-ids 0 2 3" in said and "--master-port" in said


def test_a_dry_run_tells_and_starts_nothing(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--config", str(file), "training.batch_size=4", "--device", "cpu", "--num-gpus", "2"]
    assert in_process([*words, "--dry-run", "--json"]) == ExitCode.OK
    said = capsys.readouterr()
    plan = json.loads(said.out)["plan"]
    assert (plan["processes"], plan["device"], plan["algorithm"]) == (2, "cpu", "grpo")
    assert plan["folder"] == str(tmp_path / "outputs" / "sums") and "--nproc-per-node=2" in plan["argv"]
    assert "nothing was started" in said.err and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device=cpu", "training.lerning_rate=1"], r"did you mean training\.learning_rate"),
        (["--device=cpu", "--num-gpus=3"], "batch_size=8 is no multiple of the 3 processes"),
        (["--device=cpu", "distributed.strategy=deepspeed"], "DeepSpeed is not used"),
        (["--num-gpus=2", "--gpu-ids", "1"], "--gpu-ids names 1"),
        (["--device=cpu", "seed"], "is no setting"),
        (["--device=cpu", "grpo.group_size=0"], r"grpo\.group_size=0; the least is 1"),
        (["--device=cpu", "training.seed=1e30"], r"training\.seed=10+.*; the least is 0, and the most 1e\+15"),
        (["--device=cpu", "training.num_rollouts_per_iteration=64"], "asks for 16 problems a step, and there are"),
        (["--nnodes=2", "--num-gpus=2"], "master_port is missing.*--engine slurm or --engine ray.*, starts them all"),
        (["--engine=slurm", "--nnodes=2", "--node-rank=0"], "--node-rank is for machines that you start yourself"),
        (["--engine=slurm", "--gpu-ids", "1"], "--gpu-ids is for machines that you start yourself"),
        (["--engine=slurm", "--no-wait"], "--no-wait is for GPUs of this machine"),
        (["--engine=slurm", "--num-gpus=3", "--device=cpu"], "batch_size=8 is no multiple of the 3 processes"),
        (["--engine=slurm", "--ray-address=a:1"], "--ray-address is for --engine ray, and this is slurm"),
        (["--partition=gpu"], "--partition is for --engine slurm, and this is local"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, file: Path, words: list[str], told: str) -> None:
    output = tmp_path / "out"
    with pytest.raises(UsageError, match=told):
        in_process(["train", "--config", str(file), "--output", str(output), *words])
    assert not output.exists()


def test_a_model_that_is_not_there_begins_no_folder(tmp_path: Path, file: Path) -> None:
    words = ["train", "--config", str(file), "--output", str(tmp_path / "out"), "--device=cpu"]
    for more in ([], ["--dry-run"]):
        with pytest.raises(MissingModel, match="there is no such folder"):
            in_process([*words, f"model.model_name_or_path={tmp_path}/no-model", *more])
    assert not (tmp_path / "out").exists()


def test_a_training_in_the_hands_of_a_cluster_is_left_there(tmp_path: Path, file: Path) -> None:
    """Started again without its engine, it is not trained twice."""
    output = tmp_path / "out"
    folder, run = TrainDirectory(output), RunDirectory(output)
    config = placed(read_settings(file), Where(device="cpu", num_gpus=2, nnodes=2), "slurm")
    begin(folder, config, resume=False)
    run.create()
    job = Job(name="train", argv=("true",), gpus=0, nodes=2)
    with Queue(run.queue) as queue:
        queue.submit([job])
        queued = QueuedJob(1, job, tries=0, attempts=0, not_before=0.0, avoid=frozenset(), ready_at=0.0)
        record = AttemptRecord(
            id=1,
            queued=queued,
            number=1,
            gpus=(),
            labels=(),
            process=None,
            log=str(run.attempt_log("train", 1)),
            started_at=1.0,
            started_mono=1.0,
            handed=Handed("slurm", f"gpuherd-{queue.tag}-1", 0, "77"),
        )
        queue.record_starts([StartRecord(record, 0.0, None)], queue.begin_run(1.0, 1.0))
    with pytest.raises(UsageError, match="in the hands of SLURM; go on with --engine slurm, or end them first"):
        in_process(["train", "--resume", "--output", str(output), "--nnodes=1", "--num-gpus=4", "--device=cpu"])


def test_settings_stand_before_gpu_ids(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        in_process(["train", "--config", str(file), "--gpu-ids", "0", "1", "training.seed=2"])
    assert "write settings before it" in capsys.readouterr().err


def test_there_is_something_to_train(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--config FILE is missing"):
        in_process(["train"])
    with pytest.raises(UsageError, match="can't be read"):
        in_process(["train", "--resume", "--output", str(tmp_path)])


# --- processes --------------------------------------------------------------------------------------------------------


def start(machine: Path, *words: str) -> subprocess.Popen[str]:
    """The command on the simulated machine."""
    whole = [sys.executable, "-m", "gpuherd", "--simulate", str(machine), "train", *words, *FAST]
    env = os.environ | {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def done(machine: Path, *words: str) -> tuple[int, str]:
    """Its exit code and all that it said."""
    process = start(machine, *words)
    said, _ = process.communicate(timeout=WAIT_S)
    return process.returncode, said


def processes_of(starter: int) -> list[int]:
    """The pids of the training's processes that this command has started."""
    tag = f"GPUHERD_TRAIN_STARTER={starter}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if tag in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def until_step(output: Path, step: int) -> None:
    """Waits until this step is in the curves."""
    end = time.monotonic() + WAIT_S
    while not any(line["step"] >= step for line in read_curves(output)):
        assert time.monotonic() < end, "no such step"
        time.sleep(0.02)


def gone(pids: list[int]) -> None:
    """Waits until none of these is at work."""
    end = time.monotonic() + WAIT_S
    while any(_at_work(pid) for pid in pids):
        assert time.monotonic() < end, "still there"
        time.sleep(0.05)


def _at_work(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def curves(output: Path) -> list[dict[str, Any]]:
    """All figures but times."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read_curves(output)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_stopped_it_goes_on_exactly(tmp_path: Path, file: Path, machine: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert done(machine, "--config", str(file), "--output", str(whole))[0] == ExitCode.OK
    words = ("--config", str(file), "--output", str(broken))

    # All of it at once, between two checkpoints.
    process = start(machine, *words)
    until_step(broken, 5)
    for pid in [process.pid, *processes_of(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    code, said = done(machine, *words)
    assert code == ExitCode.USAGE and "add --resume" in said

    # The command alone: its training notices, and ends behind a checkpoint.
    process = start(machine, "--resume", "--output", str(broken))
    until_step(broken, 9)
    pids = processes_of(process.pid)
    process.kill()
    process.communicate(timeout=WAIT_S)
    gone(pids)

    for number, wanted in ((signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)):
        process = start(machine, "--resume", "--output", str(broken))
        until_step(broken, len(read_curves(broken)) + 3)
        process.send_signal(number)
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == wanted and "--resume --output" in said

    assert done(machine, "--resume", "--output", str(broken))[0] == ExitCode.OK
    assert curves(broken) == curves(whole)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, broken)]
    assert weights[0] == weights[1]
    assert done(machine, "--resume", "--output", str(broken))[1].count("nothing is left to do") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_train_as_one_does(tmp_path: Path, file: Path, machine: Path, strategy: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    short = ("training.num_iterations=6", "model.use_flash_attention=true")  # it is not there on a CPU: one warning
    assert done(machine, "--config", str(file), "--output", str(one), *short)[0] == ExitCode.OK
    words = (*short, f"distributed.strategy={strategy}", "--gpu-ids", "1", "3")
    code, said = done(machine, "--config", str(file), "--output", str(two), *words)
    assert code == ExitCode.OK, said
    assert "on GPU 1, 3" in said and said.count("flash_attention_2 can't be had") == 1
    summary = json.loads((two / "done.json").read_text())
    assert (summary["processes"], summary["strategy"]) == (2, strategy)
    for mine, other in zip(curves(one), curves(two), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4) and mine["reward"] == other["reward"]
    from safetensors.torch import load_file

    weights = [load_file(folder / "model" / "model.safetensors") for folder in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert weight.allclose(weights[1][name], atol=1e-4), name
    architecture = json.loads((two / "model" / "config.json").read_text())["architectures"]
    assert architecture == ["LlamaForCausalLM"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_does_not_fit_is_refused_before_it_starts(tmp_path: Path, file: Path) -> None:
    large = ("training.batch_size=8192", "training.num_rollouts_per_iteration=8192", "grpo.group_size=1024")
    small = SimulatedMachine.create(tmp_path / "small", "1x1GB", attribute=True).path
    code, said = done(small, "--config", str(file), "--output", str(tmp_path / "out"), *large)
    assert code == JobCannotFit.exit_code and ("what would fit" in said or "choose a smaller model" in said)
    assert not (tmp_path / "out").exists()
    code, said = done(small, "--config", str(file), "--output", str(tmp_path / "out"), "--num-gpus", "2")
    assert code == ExitCode.USAGE and not (tmp_path / "out").exists()
