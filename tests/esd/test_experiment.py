"""ESDExperiment from Python: hooks, resume, and what a kill at any moment leaves behind."""

from __future__ import annotations

import csv
import io
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gpuherd.engines.process_tree import tagged
from gpuherd.errors import ExitCode, MissingModel, QueueBusy
from gpuherd.esd import ESDExperiment, ExperimentConfig
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_list import ModelRow
from gpuherd.esd.plan import make_job, worker_command
from gpuherd.esd.summary import gather
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptState

MakeModel = Callable[..., Path]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=80)


def write_list(path: Path, models: Sequence[Path]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = [(model, "base", "") for model in models]
        csv.writer(file).writerows([("model_id", "base_model_relation", "source_model"), *rows])
    return path


def started(out: Path) -> list[tuple[str, AttemptState]]:
    with closing(Queue(out / "queue.sqlite")) as queue:
        return [(row.job, row.state) for row in queue.attempts()]


def results(out: Path) -> dict[str, bytes]:
    """All files that workers have written, half-written ones too, and the summary."""
    found = [path for folder in ESDDirectory(out).folders_of_results for path in folder.glob("*")]
    return {str(path.relative_to(out)): path.read_bytes() for path in (*found, out / "esd_results_summary.csv")}


def test_the_guides_hooks(tmp_path: Path, make_model: MakeModel, standin: Callable[..., object]) -> None:
    standin("1x40GB")
    models = write_list(tmp_path / "models.csv", [make_model("a")])

    class CustomExperiment(ESDExperiment):
        def _build_esd_command(self, row: ModelRow) -> list[str]:
            command = super()._build_esd_command(row)
            return [*command, "--bins", "7"]

        def _print_summary(self) -> None:
            super()._print_summary()
            self.console.print("Custom metrics...")

    console = quiet()
    config = ExperimentConfig(model_list=models, output_dir=tmp_path / "out", max_checks=1, check_interval=0.02)
    outcome = CustomExperiment(config, console=console).run()
    assert outcome.exit_code == ExitCode.OK
    assert outcome.results[0].gpus == ("0",)
    assert outcome.results[0].convention["bins"] == "7"
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith("Custom metrics...")


def test_a_word_that_the_worker_does_not_know_is_a_failure(tmp_path: Path, make_model: MakeModel) -> None:
    class CustomExperiment(ESDExperiment):
        def _build_esd_command(self, row: ModelRow) -> list[str]:
            return [*super()._build_esd_command(row), "--custom-arg", "value"]

    config = ExperimentConfig(single_model=make_model("a"), output_dir=tmp_path / "out", device_map="cpu", retries=0)
    experiment = CustomExperiment(config, console=quiet())
    assert experiment.run().exit_code == ExitCode.FAILED
    assert "--custom-arg" in experiment.failures()[0].reason


def test_a_single_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    config = ExperimentConfig(single_model=tmp_path / "absent", output_dir=tmp_path / "out")
    with pytest.raises(MissingModel):
        ESDExperiment(config, console=quiet()).run()


def test_a_single_adapter_on_a_base(tmp_path: Path, make_model: MakeModel, make_adapter: MakeModel) -> None:
    base, adapter = make_model("base"), make_adapter("lora", base=None)
    config = ExperimentConfig(single_model=adapter, base_model=base, output_dir=tmp_path / "out", device_map="cpu")
    outcome = ESDExperiment(config, console=quiet()).run()
    assert outcome.results[0].lineage["source_model"] == str(base)
    assert outcome.results[0].lineage["base_model_relation"] == "adapter"


def test_a_result_that_has_gone_is_made_anew(tmp_path: Path, make_model: MakeModel) -> None:
    models = write_list(tmp_path / "models.csv", [make_model("a"), make_model("b", seed=1)])
    config = ExperimentConfig(model_list=models, output_dir=tmp_path / "out", device_map="cpu")
    first = ESDExperiment(config, console=quiet()).run()
    before = results(tmp_path / "out")
    first.results[1].stats.unlink()
    ESDExperiment(config, console=quiet()).run()
    assert len(started(tmp_path / "out")) == 3
    assert results(tmp_path / "out") == before


def test_a_file_alone_is_no_result(tmp_path: Path, make_model: MakeModel) -> None:
    """The queue and the file together say that a model is done."""
    config = ExperimentConfig(single_model=make_model("a"), output_dir=tmp_path / "out", device_map="cpu")
    experiment = ESDExperiment(config, console=quiet())
    experiment.run()
    (planned,) = experiment.plan.models
    run = experiment.directory
    pairs = [(make_job(config, planned, worker_command(config, planned.row, run), run), planned)]
    assert len(gather(run, pairs).results) == 1
    with sqlite3.connect(experiment.directory.queue) as queue:
        queue.execute("UPDATE jobs SET state = 'failed'")
    queue.close()
    assert gather(run, pairs).results == ()


def test_what_a_worker_of_an_earlier_run_made_by_other_options_is_told(tmp_path: Path, make_model: MakeModel) -> None:
    """One that was running when its dispatcher died goes on, and its end is that of the model's job."""
    config = ExperimentConfig(single_model=make_model("a"), output_dir=tmp_path / "out", device_map="cpu")
    experiment = ESDExperiment(config, console=quiet())
    experiment.run()
    (planned,), run, other = experiment.plan.models, experiment.directory, replace(config, bins=7)
    found = gather(run, [(make_job(other, planned, worker_command(other, planned.row, run), run), planned)])
    assert found.results == ()
    assert "other options" in found.others[0].reason


def test_a_folder_at_work_is_left_alone(tmp_path: Path, make_model: MakeModel) -> None:
    config = ExperimentConfig(single_model=make_model("a"), output_dir=tmp_path / "out", device_map="cpu")
    ESDExperiment(config, console=quiet()).run()
    record = (tmp_path / "out" / "run.json").read_bytes()
    with closing(DispatcherLock(tmp_path / "out" / "queue.lock")), pytest.raises(QueueBusy):
        ESDExperiment(config, console=quiet()).run()
    assert (tmp_path / "out" / "run.json").read_bytes() == record


def test_half_written_files_go_when_nobody_can_be_writing(tmp_path: Path, make_model: MakeModel) -> None:
    """A worker killed while saving leaves its temporary file."""
    out = tmp_path / "out"
    config = ExperimentConfig(single_model=make_model("a"), output_dir=out, device_map="cpu")
    ESDExperiment(config, console=quiet()).run()
    before = results(out)
    strays = [out / "stats" / ".a.csv.x1y2.tmp", out / ".esd_results_summary.csv.x1y2.tmp"]
    for stray in strays:
        stray.write_text("half")
    written_now = out / "stats" / ".b.csv.x1y2.tmp"
    written_now.write_text("by hand")
    os.utime(written_now, (time.time() + 60, time.time() + 60))
    with sqlite3.connect(out / "queue.sqlite") as queue:  # a worker of an earlier run that may still write
        queue.execute("UPDATE attempts SET state = 'running', ended_at = NULL")
    queue.close()
    with closing(Queue(out / "queue.sqlite")) as opened:
        assert opened.running()
    ESDExperiment(config, console=quiet())._tidy(time.time())
    assert all(stray.exists() for stray in strays)
    with sqlite3.connect(out / "queue.sqlite") as queue:
        queue.execute("UPDATE attempts SET state = 'done', ended_at = 0")
    queue.close()
    ESDExperiment(config, console=quiet()).run()
    assert not any(stray.exists() for stray in strays)
    assert written_now.read_text() == "by hand"
    written_now.unlink()
    assert results(out) == before


def test_ctrl_c_stops_and_the_same_command_goes_on(tmp_path: Path, make_model: MakeModel) -> None:
    models = write_list(tmp_path / "models.csv", [make_model(f"m{n}", seed=n) for n in range(4)])
    out = tmp_path / "out"
    words = ["esd", "--model-list", str(models), "--output-dir", str(out), "--device-map", "cpu", "--cpu-jobs", "1"]
    process = start(words)
    wait_for(lambda: (out / "stats").exists() and any((out / "stats").glob("*.csv")))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == ExitCode.INTERRUPTED
    assert start(words).wait(60) == 0
    assert sorted(path.name for path in (out / "stats").glob("*.csv")) == sorted(
        name.rpartition(".")[0] + ".csv" for name, state in started(out) if state is AttemptState.DONE
    )


def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gpuherd", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)


def wait_for(there: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "did not come about in time"
        time.sleep(0.02)


def killed_and_started_again(
    tmp_path: Path, models: Path, kills: int, seed: int, *, workers_too: bool = False, resume: bool = False
) -> tuple[Path, Path]:
    """Runs the list undisturbed in one folder, and in another with kills at random moments while it is at work; it
    goes on by the same command, or by --resume.

    Returns both folders.
    """
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    again = ["esd", "--resume", str(stormy)]
    words = ["--simulate", "4x40GB", "esd", "--model-list", str(models), "--check-interval", "0.02"]
    words += ["--max-checks", "2", "--output-dir"]
    assert start([*words, str(calm)]).wait(110) == 0
    moments = random.Random(seed)
    hits = 0
    for _ in range(kills):
        goal = analysed(stormy) + moments.randint(0, 2)
        goes_on = resume and (stormy / "run.json").exists()
        process = start(["--simulate", "4x40GB", *again] if goes_on else [*words, str(stormy)])
        wait_for(lambda: process.poll() is not None or analysed(stormy) >= goal)  # noqa: B023 - called at once
        time.sleep(moments.uniform(0, 0.25))
        hits += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        if workers_too and (stormy / "queue.sqlite").exists():
            kill_workers(stormy)
    assert hits >= min(kills - 1, 3), "most of the kills must meet a command at work"
    assert start(["--simulate", "4x40GB", *again] if resume else [*words, str(stormy)]).wait(110) == 0
    return calm, stormy


def analysed(out: Path) -> int:
    """How many models have their file of figures."""
    return sum(1 for _ in (out / "stats").glob("[!.]*.csv"))


def kill_workers(out: Path) -> None:
    with closing(Queue(out / "queue.sqlite")) as queue:
        tag = queue.tag
    for found in tagged(f"{tag}/"):
        with suppress(ProcessLookupError):
            os.kill(found.process.pid, signal.SIGKILL)


def check_nothing_was_lost_or_done_twice(calm: Path, stormy: Path, number: int) -> None:
    """By the results, by the queue's own account, and by the workers' logs."""
    assert results(stormy) == results(calm)
    done = [name for name, state in started(stormy) if state is AttemptState.DONE]
    assert len(done) == len(set(done)) == number


def saved(out: Path) -> Counter[str]:
    """How often each model was analysed to the end, by the workers' logs."""
    logs = [path for path in (out / "logs").glob("*.log") if not path.name.startswith("esd_experiment_")]
    times = Counter[str]()
    for path in logs:
        times[path.name.rsplit(".", 3)[0]] += path.read_text().count("\nSaved: ")
    return times


def test_sigkill_of_the_command_loses_nothing(tmp_path: Path, make_model: MakeModel) -> None:
    models = write_list(tmp_path / "models.csv", [make_model(f"m{n}", seed=n, width=16) for n in range(4)])
    calm, stormy = killed_and_started_again(tmp_path, models, kills=2, seed=1)
    check_nothing_was_lost_or_done_twice(calm, stormy, 4)
    assert set(saved(stormy).values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_sigkill_five_times_over_twenty_models(tmp_path: Path, make_model: MakeModel, seed: int) -> None:
    models = write_list(tmp_path / "models.csv", [make_model(f"m{n}", seed=n, width=48) for n in range(20)])
    calm, stormy = killed_and_started_again(tmp_path, models, kills=5, seed=seed)
    check_nothing_was_lost_or_done_twice(calm, stormy, 20)
    assert saved(stormy) == saved(calm)
    assert set(saved(calm).values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [5, 6])
def test_sigkill_of_the_command_and_its_workers(tmp_path: Path, make_model: MakeModel, seed: int) -> None:
    """A worker killed between its last write and its end is not known to have ended: that model is analysed again."""
    models = write_list(tmp_path / "models.csv", [make_model(f"m{n}", seed=n, width=48) for n in range(20)])
    calm, stormy = killed_and_started_again(tmp_path, models, kills=5, seed=seed, workers_too=True)
    check_nothing_was_lost_or_done_twice(calm, stormy, 20)
    assert min(saved(stormy).values()) >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [7, 8])
def test_sigkill_and_resume(tmp_path: Path, make_model: MakeModel, seed: int) -> None:
    models = write_list(tmp_path / "models.csv", [make_model(f"m{n}", seed=n, width=48) for n in range(8)])
    calm, stormy = killed_and_started_again(tmp_path, models, kills=3, seed=seed, workers_too=True, resume=True)
    check_nothing_was_lost_or_done_twice(calm, stormy, 8)
