"""The script for bash, run by bash."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.batch.export.jobs import HOSTILE, job, telling

from gpuherd.batch import export
from gpuherd.batch.export import write
from gpuherd.engines.export import IS_AMD
from gpuherd.engines.options import EngineOptions
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.jobs.job import Job


def run(jobs: Sequence[Job], folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    write(folder, export.files(jobs, EngineOptions(), str(folder.parent)), force=True)
    return subprocess.run(
        ["bash", str(folder / "run.sh"), *words],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        env={**os.environ, **variables},
        cwd="/",
    )


def test_hostile_words_come_through_as_they_are(tmp_path: Path) -> None:
    folder, there = tmp_path / "o'dd $(x) dir", tmp_path / "cwd `y`\n z"
    there.mkdir()
    told = tmp_path / "told '1'.json"
    jobs = [
        telling(name or "empty", tmp_path / f"{number}", *HOSTILE, env={"V": name}, cwd=str(there))
        for number, name in enumerate(HOSTILE)
        if not name.startswith("\udcff")
    ]
    jobs.append(telling("odd file", told))
    done = run(jobs, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for number, name in enumerate(HOSTILE):
        if name.startswith("\udcff"):
            continue
        words, cwd, variable, gpus = json.loads((tmp_path / f"{number}").read_bytes())
        assert [os.fsdecode(bytes.fromhex(word)) for word in words] == list(HOSTILE)
        assert (cwd, variable, gpus) == (str(there), name, "")
    assert json.loads(told.read_bytes())[1] == str(folder.parent)
    assert not list(tmp_path.rglob("pwned")) and not Path("/pwned").exists()


def test_each_runs_after_what_it_needs_and_not_at_all_when_that_has_failed(tmp_path: Path) -> None:
    jobs = [
        job("third", argv=("sh", "-c", "cat first"), needs=("first",)),
        job("first", argv=("sh", "-c", "echo made >first; echo said"), result="first"),
        job("bad", argv=("sh", "-c", "exit 7")),
        job("never", argv=("touch", "never"), needs=("bad", "first")),
        job("never too", argv=("touch", "never"), needs=("never",)),
        job("no result", argv=("true",), result="nothing"),
        job("slow", argv=("sleep", "60"), timeout_s=0.1),
    ]
    done = run(jobs, tmp_path / "x")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "1: first",
        "2: third",
        "3: bad",
        "3: failed with exit code 7; see logs/3.log",
        "4: never: left out, it needs 3, which has failed",
        "5: never too: left out, it needs 4, which has failed",
        "6: no result",
        "6: failed with exit code 1; see logs/6.log",
        "7: slow",
        "7: failed with exit code 124; see logs/7.log",
        "5 failed",
    ]
    assert (tmp_path / "x/logs/1.log").read_text() == "said\n"
    assert (tmp_path / "x/logs/2.log").read_text() == "made\n"
    assert not (tmp_path / "never").exists()


def test_gpus_are_variables_and_single_jobs_can_be_chosen(tmp_path: Path) -> None:
    jobs = [telling("two", tmp_path / "2", gpus=2), telling("one", tmp_path / "1", gpus=1)]
    done = run(jobs, tmp_path / "x", "2", GPU_0="GPU-aaaa")
    assert (done.returncode, done.stdout) == (0, "2: one\n")
    assert json.loads((tmp_path / "1").read_bytes())[3] == "GPU-aaaa"
    assert not (tmp_path / "2").exists()
    assert run(jobs, tmp_path / "x").returncode == 0
    assert json.loads((tmp_path / "2").read_bytes())[3] == "0,1"


def test_on_a_machine_of_amd_the_variables_are_those_of_rocm(tmp_path: Path) -> None:
    tell = "echo $ROCR_VISIBLE_DEVICES/$HIP_VISIBLE_DEVICES/${CUDA_VISIBLE_DEVICES-unset} >$0"
    jobs = [job(f"{gpus}", argv=("sh", "-c", tell, str(tmp_path / f"{gpus}")), gpus=gpus) for gpus in (0, 2)]
    text = export.files(jobs, EngineOptions(), "/")["run.sh"]
    assert IS_AMD in text
    write(tmp_path / "x", {"run.sh": text.replace(IS_AMD, "true")}, force=False)
    environment = {**os.environ, "GPU_1": "GPU-ab", "CUDA_VISIBLE_DEVICES": "7"}
    subprocess.run([tmp_path / "x/run.sh"], check=True, env=environment)
    assert [(tmp_path / name).read_text() for name in ("0", "2")] == ["//\n", "0,GPU-ab/0,1/unset\n"]


def test_programs_named_as_bashs_own_words_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("exit", "time", "a=b", "-x", "if"):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\necho ran {name}\n")
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    jobs = [job(name, argv=(name, "1")) for name in ("exit", "time", "a=b", "-x", "if")]
    done = run(jobs, tmp_path / "x", PATH=path)
    assert done.returncode == 0, done.stdout
    logs = [(tmp_path / f"x/logs/{number}.log").read_text() for number in range(1, 6)]
    assert logs == [f"ran {name}\n" for name in ("exit", "time", "a=b", "-x", "if")]


def test_what_bash_cant_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="spans 2 nodes; that is for --to slurm"):
        export.files([job("wide", nodes=2)], EngineOptions(), "/")
    with pytest.raises(UsageError, match=r"sets the variable 'a\.b', which a shell can't set"):
        export.files([job("odd", env={"a.b": "1"})], EngineOptions(), "/")


def test_nothing_is_written_over_unless_it_is_said(tmp_path: Path) -> None:
    write(tmp_path, {"run.sh": "old", "other": ""}, force=False)
    with pytest.raises(UsageError, match=r"run\.sh exists; --force replaces it"):
        write(tmp_path, {"run.sh": "new", "third": ""}, force=False)
    assert (tmp_path / "run.sh").read_text() == "old" and not (tmp_path / "third").exists()
    write(tmp_path, {"run.sh": "new"}, force=True)
    assert (tmp_path / "run.sh").read_text() == "new"
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in ("run.sh", "other")] == ["0o700", "0o600"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "other", "run.sh"]
    with pytest.raises(CannotWrite, match="can't write in"):
        write(tmp_path / "run.sh", {"x": ""}, force=False)
