"""``gpuherd up`` and ``down``: a dispatcher that nobody has to watch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.batch.daemon import CannotStartUp, down, up
from gpuherd.batch.user_queue import open_folder, submit, with_surroundings
from gpuherd.errors import ExitCode, QueueBusy
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.standin.machine import SimulatedMachine

FAST = ("--max-checks", "1", "--check-interval", "0.02")
QUICK = DispatchOptions(max_checks=1, check_interval=0.02, max_gpus=8)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    monkeypatch.setenv("GPUHERD_QUEUE", str(tmp_path / "queue"))
    run = open_folder()
    yield run
    pid = DispatcherLock.holder(run.lock)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: DispatcherLock.holder(run.lock) is None)


def gpuherd(*words: str, **how: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuherd", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **how)  # type: ignore[call-overload,no-any-return]


def state(run: RunDirectory, name: str) -> JobState | None:
    with closing(Queue(run.queue, check=False)) as queue:
        found = queue.job(name)
    return None if found is None else found[1]


def add(script: str, tmp_path: Path, **said: object) -> str:
    job = Job(**{"name": "new", **said}, argv=("sh", "-c", script))  # type: ignore[arg-type]
    return submit(with_surroundings(job, os.environ, str(tmp_path)), named="name" in said).job.name


def test_jobs_that_were_submitted_so_share_a_gpu(
    own: RunDirectory, tmp_path: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    standin("1x40GB")
    # Each waits for the other, so that both end only if they run together.
    for one, other in (("a", "b"), ("b", "a")):
        script = f"touch {tmp_path}/{one}; until [ -e {tmp_path}/{other} ]; do sleep 0.05; done"
        add(script, tmp_path, name=one, memory_mb=1000, share=True, timeout_s=30.0, retries=0)
    assert gpuherd("up", *FAST).returncode == 0
    wait_until(lambda: all(state(own, name) not in (JobState.WAITING, JobState.RUNNING) for name in ("a", "b")))
    assert (state(own, "a"), state(own, "b")) == (JobState.DONE, JobState.DONE)


def test_it_works_off_what_was_there_and_what_comes(
    own: RunDirectory, tmp_path: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    standin("2x40GB")
    first = add("echo $CUDA_VISIBLE_DEVICES >first", tmp_path)
    began = gpuherd("up", *FAST, "--json")
    assert began.returncode == 0, began.stderr
    told = json.loads(began.stdout)
    assert told["pid"] == DispatcherLock.holder(own.lock)
    wait_until(lambda: state(own, first) is JobState.DONE)
    second = add("echo $CUDA_VISIBLE_DEVICES >second", tmp_path, gpus=2)
    wait_until(lambda: state(own, second) is JobState.DONE)
    assert (tmp_path / "second").read_text() == "0,1\n"
    assert f"{second}: done" in Path(told["log"]).read_text()
    submitted = gpuherd("submit", "--json", "--", "true")
    assert json.loads(submitted.stdout)["worker"] == told["pid"]
    assert submitted.stderr == ""
    ended = gpuherd("down")
    assert ended.returncode == 0
    wait_until(lambda: DispatcherLock.holder(own.lock) is None)
    assert gpuherd("down").stdout == "nothing works your queue off\n"


def test_there_is_one_a_queue(own: RunDirectory) -> None:
    pid = up(QUICK)
    again = gpuherd("up")
    assert again.returncode == ExitCode.BUSY
    assert f"pid {pid} works off" in again.stderr
    with pytest.raises(QueueBusy):
        up(QUICK)
    assert gpuherd("up", "--foreground").returncode == ExitCode.BUSY


def test_it_outlives_its_terminal_and_is_nobodys_child(own: RunDirectory, tmp_path: Path) -> None:
    # A session of its own with a terminal of its own, as in a window that is then closed.
    script = f"import pty, sys; sys.exit(pty.spawn([{sys.executable!r}, '-m', 'gpuherd', 'up']) >> 8)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False).returncode == 0
    pid = DispatcherLock.holder(own.lock)
    assert pid is not None
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert int(status["PPid"]) != os.getpid()
    assert os.getsid(pid) != os.getsid(0)
    assert Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[4] == "0"  # no terminal
    assert os.readlink(f"/proc/{pid}/cwd") == str(own.root)
    os.kill(pid, signal.SIGHUP)
    name = add("true", tmp_path)
    wait_until(lambda: state(own, name) is JobState.DONE)
    assert DispatcherLock.holder(own.lock) == pid


def test_a_job_has_the_environment_of_its_own_terminal_only(
    own: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_UP", "1")
    up(QUICK)
    monkeypatch.delenv("OF_UP")
    monkeypatch.setenv("OF_SUBMIT", "two words")
    name = add('echo "[$OF_UP] [$OF_SUBMIT]" >seen', tmp_path)
    wait_until(lambda: state(own, name) is JobState.DONE)
    assert (tmp_path / "seen").read_text() == "[] [two words]\n"


def test_what_it_is_told_is_not_on_its_command_line(own: RunDirectory) -> None:
    pid = up(DispatchOptions(webhook="http://127.0.0.1:9/secret"))
    assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_start_that_fails_says_why(own: RunDirectory, standin: Callable[..., SimulatedMachine]) -> None:
    standin("1x40GB")
    ran = gpuherd("up", "--gpu-list", "7")
    assert ran.returncode == ExitCode.USAGE
    assert "there is no GPU '7'" in ran.stderr
    assert DispatcherLock.holder(own.lock) is None
    own.queue.write_bytes(b"no database" * 1000)
    ran = gpuherd("up")
    assert ran.returncode == ExitCode.BAD_INPUT
    assert "damaged" in ran.stderr
    with pytest.raises(CannotStartUp, match="damaged"):
        up(QUICK)


def test_down_lets_running_jobs_end_and_now_puts_them_back(own: RunDirectory, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    up(QUICK)
    slow = add("cat fifo", tmp_path)
    wait_until(lambda: state(own, slow) is JobState.RUNNING)
    answer = down()
    assert answer is not None
    assert answer.ok
    later = add("true", tmp_path)
    assert state(own, slow) is JobState.RUNNING
    (tmp_path / "fifo").write_text("")
    wait_until(lambda: DispatcherLock.holder(own.lock) is None)
    assert (state(own, slow), state(own, later)) == (JobState.DONE, JobState.WAITING)

    up(QUICK)
    wait_until(lambda: state(own, later) is JobState.DONE)
    endless = add("sleep 1000", tmp_path)
    wait_until(lambda: state(own, endless) is JobState.RUNNING)
    assert gpuherd("down", "--now").returncode == 0
    assert DispatcherLock.holder(own.lock) is None
    assert state(own, endless) is JobState.WAITING


def test_a_killed_one_is_followed_by_the_next(own: RunDirectory, tmp_path: Path) -> None:
    pid = up(QUICK)
    slow = add("echo begun >>log; sleep 0.5; echo ended >>log", tmp_path)
    wait_until(lambda: (tmp_path / "log").exists())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: DispatcherLock.holder(own.lock) is None)
    assert up(QUICK) != pid
    wait_until(lambda: state(own, slow) is JobState.DONE)
    assert (tmp_path / "log").read_text() == "begun\nended\n"


def test_in_the_foreground(own: RunDirectory, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gpuherd", "up", "--foreground"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_until(lambda: DispatcherLock.holder(own.lock) == process.pid)
        name = add("true", tmp_path)
        wait_until(lambda: state(own, name) is JobState.DONE)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == ExitCode.OK  # nothing was left to do
    assert f"{name}: done" in out


def test_a_dispatcher_that_waits_for_days_carries_nothing_that_it_does_not_use() -> None:
    program = (
        "import sys, gpuherd.batch.daemon, gpuherd.jobs.run, gpuherd.jobs.gpu.watch;"
        "print(*sorted(name.split('.')[0] + ('.' + name.split('.')[1] if '.' in name else '') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "gpuherd.jobs" in loaded
    heavy = {"rich", "textual", "yaml", "email", "http", "urllib.request", "asyncio", "multiprocessing", "numpy"}
    assert not loaded & heavy


@pytest.mark.parametrize(("engine", "kept"), [("local", None), ("slurm", "/lib:{here}/src")])
def test_gpuherd_is_found_again_on_the_nodes_of_a_cluster(tmp_path: Path, engine: str, kept: str | None) -> None:
    """Where PYTHONPATH is how it was found here, as by a module of a cluster's."""
    script = (
        "import os; from gpuherd.batch.daemon import forget_environment;"
        f" os.environ.update(PYTHONPATH='/lib::src', MINE='x'); forget_environment({engine!r});"
        " print(os.environ.get('PYTHONPATH'), os.environ.get('MINE'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == [str(kept and kept.format(here=tmp_path)), "None"]
