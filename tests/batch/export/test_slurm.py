"""The files for SLURM: their scripts run by bash as SLURM would, and submit.sh with an sbatch that only takes notes.

What SLURM itself makes of them is in ``test_slurm_cluster``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.batch.export.jobs import HOSTILE, job, telling
from tests.patience import wait_until

from gpuherd.batch.export import to_export, write
from gpuherd.engines.export import groups_of
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.slurm import export
from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job

SLURM = EngineOptions(engine="slurm")


def files(jobs: Sequence[Job], options: EngineOptions = SLURM, most: int = 1000) -> dict[str, str]:
    return dict(export.SlurmFiles(groups_of(to_export(jobs, options, "/"), most), options).files())


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def as_slurm_would(folder: Path, name: str, task: int | None = None, **more: str) -> dict[str, Any]:
    variables = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_CPUS_PER_TASK": "1", **more}
    if task is not None:
        variables["SLURM_ARRAY_TASK_ID"] = str(task)
    # SLURM runs a copy of the script, in the folder from which it was submitted.
    return {
        "args": ["bash", "-s"],
        "stdin": (folder / f"{name}.sbatch").open("rb"),
        "cwd": folder,
        "env": {**os.environ, **variables},
    }


def test_every_line_runs_its_job_whatever_its_words_hold(tmp_path: Path) -> None:
    folder = tmp_path / "o'dd $(x) dir"
    there = tmp_path / "cwd `y`\n z"
    there.mkdir()
    jobs = [
        telling(f"{number} {name}", tmp_path / f"{number}", *HOSTILE, env={"V": name}, cwd=str(there), result=None)
        for number, name in enumerate(HOSTILE)
        if not name.startswith("\udcff")
    ]
    made = files(jobs)
    write(folder, made, force=False)
    first = next(name for name in made if name.endswith(".sbatch")).removesuffix(".sbatch")
    assert sorted(made) == [f"{first}.commands", f"{first}.sbatch", "submit.sh"]
    assert made[f"{first}.commands"].count("\n") == len(jobs)
    for number, each in enumerate(jobs):
        asked = as_slurm_would(folder, first, number)
        with asked["stdin"]:
            subprocess.run(**asked, check=True)
        words, cwd, variable, gpus = json.loads(Path(each.argv[3]).read_bytes())
        assert [os.fsdecode(bytes.fromhex(word)) for word in words] == list(HOSTILE)
        assert (cwd, variable, gpus) == (str(there), each.env["V"], "")
    assert not list(tmp_path.rglob("pwned"))


def test_what_is_asked_of_slurm() -> None:
    options = replace(
        SLURM,
        partition="gpu",
        account="it's a lab",
        qos="high",
        constraint="a100&nvlink",
        gpu_type="a100",
        cpus_per_job=4,
        host_mem=2048,
        time_limit=5400.0,
        array_limit=3,
        slurm_args=("--exclude=n3",),
        setup=("module load cuda",),
    )
    made = files([job(f"m{number}", gpus=2) for number in range(12)], options)
    text = made["01-m.sbatch"]
    assert directives(text) == [
        "--job-name=01-m",
        "--output=logs/%x.%a.log",
        "--array=0-11%3",
        "--gres=gpu:a100:2",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--mem=2048M",
        "--time=90",
        "--partition=gpu",
        "'--account=it'\"'\"'s a lab'",
        "--qos=high",
        "'--constraint=a100&nvlink'",
        "--signal=B:TERM@120",
        "--no-requeue",
        "--kill-on-invalid-dep=yes",
        "--exclude=n3",
    ]
    assert text.index("module load cuda") < text.index("line=$(sed")
    assert "export CUDA_DEVICE_ORDER=PCI_BUS_ID" in text and "CUDA_VISIBLE_DEVICES" not in text


def test_one_job_is_no_array_and_a_job_on_the_cpu_sees_no_gpu() -> None:
    text = files([job("alone")])["01-alone.sbatch"]
    assert not [word for word in directives(text) if word.startswith(("--array", "--gres", "--time", "--signal"))]
    assert "--output=logs/%x.log" in directives(text) and "export CUDA_VISIBLE_DEVICES=\n" in text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"partition": "gpu\n#SBATCH --uid=0"}, "take out what is not printable"),
        ({"slurm_args": ("script",)}, "is no option of sbatch"),
        ({"slurm_args": ("--array=0-9",)}, "--array can't be given, an array's indices are the jobs"),
    ],
)
def test_words_that_sbatch_would_misread_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        files([job("a")], replace(SLURM, **options))


NOTES = """\
#!/bin/sh
n=$(($(cat "$NOTES.n" 2>/dev/null || echo 100) + 1))
echo $n >"$NOTES.n"
echo "$PWD: $*" >>"$NOTES"
[ "$n" = "$REFUSE" ] && { echo "sbatch: error: no" >&2; exit 1; }
echo "$n;cluster"
"""


def submitted(folder: Path, tmp_path: Path, refuse: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(NOTES)
    program.chmod(0o755)
    release = program.with_name("scontrol")
    release.write_text('#!/bin/sh\necho "$*" >>"$NOTES"\n')
    release.chmod(0o755)
    notes = tmp_path / "notes"
    path = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [folder / "submit.sh"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, "PATH": path, "NOTES": str(notes), "REFUSE": refuse, "CDPATH": "/tmp"},
    )
    return done, notes.read_text().replace(str(folder), "HERE").splitlines()


def test_submit_hands_over_what_is_needed_first(tmp_path: Path) -> None:
    jobs = [
        *(job(f"data-{number}", gpus=1) for number in range(3)),
        job("train", gpus=2, needs=("data-0", "data-1", "data-2")),
        job("look", needs=("data-1", "train")),
        *(job(f"later-{number}", round=1) for number in range(2)),
    ]
    folder = tmp_path / "it's\there"
    write(folder, files(jobs), force=False)
    done, notes = submitted(folder, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["01-data: 101", "02-train: 102", "03-look: 103", "04-later: 104"]
    assert notes == [
        "HERE: --parsable --hold 01-data.sbatch",
        "HERE: --parsable --dependency=afterok:101 --hold 02-train.sbatch",
        "HERE: --parsable --dependency=afterok:102:101_1 03-look.sbatch",
        "HERE: --parsable --dependency=afterany:101:102:103 04-later.sbatch",
        "release 101 102",
    ]


def test_what_was_handed_over_begins_also_where_slurm_refuses_the_rest(tmp_path: Path) -> None:
    """Held is only what others need: it must not end, and be forgotten, before those are known to SLURM."""
    write(tmp_path / "x", files([job("a"), job("b", gpus=1, needs=("a",)), job("c", gpus=2)]), force=False)
    done, notes = submitted(tmp_path / "x", tmp_path, refuse="103")
    assert done.returncode == 1
    assert notes[-1] == "release 101" and sum("--hold" in note for note in notes) == 1


def test_submit_stops_where_slurm_refuses(tmp_path: Path) -> None:
    write(tmp_path / "x", files([job("a"), job("b", gpus=1), job("c", gpus=2)]), force=False)
    done, notes = submitted(tmp_path / "x", tmp_path, refuse="102")
    assert done.returncode == 1 and len(notes) == 2
    assert (done.stdout, done.stderr) == ("01-a: 101\n", "sbatch: error: no\n")


def test_more_jobs_than_an_array_holds_are_several_arrays() -> None:
    jobs = [job(f"m{number}") for number in range(5)]
    made = files([*jobs, job("all", needs=tuple(each.name for each in jobs))], most=2)
    assert sorted(name for name in made if name.endswith(".sbatch")) == [
        "01-m.sbatch",
        "02-m.sbatch",
        "03-m4.sbatch",
        "04-all.sbatch",
    ]
    assert '--dependency="afterok:${job_1}:${job_2}:${job_3}"' in made["submit.sh"]


def test_a_job_is_told_before_its_time_is_up_and_may_save_what_it_has(tmp_path: Path) -> None:
    script = "trap 'sleep 0.2; echo saved >saved; exit 3' TERM; echo ready >ready; while :; do sleep 0.05; done"
    jobs = [job("long", argv=("bash", "-c", script), cwd=str(tmp_path), result="saved")]
    folder = tmp_path / "x"
    write(folder, files(jobs, replace(SLURM, time_limit=600.0)), force=False)
    asked = as_slurm_would(folder, "01-long")
    with asked["stdin"], subprocess.Popen(**asked) as running:
        wait_until((tmp_path / "ready").exists)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 3
    assert (tmp_path / "saved").exists()


def test_over_several_nodes_each_process_knows_its_place(tmp_path: Path) -> None:
    """srun and scontrol are played by scripts that do on one machine what SLURM does on two."""
    (tmp_path / "bin").mkdir()
    programs = {
        "srun": 'echo "$@" >srun; while [ "$1" != bash ]; do shift; done; export SLURM_STEP_NODELIST=n[1-2]; '
        "export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1; "
        'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "getent": "exit 2",
        "scontrol": "printf 'n1\\nn2\\n'",
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    words = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT")
    script = f"echo {' '.join(f'${word}' for word in words)} >>told"
    jobs = [job("wide", nodes=2, gpus=1, argv=("sh", "-c", script), cwd=str(tmp_path))]
    made = files(jobs)
    assert "--nodes=2" in directives(made["01-wide.sbatch"])
    write(tmp_path / "x", made, force=False)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    asked = as_slurm_would(tmp_path / "x", "01-wide", PATH=path, SLURM_JOB_ID="123456", SLURM_JOB_NODELIST="n[1-2]")
    port = 20_000 + 123_456 % 12_000
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen()
        with asked["stdin"]:
            subprocess.run(**asked, check=True)
    # The name means nothing on the nodes, and somebody else is at the first port.
    told = [f"10.0.0.1 {port + 1} 2 {rank} 2 {rank} {port + 1}\n" for rank in (0, 1)]
    assert (tmp_path / "told").read_text() == "".join(told)
    assert "--kill-on-bad-exit=1" in (tmp_path / "x" / "srun").read_text()


def test_a_line_that_is_not_there_is_told(tmp_path: Path) -> None:
    write(tmp_path, files([job("a"), job("b")]), force=False)
    asked = as_slurm_would(tmp_path, "01-a", 7)
    with asked["stdin"]:
        done = subprocess.run(**asked, check=False, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "01-a.commands has no such line\n")
