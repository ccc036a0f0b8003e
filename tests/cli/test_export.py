"""``gpuherd export`` as it is called: of a job file and of a run's folder, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.jobs.attempts import attempt_of

from gpuherd.cli.main import run
from gpuherd.errors import UsageError
from gpuherd.jobs import Job, Queue, RunDirectory
from gpuherd.jobs.records import Handed, StartRecord
from gpuherd.jobs.settings import user_file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_job_file_for_slurm(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "commands.txt").write_text("#gpuherd name=data\necho one\n#gpuherd needs=data mem=9GB\necho two\n")
    assert run(["export", "--to", "slurm", "commands.txt", "--output", "my slurm", "--partition", "gpu"]) == 0
    told = capsys.readouterr()
    assert told.out == f"2 jobs written to {here}/my slurm; to run them: bash '{here}/my slurm/submit.sh'\n"
    assert told.err == "gpuherd: these files leave out GPU memory (mem=), set for 1 of the jobs\n"
    assert "#SBATCH --partition=gpu\n" in (here / "my slurm/01-data.sbatch").read_text()
    assert (here / "my slurm/01-data.commands").read_text() == f"cd -- {here} && exec -- echo one  # data\n"
    with pytest.raises(UsageError, match=r"submit\.sh|exists; --force replaces it"):
        run(["export", "--to", "slurm", "commands.txt", "--output", "my slurm"])
    assert run(["export", "--to", "slurm", "commands.txt", "--output", "my slurm", "--force"]) == 0
    assert "partition" not in (here / "my slurm/01-data.sbatch").read_text()


def test_a_job_files_engine_and_the_settings_count(here: Path) -> None:
    (here / "jobs.yaml").write_text("engine: {name: slurm, partition: gpu, qos: short}\njobs: [echo one]\n")
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[defaults]\naccount = 'lab'\npartition = 'other'\n")  # and jobs run on this machine
    assert run(["export", "--to", "slurm", "jobs.yaml", "--output", "x", "--qos", "long"]) == 0
    script = (here / "x/01-job-0001.sbatch").read_text()
    for words in ("--partition=gpu", "--qos=long", "--account=lab"):
        assert f"#SBATCH {words}\n" in script
    assert run(["export", "--to", "shell", "jobs.yaml", "--output", "y"]) == 0


def test_a_dry_run_shows_the_files_and_json_tells_them(here: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (here / "commands.txt").write_bytes(b"echo one\necho '\xc3\xa9'\n")
    assert run(["export", "--to", "shell", "commands.txt", "--output", "x", "--dry-run"]) == 0
    shown = capfdbinary.readouterr().out
    assert shown.startswith(b"==> run.sh <==\n#!/bin/bash\n# 2 jobs")
    assert run(["export", "--to", "shell", "commands.txt", "--output", "x", "--dry-run", "--json"]) == 0
    told = json.loads(capfdbinary.readouterr().out)
    assert (told["to"], told["written"], len(told["jobs"]), list(told["files"])) == ("shell", False, 2, ["run.sh"])
    assert not (here / "x").exists()


def test_the_waiting_jobs_of_a_run_that_does_other_things_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunDirectory(here / "results")
    folder.create()
    folder.write_run_record({"cwd": "/somewhere"})
    with closing(Queue(folder.queue)) as queue:
        names = {"done": (), "runs": (), "a": ("done",), "b": ("a", "runs"), "c": ("b",), "d": ("a",)}
        queue.submit([Job(name=name, argv=("echo", name), gpus=0, needs=needs) for name, needs in names.items()])
        queue._db.execute("UPDATE jobs SET state = 'done' WHERE name = 'done'")
        queue._unblock(1, 0.0)
        attempt = attempt_of(next(each for each in queue.head(9, 9e9) if each.job.name == "runs"), 1)
        attempt = replace(attempt, process=None, handed=Handed("slurm", "b", 0))
        queue.record_starts([StartRecord(attempt, 0.0, None)], queue.begin_run(0.0, 0.0))
    before = folder.queue.read_bytes()
    assert run(["export", "--to", "shell", "results", "--output", "x"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("2 jobs written")
    assert told.err == "gpuherd: runs is left out: it runs now (and 2 more)\n"
    text = (here / "x/run.sh").read_text()
    assert "cd -- /somewhere && exec -- echo a" in text and "begin 2 d 1;" in text and "echo b" not in text
    assert folder.queue.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--to", "shell", "commands.txt", "--partition", "gpu"], "--partition is for --to slurm"),
        (["--to", "slurm", "nothing.txt"], "nothing.txt"),
        (["--to", "slurm", "empty"], "there is no queue in .*empty; name the folder of a run, or a job file"),
        (["--to", "slurm", "finished"], "no job waits in .*finished, so there is nothing to export"),
    ],
)
def test_what_is_refused(here: Path, words: list[str], problem: str) -> None:
    (here / "commands.txt").write_text("echo\n")
    (here / "empty").mkdir()
    finished = RunDirectory(here / "finished")
    finished.create()
    Queue(finished.queue).close()
    with pytest.raises(Exception, match=problem):
        run(["export", *words, "--output", "x"])
    assert not (here / "x").exists()


def test_what_a_file_says_is_what_runs_without_gpuherd(here: Path) -> None:
    (here / "commands.txt").write_text(f"{sys.executable} -c 'print(1 + 1)'\n")
    assert run(["export", "--to", "shell", "commands.txt", "--output", "x"]) == 0
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(["bash", "x/run.sh"], check=True, env=environment, stdout=subprocess.DEVNULL)
    assert (here / "x/logs/1.log").read_text() == "2\n"
