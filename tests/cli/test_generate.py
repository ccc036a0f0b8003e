"""``gpuherd generate`` as users meet it: jobs on simulated GPUs, a run that is killed and goes on, what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.qa import small_models
from tests.qa.conftest import made_once
from tests.qa.generate.conftest import begin_run

from gpuherd.cli.main import run as in_process
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.process_tree import tagged
from gpuherd.errors import ExitCode, MissingModel, UsageError
from gpuherd.jobs.queue.store import Queue
from gpuherd.models.memory.weights import Precision
from gpuherd.qa.data.questions import MissingQuestions
from gpuherd.qa.generate.config import GenerateConfig
from gpuherd.qa.runs import NoSuchRun, open_run
from gpuherd.standin.machine import SimulatedMachine

FAST = ("--check-interval=0.02", "--max-checks=1", "--max-new-tokens=12")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "trained", small_models.trained_llama)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A simulated machine of four GPUs, which outlives the commands that are killed on it."""
    made = SimulatedMachine.create(tmp_path / "machine", "4x40GB", attribute=True)
    yield made.path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return small_models.write_questions(tmp_path / "facts.jsonl", 32)


def words(model: Path, data: Path, runs: Path, *more: str) -> list[str]:
    return ["generate", f"--model={model}", f"--dataset={data}", f"--runs-dir={runs}", *FAST, *more]


def start(machine: Path, *command: str) -> subprocess.Popen[str]:
    whole = [sys.executable, "-m", "gpuherd", "--simulate", str(machine), *command]
    env = os.environ | {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def ended(process: subprocess.Popen[str]) -> str:
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 0, told
    return told


def kill_all(process: subprocess.Popen[str], folder: Path, *, workers: bool = True) -> None:
    """The command at once, and what it has started."""
    process.kill()
    process.communicate(timeout=60)
    if workers and (folder / "queue.sqlite").exists():
        kill_workers(folder)


def kill_workers(folder: Path) -> None:
    queue = Queue(folder / "queue.sqlite")
    try:
        tag = queue.tag
    finally:
        queue.close()
    for found in tagged(f"{tag}/"):
        try:
            os.kill(found.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def lines_there(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (folder / "shards").glob("[0-9]*.jsonl"))


QUESTIONS = 12
ASKED: dict[str, Any] = {
    "greedy": True,
    "samples": 2,
    "batch_size": 3,
    "max_new_tokens": 12,
    "shards": 1,
    "limit": QUESTIONS,
}


@pytest.mark.timeout(400)
def test_a_run_that_was_killed_equals_an_undisturbed_one(
    model: Path,
    data: Path,
    tmp_path: Path,
    standin: Callable[..., SimulatedMachine],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command goes on behind what a killed worker has left: here a batch and a half, in bytes. (Real kills, at any
    moment and many of them, are slow: below.)"""
    asked: dict[str, Any] = {"model": str(model), "dataset": str(data), "run_id": "killed", "shards": 1, **ASKED}
    quiet, killed = (begin_run(GenerateConfig(runs_dir=str(tmp_path / name), **asked)) for name in ("quiet", "runs"))
    quiet.answer()
    lines = quiet.folder.shard(0).read_bytes()
    undisturbed = quiet.finish()
    killed.folder.shards.mkdir()
    killed.folder.shard(0).write_bytes(lines[: len(lines) // 2])
    command = ["--simulate", str(standin("4x40GB").path)]
    command += words(model, data, tmp_path / "runs", "--greedy", "--samples=2", "--batch-size=3", "--run-id=killed")
    command.append(f"--limit={QUESTIONS}")
    assert in_process(command) == ExitCode.OK
    told = capsys.readouterr().out
    assert "12 questions, 36 answers" in told and "next: gpuherd judge killed math" in told
    run = open_run("killed", tmp_path / "runs")
    assert run.folder.answers.read_bytes() == undisturbed.folder.answers.read_bytes()
    assert 0 < run.done["shards"][0]["items_last_start"] < QUESTIONS
    # The job was planned: it asked for a GPU and memory, and was given one.
    assert "asks for 1 GPU" in told
    log = next(run.folder.root.glob("logs/shard-00000.*.log")).read_text()
    assert "CUDA_VISIBLE_DEVICES: not set" not in log


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_killed_ten_times_at_random(model: Path, data: Path, machine: Path, tmp_path: Path, seed: int) -> None:
    """The command, its workers, or both, at any moment of a run of four shards on four simulated GPUs."""
    small_models.write_questions(data)
    more = ("--greedy", "--samples=4", "--batch-size=5", "--shards=4")
    expected = ended(start(machine, *words(model, data, tmp_path / "quiet", *more, "--run-id=run")))
    assert "117 questions" in expected
    whole = open_run("run", tmp_path / "quiet").folder.answers.read_bytes()
    command, folder = words(model, data, tmp_path / "runs", *more, "--run-id=run"), tmp_path / "runs" / "run"
    chance, kills, lengths = random.Random(seed), 0, [0]
    while kills < 10:
        process = start(machine, *command)
        # At any moment of a start, or of the answers, however fast this machine is.
        early = chance.random() < 0.4
        deadline = time.monotonic() + chance.uniform(0.2, 5)
        lines = lengths[-1] + chance.randrange(1, 20)
        while process.poll() is None and (time.monotonic() < deadline if early else lines_there(folder) < lines):
            time.sleep(0.005)
        if (folder / "done.json").exists():
            process.communicate(timeout=120)
            break
        if chance.random() < 0.3 and (folder / "queue.sqlite").exists() and process.poll() is None:
            kill_workers(folder)  # the dispatcher sees to it
        kill_all(process, folder, workers=chance.random() < 0.6)
        kills += 1
        lengths.append(lines_there(folder))
    assert kills >= 3 and max(lengths) > 0, lengths
    process = start(machine, *command)
    told, _ = process.communicate(timeout=300)
    if "failed stay" in told:  # a shard whose worker was killed at each of its tries; the next start gives it new ones
        assert process.returncode == ExitCode.FAILED, told
        ended(start(machine, *command))
    else:
        assert process.returncode == 0, told
    assert open_run("run", tmp_path / "runs").folder.answers.read_bytes() == whole


def test_a_dry_run_starts_nothing(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.write_text(data.read_text() + '{"question": "", "answers": ["x"]}\n')
    command = words(model, data, tmp_path / "runs", "--dry-run", "--samples=3")
    assert in_process(command) == ExitCode.OK
    told = capsys.readouterr().out
    assert "32 questions" in told and "1 refused" in told and "the question is empty" in told
    assert "nothing was started" in told and not (tmp_path / "runs").exists()
    assert in_process([*command, "--json"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)
    assert (plan["questions"], plan["answered"], plan["complete"]) == (32, 0, False)
    assert plan["refused"][0]["row"] == "line 33" and plan["asks"]["gpus"] == 1


def test_what_is_refused_before_anything_starts(model: Path, data: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(MissingQuestions, match="did you mean svamp"):
        in_process(words(model, Path("svmp"), runs))
    with pytest.raises(MissingModel):
        in_process(words(tmp_path / "nothing", data, runs))
    with pytest.raises(UsageError, match="--device-map is for --backend transformers"):
        in_process(words(model, data, runs, "--backend=vllm", "--device-map=auto"))
    assert not runs.exists()


def test_a_run_goes_on_with_its_own_options(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Begun in one folder by relative paths, it goes on from another."""
    monkeypatch.chdir(tmp_path)
    begun = begin_run(
        GenerateConfig(
            model=str(model),
            dataset=data.name,
            runs_dir="runs",
            run_id="half",
            samples=2,
            stop=("\n\n", "Q:"),
            dtype=Precision.FP32,
            temperature=0.7,
            shards=2,
            webhook="https://example.org/secret",
        )
    )
    assert b"secret" not in begun.folder.run_json.read_bytes()
    begun.answer([1])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume = ["generate", "--resume=half", f"--runs-dir={tmp_path / 'runs'}", "--dry-run"]
    assert in_process([*resume, "--max-gpus=2"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "2 jobs" in told and "16 of 32 are answered already" in told and r"'\n\n', 'Q:'" in told
    # The same may be said again, also by another way to the same file.
    same = ["--samples=2", "--dataset=../" + data.name, "--stop", r"\n\n", "Q:"]
    assert in_process([*resume, *same]) == ExitCode.OK
    for more, refused in (
        (["--samples=3"], "begun with --samples 2; with another it is another run"),
        (["--run-id=other"], "name two runs"),
    ):
        with pytest.raises(UsageError, match=refused):
            in_process([*resume, *more])
    with pytest.raises(NoSuchRun, match="did you mean half"):
        in_process(["generate", "--resume=hlaf", f"--runs-dir={tmp_path / 'runs'}"])


def test_a_run_of_before_there_were_engines_goes_on(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record calls the backend an engine, and knows no cluster."""
    begun = begin_run(
        GenerateConfig(
            model=str(model),
            dataset=str(data),
            runs_dir=str(tmp_path / "runs"),
            run_id="old",
            shards=2,
            max_new_tokens=12,
        )
    )
    begun.answer([1])
    record = json.loads(begun.folder.run_json.read_bytes())
    clusters = {each.name for each in dataclasses.fields(EngineOptions)}
    config = {name: value for name, value in record["config"].items() if name not in {"backend", *clusters}}
    begun.folder.run_json.write_text(json.dumps(record | {"config": config | {"engine": "transformers"}}))
    resume = ["generate", "--resume=old", f"--runs-dir={tmp_path / 'runs'}", "--dry-run"]
    for more in ([], ["--backend=transformers"]):
        assert in_process([*resume, *more]) == ExitCode.OK
        assert "16 of 32 are answered already" in capsys.readouterr().out
    assert in_process(words(model, data, tmp_path / "runs", "--run-id=old", "--shards=2", "--dry-run")) == ExitCode.OK
    with pytest.raises(UsageError, match="begun with --backend transformers; with another"):
        in_process([*resume, "--backend=vllm"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layers_divided_over_two_gpus_give_the_same_answers(
    model: Path, data: Path, machine: Path, tmp_path: Path
) -> None:
    """Two ranks on pretended GPUs draw the same tokens; one of them writes."""
    small_models.write_questions(data, 12)
    answers = []
    for name, more in (("one", []), ("two", ["--parallel=tensor", "--max-gpus=2"])):
        command = words(model, data, tmp_path / "runs", "--greedy", "--samples=2", f"--run-id={name}", *more)
        ended(start(machine, *command))
        run = open_run(name, tmp_path / "runs")
        answers.append([answer for each in run.answers() for answer in each.which.values()])
    assert len(answers[0]) == 36
    for one, two in zip(*answers, strict=True):
        assert (one.token_ids, one.text, one.end_id) == (two.token_ids, two.text, two.end_id)
        assert one.log_probs == pytest.approx(two.log_probs, abs=1e-4)


def test_a_complete_run_never_changes(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command, other settings under its name, other data: not a byte of it moves."""
    runs = tmp_path / "runs"
    command = [*words(model, data, runs), "--limit=3", "--run-id=done"]
    begun = begin_run(
        GenerateConfig(
            model=str(model), dataset=str(data), runs_dir=str(runs), limit=3, max_new_tokens=12, run_id="done"
        )
    )
    begun.answer()
    begun.finish()

    def seen() -> dict[str, tuple[int, bytes]]:
        files = [path for path in (runs / "done").rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = seen()
    assert in_process(command) == ExitCode.OK
    assert "is complete; nothing is left to do" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--samples 0, not 2"):
        in_process([*command, "--samples=2"])
    assert in_process(["generate", "--resume=done", f"--runs-dir={runs}", "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["complete"] and told["done"]["questions"] == 3
    data.write_text('{"question": "another", "answers": ["x"]}\n')
    assert in_process(command) == ExitCode.OK
    assert seen() == before
    assert [each.question.id for each in open_run("done", runs).answers()] == ["fact-0", "fact-1", "fact-2"]


def test_a_complete_run_whose_model_has_changed_warns_that_its_answers_are_of_before(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_models.random_llama(tmp_path / "mine")
    where: dict[str, Any] = {"model": str(model), "dataset": str(data), "runs_dir": str(tmp_path / "runs")}
    begun = begin_run(GenerateConfig(**where, run_id="done", limit=1, max_new_tokens=2))
    begun.answer()
    begun.finish()
    again = ["generate", "--resume=done", f"--runs-dir={tmp_path / 'runs'}"]
    caplog.clear()
    assert in_process(again) == ExitCode.OK and not caplog.records
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert in_process(again) == ExitCode.OK
    (record,) = caplog.records
    assert "mine has changed since run done was made: its answers are of the model as it was" in record.getMessage()
    caplog.clear()
    shutil.rmtree(model)
    assert in_process(again) == ExitCode.OK and not caplog.records, "it does without its model"
