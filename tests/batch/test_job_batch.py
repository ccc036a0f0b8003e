"""``gpuherd batch`` as users meet it: a file, a folder, an exit code; and the same again goes on."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.forking import Forking
from tests.patience import wait_until

from gpuherd.batch.batch import PlannedJob, print_plan
from gpuherd.errors import ExitCode
from gpuherd.jobs.job import Job
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.queue.store import Queue

FAST = ("--check-interval", "0.02", "--max-checks", "1")


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gpuherd(forking_gpuherd: Forking) -> Command:
    def call(*words: str | Path, cwd: Path, given: str | None = None) -> Any:
        env = os.environ | {"COLUMNS": "80"}
        return forking_gpuherd.start(module="gpuherd", words=list(map(str, words)), env=env, cwd=cwd, given=given).end()

    return call


def attempts(out: Path) -> list[str]:
    with closing(Queue(out / "queue.sqlite")) as queue:
        return [f"{row.job} {row.state}" for row in queue.attempts()]


def test_a_file_is_worked_off_and_gone_on_with(tmp_path: Path, gpuherd: Command) -> None:
    file = tmp_path / "commands.txt"
    file.write_text(
        """\
#gpuherd default retries=0
A=1 sh -c 'echo "a $A $CUDA_VISIBLE_DEVICES" >>log'
#gpuherd needs=late env.B="two words"
sh -c 'echo "needs late $B" >>log'
#gpuherd name=late gpus=2
sh -c 'echo "late $CUDA_VISIBLE_DEVICES" >>log'
#gpuherd name=never gpus=9
true
sh -c 'test -e flag'
"""
    )
    words = ("--simulate", "2x40GB", "batch", file, *FAST)
    ran = gpuherd(*words, cwd=tmp_path)
    assert ran.returncode == ExitCode.FAILED, ran.stderr
    out = tmp_path / "commands_results"
    log = (tmp_path / "log").read_text().splitlines()
    assert log.index("late 0,1") < log.index("needs late two words")
    assert any(line in log for line in ("a 1 0", "a 1 1"))
    assert "3 done, 2 failed" in ran.stdout
    assert "never: asks for 9 GPUs; there are 2 to use" in ran.stdout
    assert json.loads((out / "run.json").read_text())["jobs"] == 5
    assert list((out / "logs").glob("batch_*.log"))

    # An inserted line moves the others; those that are done stay done, and what failed is tried anew.
    file.write_text("true\n" + file.read_text().replace("#gpuherd name=never gpus=9\n", ""))
    (tmp_path / "flag").touch()
    before = attempts(out)
    ran = gpuherd(*words, cwd=tmp_path)
    assert ran.returncode == ExitCode.OK, ran.stdout
    assert len(attempts(out)) - len(before) == 3  # the new line, "never" without its need, and the one that failed
    assert (tmp_path / "log").read_text().splitlines() == log


def test_a_start_that_is_refused_leaves_the_record_of_the_run_that_is_there(tmp_path: Path, gpuherd: Command) -> None:
    """It says what the queue beside it holds: it is written under the same lock as the queue is changed."""
    file, out = tmp_path / "commands.txt", tmp_path / "commands_results"
    file.write_text("true\n")
    words = ("--simulate", "1x40GB", "batch", file, *FAST, "--retries", "0")
    assert gpuherd(*words, cwd=tmp_path).returncode == ExitCode.OK
    before = (out / "run.json").read_bytes()
    refused = gpuherd(*words, "--gpus", "7", cwd=tmp_path)
    assert refused.returncode == ExitCode.USAGE, refused.stderr
    assert (out / "run.json").read_bytes() == before
    with closing(DispatcherLock(out / "queue.lock")):
        assert gpuherd(*words, "--retries", "1", cwd=tmp_path).returncode == ExitCode.BUSY
    assert (out / "run.json").read_bytes() == before


def test_the_plan_of_a_dry_run(tmp_path: Path, gpuherd: Command) -> None:
    (tmp_path / "jobs.yaml").write_text(
        "jobs: [{name: t, command: 'echo {x}', matrix: {x: [1, 2]}, mem: 1GB}, {command: big, gpus: 3}]"
    )
    words = ("--simulate", "2x40GB", "batch", "jobs.yaml", "--dry-run")
    ran = gpuherd(*words, cwd=tmp_path)
    assert ran.returncode == ExitCode.FAILED
    assert "2 to do, 0 done, 1 refused; nothing was started" in ran.stdout
    assert "job-0002 asks for 3 GPUs; there are 2 to use" in ran.stdout
    assert max(len(line) for line in ran.stdout.splitlines()) <= 80
    told = json.loads(gpuherd(*words, "--json", cwd=tmp_path).stdout)
    assert [job["name"] for job in told["jobs"]] == ["t-x1", "t-x2", "job-0002"]
    assert told["jobs"][1]["argv"] == ["echo", "2"]
    assert [job["state"] for job in told["jobs"]] == ["to do", "to do", "refused"]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".leases"] == ["jobs.yaml"]


def test_a_file_with_an_error_in_each_line_does_not_flood_the_screen(tmp_path: Path, gpuherd: Command) -> None:
    (tmp_path / "jobs.txt").write_text("a | b\n" * 5000)
    ran = gpuherd("batch", "jobs.txt", "--json", cwd=tmp_path)
    assert ran.returncode == ExitCode.BAD_INPUT
    assert len(ran.stderr.splitlines()) == 101
    assert ran.stderr.splitlines()[-1] == "gpuherd: … and 4900 more"
    assert len(json.loads(ran.stdout)["errors"]) == 5000


def test_jobs_whose_file_says_so_share_a_gpu(tmp_path: Path, gpuherd: Command) -> None:
    lines = [
        f"#gpuherd mem=1GB share timeout=30s retries=0\ntouch {one}; until [ -e {other} ]; do sleep 0.05; done\n"
        for one, other in (("a", "b"), ("b", "a"))
    ]
    (tmp_path / "jobs.txt").write_text("".join(lines))
    ran = gpuherd("--simulate", "1x40GB", "batch", "jobs.txt", "--shell", *FAST, cwd=tmp_path)
    assert ran.returncode == ExitCode.OK, ran.stdout


def test_what_needs_a_job_that_can_not_run_is_refused_with_it(tmp_path: Path, gpuherd: Command) -> None:
    text = "#gpuherd name=big gpus=9\ntrue\n#gpuherd name=b needs=a\ntrue\n#gpuherd name=a needs=big\ntrue\ntrue\n"
    (tmp_path / "jobs.txt").write_text(text)
    words = ("--simulate", "2x40GB", "batch", "jobs.txt", "--dry-run", "--json")
    told = json.loads(gpuherd(*words, cwd=tmp_path).stdout)["jobs"]
    assert [(job["name"], job["state"], job["reason"]) for job in told] == [
        ("big", "refused", "asks for 9 GPUs; there are 2 to use"),
        ("b", "refused", "needs a, which can't run"),
        ("a", "refused", "needs big, which can't run"),
        ("line-0007", "to do", None),
    ]


def test_a_plan_has_a_line_a_job_on_a_terminal_and_every_job_in_a_pipe() -> None:
    name = "train-" + "a" * 50
    jobs = [PlannedJob(Job(name=f"{name}{number:03d}", argv=("echo", "w " * 200))) for number in range(100)]
    out = io.StringIO()
    print_plan(Console(file=out, width=80, force_terminal=True, color_system=None), jobs)
    told = out.getvalue().splitlines()
    assert [line.split()[0] for line in told[1:61]] == [f"{name}{number:03d}" for number in range(60)]
    assert max(map(len, told)) <= 80
    assert "… and 40 more jobs" in out.getvalue()
    out = io.StringIO()
    print_plan(Console(file=out, width=80), jobs)
    assert len(out.getvalue().splitlines()) == 1 + 100 + 2
    assert out.getvalue().splitlines()[100].endswith("w w '")


def test_commands_on_standard_input_with_a_shell(tmp_path: Path, gpuherd: Command) -> None:
    ran = gpuherd(
        "batch",
        "-",
        "--shell",
        "--output-dir",
        "out",
        "--json",
        cwd=tmp_path,
        given="echo a | tr a b > x && echo $HOME\n",
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "x").read_text() == "b\n"
    told = json.loads(ran.stdout)
    assert told["counts"] == {"done": 1, "failed": 0, "waiting": 0, "cancelled": 0}
    assert (tmp_path / "out" / "logs" / "line-0001.1.log").read_text().strip() == os.environ["HOME"]


@pytest.mark.parametrize(
    ("content", "words", "code", "told"),
    [
        ("a | b\n#gpuherd gpu=1\nc\n", [], ExitCode.BAD_INPUT, ["line 1: '|'", "line 2: unknown key 'gpu'; did you"]),
        (
            "#gpuherd name=a needs=b\nx\n#gpuherd name=b needs=a\ny\n",
            [],
            ExitCode.BAD_INPUT,
            ["'a' needs 'b' needs 'a'"],
        ),
        ("", [], ExitCode.BAD_INPUT, ["there is no command in it"]),
        (None, [], ExitCode.MISSING, ["can't read commands.txt"]),
        ("true\n", ["--max-gpu", "3"], ExitCode.USAGE, ["did you mean --max-gpus?"]),
        ("true\n", ["--order", "fast"], ExitCode.USAGE, ["longest"]),
        ("true\n", ["--timeout", "soon"], ExitCode.USAGE, ["is not a length of time"]),
        ("true\n", ["--output-dir", "/proc/none"], ExitCode.CANNOT_WRITE, ["/proc/none"]),
    ],
)
def test_what_is_refused_before_anything_starts(
    tmp_path: Path, content: str | None, words: list[str], code: int, told: list[str], gpuherd: Command
) -> None:
    if content is not None:
        (tmp_path / "commands.txt").write_text(content)
    ran = gpuherd("batch", "commands.txt", *words, cwd=tmp_path)
    assert ran.returncode == code, ran.stderr
    assert all(word in ran.stderr for word in told), ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "commands_results" / "queue.sqlite").exists()
    if code != ExitCode.USAGE:
        error = json.loads(gpuherd("batch", "commands.txt", *words, "--json", cwd=tmp_path).stdout)
        assert error["exit_code"] == code


def test_a_job_that_could_never_run_is_refused_and_the_others_run(tmp_path: Path, gpuherd: Command) -> None:
    (tmp_path / "commands.txt").write_text("#gpuherd gpus=9 name=never\ntrue\n#gpuherd mem=50GB\ntrue\ntrue\n")
    ran = gpuherd("--simulate", "2x40GB", "batch", "commands.txt", *FAST, "--json", cwd=tmp_path)
    told = json.loads(ran.stdout)
    assert told["counts"]["done"] == 1
    reasons = {failure["job"]: failure["reason"] for failure in told["failures"]}
    assert "asks for 9 GPUs" in reasons["never"]
    assert "asks for 51200 MB" in reasons["line-0004"]


def test_a_killed_run_is_gone_on_with(tmp_path: Path, gpuherd: Command) -> None:
    (tmp_path / "commands.txt").write_text("sh -c 'echo one >>log; sleep 1; echo end >>log'\nsh -c 'echo two >>log'\n")
    words = [sys.executable, "-m", "gpuherd", "batch", "commands.txt", "--cpu-jobs", "1"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until((tmp_path / "log").exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ran = gpuherd("batch", "commands.txt", "--cpu-jobs", "1", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert (tmp_path / "log").read_text().split() == ["one", "end", "two"]


def test_jobs_share_where_they_say_how_much_they_need(tmp_path: Path, gpuherd: Command) -> None:
    (tmp_path / "commands.txt").write_text("#gpuherd mem=1GB\ntrue\n#gpuherd mem=1GB gpus=2\ntrue\ntrue\n")
    ran = gpuherd("--simulate", "2x40GB", "batch", "commands.txt", "--share", *FAST, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout
    with closing(Queue(tmp_path / "commands_results" / "queue.sqlite")) as queue:
        assert {job.name: job.share for job in queue.jobs()} == {
            "line-0002": True,
            "line-0004": False,
            "line-0005": False,
        }


def test_the_users_settings_are_the_defaults(tmp_path: Path, gpuherd: Command) -> None:
    config = Path(os.environ["XDG_CONFIG_HOME"], "gpuherd", "config.toml")
    config.parent.mkdir(parents=True)
    config.write_text("[defaults]\nmax_gpus = 1\ngpus_per_job = 2\n")
    (tmp_path / "commands.txt").write_text("true\n")
    words = ("--simulate", "2x40GB", "batch", "commands.txt", "--dry-run", "--json")
    told = json.loads(gpuherd(*words, cwd=tmp_path).stdout)
    assert told["jobs"][0]["reason"] == "asks for 2 GPUs; max_gpus is 1"
    told = json.loads(gpuherd(*words, "--max-gpus", "2", cwd=tmp_path).stdout)
    assert told["jobs"][0]["reason"] is None
    config.write_text("[defaults]\nmax_gpu = 1\n")
    assert "did you mean max_gpus" in gpuherd(*words, cwd=tmp_path).stderr
