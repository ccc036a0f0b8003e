"""--enqueue-only: the jobs of a command lie in the queue and nothing has run; from there they are run or exported."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.test_posttrain import models as models
from tests.cli.test_posttrain import words as words_of_posttrain
from tests.qa import small_models
from tests.qa.conftest import made_once

from gpuherd.cli.main import run
from gpuherd.errors import ExitCode
from gpuherd.jobs import JobState, Queue, RunDirectory
from gpuherd.standin.machine import SimulatedMachine

MakeModel = Callable[..., Path]


@pytest.fixture
def on(standin: Callable[..., SimulatedMachine]) -> list[str]:
    return ["--simulate", str(standin("4x40GB").path)]


def states(folder: Path) -> set[JobState]:
    with closing(Queue(RunDirectory(folder).queue)) as queue:
        assert queue.last_attempt() == 0
        return set(queue.states().values())


def test_esd_put_into_the_queue_exported_and_run_by_bash_gives_what_esd_gives(
    tmp_path: Path, make_model: MakeModel, on: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "m.csv"
    models.write_text(f"model_id,base_model_relation,source_model\n{make_model('a')},,\n{make_model('b', seed=1)},,\n")
    fast = ["--check-interval=0.02", "--max-checks=1"]
    words = [*on, "esd", "--model-list", str(models), *fast, "--output-dir"]
    by_hand, by_us = tmp_path / "by hand", tmp_path / "by us"
    assert run([*words, str(by_hand), "--enqueue-only"]) == ExitCode.OK
    folder = shlex.quote(str(by_hand))
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"2 jobs wait in {folder}, and nothing was started; the same command without --enqueue-only runs them, and"
        f" gpuherd export --to slurm {folder} --output DIR writes them as files"
    )
    assert states(by_hand) == {JobState.WAITING}
    assert run(["export", "--to", "shell", str(by_hand), "--output", str(tmp_path / "x")]) == ExitCode.OK
    # GPUs of our own making are no matter of the exported script.
    done = subprocess.run(["bash", tmp_path / "x/run.sh"], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + "".join(path.read_text() for path in (tmp_path / "x/logs").iterdir())
    assert run([*words, str(by_us)]) == ExitCode.OK
    found = [sorted((folder / "stats").glob("*.csv")) for folder in (by_hand, by_us)]
    assert [path.name for path in found[0]] == [path.name for path in found[1]] != []
    assert [path.read_bytes() for path in found[0]] == [path.read_bytes() for path in found[1]]


def test_the_same_command_without_it_runs_them(
    tmp_path: Path, on: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.txt").write_text("#gpuherd gpus=0\ntouch one\n#gpuherd gpus=0\ntouch two\n")
    assert run([*on, "batch", "c.txt", "--enqueue-only", "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told == {"enqueued": 2, "folder": str(tmp_path / "c_results"), "remarks": []}
    assert states(tmp_path / "c_results") == {JobState.WAITING} and not (tmp_path / "one").exists()
    assert run([*on, "batch", "c.txt"]) == ExitCode.OK
    assert (tmp_path / "one").exists() and (tmp_path / "two").exists()
    assert run([*on, "batch", "c.txt", "--enqueue-only", "--json"]) == ExitCode.OK  # what is done stays done
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["enqueued"] == 0


@pytest.mark.slow
def test_generate_and_posttrain(
    tmp_path: Path, models: tuple[str, str], on: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = made_once(tmp_path_factory, "trained", small_models.trained_llama)
    data = small_models.write_questions(tmp_path / "facts.jsonl", 8)
    words = ["generate", f"--model={model}", f"--dataset={data}", f"--runs-dir={tmp_path / 'runs'}", "--shards=2"]
    assert run([*on, *words, "--max-new-tokens=12", "--enqueue-only"]) == ExitCode.OK
    (folder,) = [path.parent for path in (tmp_path / "runs").rglob("queue.sqlite")]
    assert states(folder) == {JobState.WAITING}
    assert "enqueue_only" not in json.loads((folder / "run.json").read_text())["identity"]

    assert run([*on, *words_of_posttrain(models, tmp_path / "out", "--enqueue-only", "algos=[GRPO]")]) == ExitCode.OK
    (folder,) = [path.parent for path in (tmp_path / "out").rglob("queue.sqlite")]
    assert states(folder) == {JobState.WAITING}
    assert run(["export", "--to", "slurm", str(folder), "--output", str(tmp_path / "slurm")]) == ExitCode.OK
    submit = (tmp_path / "slurm/submit.sh").read_text()
    assert '--dependency="afterok:${job_1}' in submit
