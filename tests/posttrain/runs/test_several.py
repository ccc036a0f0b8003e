"""Trainings on several GPUs: what they ask for, what is refused, and that they learn the same as on one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.posttrain.runs.conftest import MakeSettings
from tests.posttrain.runs.test_experiment import llama_3b
from tests.posttrain.runs.test_work import begun, work

from gpuherd.engines.process_tree import identify
from gpuherd.errors import ExitCode, JobCannotFit, UsageError
from gpuherd.posttrain.engine.curves import FILE, read_curves
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.runs.experiment import RoundsExperiment
from gpuherd.posttrain.runs.folder import RoundsDirectory, begin, resumed
from gpuherd.posttrain.runs.options import RoundsOptions
from gpuherd.posttrain.runs.plan import Phase, PlannedStep
from gpuherd.posttrain.runs.settings import Settings, settings_of
from gpuherd.posttrain.runs.work import Work, do, step_named
from gpuherd.posttrain.runs.worker import MODULE
from gpuherd.runs.records import jsonable
from gpuherd.standin.machine import SimulatedMachine


def training(settings: Settings) -> PlannedStep:
    """The first training of an experiment's plan."""
    experiment = RoundsExperiment(settings, RoundsOptions(dry_run=True), console=Console(quiet=True), simulate=True)
    experiment.run()
    return next(each for each in experiment.plan if each.step.phase is Phase.TRAIN)


def test_a_training_asks_for_its_gpus_and_less_on_each_where_weights_are_divided(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("8x80GB")
    large = llama_3b(tmp_path / "large", make_settings().models["tiny"].reference)

    def asked(gpus: int = 1, system: str = "ddp", algorithm: str = "GRPO", **options: Any) -> PlannedStep:
        return training(
            make_settings(
                models={"large": {"reference": large, "value": large}},
                system={"dtype": "bf16", "strategy": system},
                algos={algorithm: {"gpus": gpus, **options}},
            )
        )

    one, ddp, fsdp = asked(), asked(2), asked(2, "fsdp")
    assert (one.asked.gpus, ddp.asked.gpus, fsdp.asked.gpus) == (1, 2, 2)
    # DDP adds buckets at most; FSDP divides gradients and states, and gathers weights to answer.
    assert one.asked.memory_mb <= ddp.asked.memory_mb < 1.1 * one.asked.memory_mb
    assert fsdp.asked.memory_mb < 0.9 * one.asked.memory_mb
    assert "by fsdp on 2 GPUs" in fsdp.asked.sentence and fsdp.asked.sentence.endswith("on each")
    assert asked(4, "fsdp").asked.memory_mb < fsdp.asked.memory_mb
    assert asked(2, "ddp", strategy="fsdp") == fsdp
    assert asked(2, "fsdp", "QSharp").asked.memory_mb < 0.8 * asked(1, "fsdp", "QSharp").asked.memory_mb


def test_more_gpus_than_there_are(make_settings: MakeSettings, standin: Callable[..., SimulatedMachine]) -> None:
    standin("2x40GB")
    assert training(make_settings(algos={"GRPO": {"gpus": 2}})).asked.gpus == 2
    with pytest.raises(JobCannotFit, match=r"GRPO_sums_tiny_r0_train: it trains on 4 GPUs together, and there are 2"):
        training(make_settings(algos={"GRPO": {"gpus": 4}}))


def test_on_a_machine_without_gpus_its_processes_are_on_the_cpu(make_settings: MakeSettings) -> None:
    assert training(make_settings(algos={"GRPO": {"gpus": 2}})).asked.gpus == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algos": {"GRPO": {"gpus": 0}}}, r"algos\.GRPO\.gpus=0; the least is 1"),
        (
            {"algos": {"GRPO": {"gpus": 1, "strategy": "fsdp"}}},
            r"algos\.GRPO\.strategy=fsdp: on 1 GPU nothing is shared",
        ),
        ({"algos": {"GRPO": {"gpus": 2, "strategy": "single"}}}, r"algos\.GRPO\.strategy=single"),
        ({"algos": {"GRPO": {"gpus": 3, "batch_size": 4}}}, r"algos\.GRPO\.gpus=3: a step has \d+ sequences"),
        ({"system": {"strategy": "single"}, "algos": {"GRPO": {}}}, r"system\.strategy=single"),
        (
            {"training": {"dynamic_batch_size": True}, "algos": {"GRPO": {"gpus": 2, "strategy": "fsdp"}}},
            r"algos\.GRPO\.gpus=2: dynamic_batch_size with strategy fsdp",
        ),
    ],
)
def test_what_can_not_be_shared_is_refused(make_settings: MakeSettings, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(jsonable(make_settings(**changed)))


def test_runs_that_were_begun_before_there_was_the_key_keep_their_identity(make_settings: MakeSettings) -> None:
    values = jsonable(make_settings())
    del values["system"]["strategy"]
    assert settings_of(values).identity() == make_settings().identity()
    divided = make_settings(system={"dtype": "fp32", "strategy": "fsdp"})
    assert divided.identity() != make_settings().identity()


# ---- real processes --------------------------------------------------------------------------------------------------

ALGORITHMS: dict[str, dict[str, Any]] = {
    "GRPO": {"batch_size": 4, "lr": 1e-3, "epochs": 2, "kl_coef": 0.1},
    "QSharp": {"batch_size": 8, "lr": 1e-2, "epochs": 3, "samples_per_example": 2},
    "SFT": {"batch_size": 4, "lr": 1e-3, "epochs": 2},
}


@pytest.fixture
def models(adder: Path, classifier_base: Path) -> dict[str, Any]:
    """A model that answers half of the sums right, so that there is something to learn."""
    return {"tiny": {"reference": str(adder), "value": str(classifier_base)}}


def words(folder: RoundsDirectory, job: str) -> list[str]:
    return [sys.executable, "-m", MODULE, "--folder", str(folder.root), "--job", job, "--simulate"]


def done(folder: RoundsDirectory, algorithm: str, settings: Settings) -> None:
    """Does what comes before a training, and the training."""
    for choice in settings.choices():
        for shard in range(2 if choice.collects else 0):
            ended(folder, f"{algorithm}_sums_tiny_r0_collect_{shard}")
    ended(folder, f"{algorithm}_sums_tiny_r0_train")


def ended(folder: RoundsDirectory, job: str) -> str:
    """Runs a job; what it printed."""
    run = subprocess.run(words(folder, job), capture_output=True, text=True, timeout=900)
    assert run.returncode == ExitCode.OK, run.stdout + run.stderr
    return run.stdout


def weights(folder: RoundsDirectory, algorithm: str) -> dict[str, Any]:
    from safetensors.numpy import load_file

    found: dict[str, Any] = {}
    for path in sorted(folder.model(algorithm, "sums", "tiny", 0).rglob("*.safetensors")):
        found |= {f"{path.name} {name}": values for name, values in load_file(path).items()}
    assert found
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("algorithm", "strategy"), [("GRPO", "ddp"), ("GRPO", "fsdp"), ("QSharp", "ddp"), ("SFT", "ddp")]
)
def test_two_processes_learn_what_one_does(
    make_settings: MakeSettings, models: dict[str, Any], adder: Path, tmp_path: Path, algorithm: str, strategy: str
) -> None:
    """But for the order of additions; and so the table of results is the same."""
    import numpy as np
    from safetensors.numpy import load_file

    found, tables = [], []
    for gpus in (1, 2):
        shared = {"gpus": 2, "strategy": strategy} if gpus == 2 else {}
        settings = make_settings(
            models=models,
            algos={algorithm: {**ALGORITHMS[algorithm], **shared}},
            rounds_of_training=1,
            evaluation={"num_samples": 4, "etas": [1] if algorithm == "QSharp" else [], "resamples": 100},
        )
        folder, _ = begun(settings, tmp_path / str(gpus))
        done(folder, algorithm, settings)
        ended(folder, f"{algorithm}_sums_tiny_r0_evaluate")
        found.append(weights(folder, algorithm))
        result = json.loads((folder.result(algorithm, "tiny", "sums", 0, "sums") / "result.json").read_bytes())
        points = [point["metrics"] for point in result["points"]]
        tables.append([{name: value for name, value in each.items() if name != "kl"} for each in points])
        usage = json.loads(folder.usage_of(f"{algorithm}_sums_tiny_r0_train").read_bytes())
        assert usage["peak_allocated"] is None and "visible" in usage
    one, two = found
    assert one.keys() == two.keys()
    if algorithm != "QSharp":
        before = {name: values for path in adder.glob("*.safetensors") for name, values in load_file(path).items()}
        moved = [float(np.abs(values - before[name.split()[1]]).max()) for name, values in one.items()]
        assert max(moved) > 1e-3
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=2e-5, err_msg=name)
    assert tables[0] == tables[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("number", "save_every"), [(signal.SIGKILL, 2), (signal.SIGTERM, 10_000)])
def test_killed_and_resumed_it_is_the_same_to_the_bit(
    make_settings: MakeSettings, models: dict[str, Any], tmp_path: Path, number: signal.Signals, save_every: int
) -> None:
    """The launcher is killed: its processes end with it, and the next attempt resumes from their checkpoint. Asked to
    stop, they end behind a checkpoint of their own."""
    job = "GRPO_sums_tiny_r0_train"
    settings = make_settings(
        models=models,
        algos={"GRPO": {**ALGORITHMS["GRPO"], "epochs": 12, "save_every": save_every, "gpus": 2}},
        rounds_of_training=1,
    )
    quiet, _ = begun(settings, tmp_path / "quiet")
    assert "Processes: 2" in ended(quiet, job)
    killed, _ = begun(settings, tmp_path / "killed")
    model = killed.model("GRPO", "sums", "tiny", 0)
    begins = model / (FILE if number == signal.SIGTERM else "checkpoints")
    process = subprocess.Popen(words(killed, job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    try:
        while not (begins.is_dir() and any(begins.iterdir())) and not (begins.is_file() and begins.stat().st_size):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        ranks = [identify(pid) for pid in children(process.pid)]
        process.send_signal(number)
        code = process.wait(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert len(ranks) == 2
    assert not killed.policy(model).exists(), "killed too late: give it more epochs"
    if number == signal.SIGTERM:
        assert code == ExitCode.TERMINATED and any((model / "checkpoints").iterdir())
        steps = [line["step"] for line in read_curves(model)]
    while any(each is not None and each.is_alive() for each in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ended(killed, job)
    if number == signal.SIGTERM:  # the first line behind it is of the step behind its last
        lines = read_curves(model)
        assert 0 < len(steps) < len(lines) and [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    one, two = weights(quiet, "GRPO"), weights(killed, "GRPO")
    assert [name for name in one if one[name].tobytes() != two[name].tobytes()] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_process_has_begun_and_two_finish(
    make_settings: MakeSettings, models: dict[str, Any], tmp_path: Path, algorithm: str
) -> None:
    """``--resume`` with other GPUs in the middle of a training: the same but for the order of additions."""
    import numpy as np

    settings = make_settings(models=models, algos={algorithm: ALGORITHMS[algorithm]}, rounds_of_training=1)
    job = f"{algorithm}_sums_tiny_r0_train"
    straight, record = begun(settings, tmp_path / "straight")
    folder, _ = begun(settings, tmp_path / "run")
    for each in (straight, folder):
        for step in record.steps():
            if step.phase is Phase.COLLECT:
                do(Work(each, record, step, "cpu"))
    do(work(straight, record, job))
    asked: list[bool] = []

    def stopping() -> bool:  # behind the second step
        asked.append(len(asked) == 1)
        return asked[-1]

    with pytest.raises(Stopped):
        do(Work(folder, record, step_named(record, job), "cpu", stopping))
    changed = resumed(folder, {f"algos.{algorithm}.gpus": 2})
    begin(folder, changed, anew=True)
    assert "Processes: 2" in ended(folder, job)
    one, two = weights(straight, algorithm), weights(folder, algorithm)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=2e-5, err_msg=name)
    curves = [read_curves(each.model(algorithm, "sums", "tiny", 0)) for each in (straight, folder)]
    assert len(curves[0]) > 2 and [each["step"] for each in curves[0]] == [each["step"] for each in curves[1]]


def children(pid: int) -> list[int]:
    """Processes whose parent this is, as /proc has them."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            found += [int(each.name)] if parent == pid else []
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failure_of_one_process_is_the_job_s(make_settings: MakeSettings, tmp_path: Path) -> None:
    """By its own exit code, and with its reason as the last line of the log."""
    folder, _ = begun(make_settings(algos={"SFT": {**ALGORITHMS["SFT"], "gpus": 2}}), tmp_path / "run")
    run = subprocess.run(words(folder, "SFT_sums_tiny_r0_train"), capture_output=True, text=True, timeout=500)
    assert run.returncode == ExitCode.BAD_INPUT, run.stderr  # nothing was collected
    assert "can't be read" in run.stderr.splitlines()[-1]
