"""Options and settings that change while a dispatcher is at work: what holds from then on, and what is left alone."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.errors import NoSuchGpu, UsageError
from gpuherd.jobs import Dispatcher, DispatchOptions, Job, Queue, RunDirectory
from gpuherd.jobs.control.client import poke
from gpuherd.jobs.control.server import changed_defaults
from gpuherd.jobs.settings import user_file
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]
_LAUNCHER = Path(__file__).parents[1] / "faults" / "launcher.py"


def settings(text: str) -> None:
    user_file().parent.mkdir(parents=True, exist_ok=True)
    user_file().write_text(text)


def gpuherd(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "gpuherd", *words], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


class Up:
    """``gpuherd up --foreground`` on a queue of one's own."""

    def __init__(self, folder: Path, *words: str):
        os.environ["GPUHERD_QUEUE"] = str(folder)
        self.run = RunDirectory(folder)
        self.out = folder.with_suffix(".out").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuherd", "up", "--foreground", *words], stdout=self.out, stderr=self.out
        )
        wait_until(lambda: self.process.poll() is not None or (self.run.control_fifo.exists() and poke(self.run)))

    def add(self, *jobs: Job) -> None:
        with Queue(self.run.queue, check=False) as queue:
            queue.add(jobs)
        poke(self.run)

    def states(self) -> dict[str, str]:
        with Queue(self.run.queue, check=False) as queue:
            return {name: str(state) for name, state in queue.states().items()}

    def out_text(self) -> str:
        return " ".join(Path(self.out.name).read_text(errors="replace").split())

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.out.close()


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("GPUHERD_QUEUE", "")
    made: list[Up] = []

    def start(*words: str) -> Up:
        made.append(Up(tmp_path / "queue", *words))
        return made[-1]

    yield start
    for each in made:
        each.end()


def test_a_settings_file_that_is_read_again(up: Callable[..., Up]) -> None:
    settings("[defaults]\nmax_concurrent = 1\n")
    served = up("--cpu-jobs", "4")
    jobs = [Job(name=f"j{i}", argv=("sleep", "60"), gpus=0) for i in range(3)]
    served.add(*jobs)
    wait_until(lambda: list(served.states().values()).count("running") == 1)
    settings("[defaults]\nmax_concurent = 3\n")
    served.process.send_signal(1)
    time.sleep(0.5)
    assert list(served.states().values()).count("running") == 1  # the slip changes nothing
    settings("")  # no limit any more
    served.process.send_signal(1)
    wait_until(lambda: list(served.states().values()).count("running") == 3)


def test_another_engine_in_a_settings_file_is_for_the_next_start(up: Callable[..., Up]) -> None:
    settings("")
    served = up("--cpu-jobs", "1")
    served.add(Job(name="a", argv=("true",), gpus=0))
    wait_until(lambda: served.states() == {"a": "done"})
    settings('[defaults]\nengine = "slurm"\npartition = "gpu"\nmax_checks = 4\n')
    served.process.send_signal(1)
    wait_until(lambda: "read the settings again" in served.out_text(), told=served.out_text)
    assert "new: max_checks; only from the next start on: engine" in served.out_text()


def test_what_a_settings_file_changes() -> None:
    known = DispatchOptions(max_gpus=2, max_checks=3)
    assert changed_defaults(known, {"max_checks": 3}, {"max_checks": 5, "max_gpus": 7}) == {"max_checks": 5}
    assert changed_defaults(known, {"max_checks": 3}, {}) == {"max_checks": DispatchOptions().max_checks}
    assert changed_defaults(known, {}, {}) == {}
    assert changed_defaults(DispatchOptions(), {}, {"order": "longest"}) == {"order": "longest"}


def test_gpus_that_are_not_there_are_refused_when_they_are_named(
    tmp_path: Path, standin: Standin, up: Callable[..., Up]
) -> None:
    """Not when the first job wants one, perhaps days later."""
    standin("2x40GB")
    run = RunDirectory(tmp_path / "other")
    run.create()
    with Queue(run.queue) as queue, pytest.raises(NoSuchGpu, match="9"):
        Dispatcher(queue, run, DispatchOptions(gpu_list=(9,)), serve=True)
    served = up("--max-checks", "1", "--check-interval", "0.02")
    assert "9" in gpuherd("set", "--gpus", "9")
    served.add(Job(name="j", argv=("true",), gpus=1))
    wait_until(lambda: served.states() == {"j": "done"})


def test_a_limit_that_is_set_for_now_refuses_nothing_for_good(standin: Standin, up: Callable[..., Up]) -> None:
    standin("2x40GB")
    served = up("--max-checks", "1", "--check-interval", "0.02")
    gpuherd("set", "--max-gpus", "1")
    served.add(Job(name="two", argv=("true",), gpus=2), Job(name="one", argv=("true",), gpus=1))
    wait_until(lambda: served.states()["one"] == "done")
    assert served.states()["two"] == "waiting"
    gpuherd("set", "--max-gpus", "2")
    wait_until(lambda: served.states()["two"] == "done")


def test_large_jobs_that_cannot_be_placed_hide_no_small_one(standin: Standin, up: Callable[..., Up]) -> None:
    """More at the head of the queue than a decision looks at."""
    standin("4x40GB")
    served = up("--max-checks", "1", "--check-interval", "0.02")
    gpuherd("set", "--max-gpus", "1")
    wide = [Job(name=f"wide{number}", argv=("true",), gpus=2) for number in range(40)]
    served.add(*wide, *(Job(name=f"one{number}", argv=("true",), gpus=1) for number in range(20)))
    wait_until(lambda: sum(state == "done" for state in served.states().values()) == 20)
    assert {served.states()[job.name] for job in wide} == {"waiting"}
    gpuherd("set", "--max-gpus", "2")
    wait_until(lambda: set(served.states().values()) == {"done"})


def test_more_gpus_than_the_user_may_ever_hold_are_refused(standin: Standin, up: Callable[..., Up]) -> None:
    standin("4x40GB")
    settings("[limits]\nmax_gpus = 2\n")
    served = up("--max-checks", "1", "--check-interval", "0.02")
    served.add(Job(name="three", argv=("true",), gpus=3), Job(name="two", argv=("true",), gpus=2))
    wait_until(lambda: served.states() == {"three": "failed", "two": "done"})


def test_a_policy_that_comes_to_exclude_a_gpu_takes_it_out_of_the_runs_own_list(
    tmp_path: Path, standin: Standin, up: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = standin("2x40GB")
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    monkeypatch.setenv("GPUHERD_POLICY", str(policy))
    served = up("--max-checks", "1", "--check-interval", "0.02", "--gpus", "0,1", "--max-gpus", "2")
    end = tmp_path / "end"
    wait_for_it = ("/bin/sh", "-c", 'while [ ! -e "$0" ]; do sleep 0.05; done', str(end))
    served.add(*(Job(name=f"long{number}", argv=wait_for_it, gpus=1) for number in range(2)))
    wait_until(lambda: served.states() == {"long0": "running", "long1": "running"})

    policy.write_text("exclude_gpus = [1]\n")
    served.process.send_signal(1)
    wait_until(lambda: "nothing new is started there" in served.out_text())
    assert "GPU 1 is not for gpuherd to use any more" in served.out_text()
    assert served.states() == {"long0": "running", "long1": "running"}
    end.touch()
    served.add(*(Job(name=f"one{number}", argv=("sleep", "0.1"), gpus=1) for number in range(4)))
    served.add(Job(name="two", argv=("true",), gpus=2))
    wait_until(lambda: sum(state == "done" for state in served.states().values()) == 6)
    with Queue(served.run.queue, check=False) as queue:
        used = [attempt.gpu_uuids for attempt in queue.attempts() if attempt.job.startswith("one")]
    assert used == [(machine.uuid(0),)] * 4
    assert served.states()["two"] == "waiting"  # not given up: the policy may be changed back

    policy.write_text("exclude_gpus = [0, 1]\n")  # not one is left: no job goes to the CPU instead
    served.process.send_signal(1)
    wait_until(lambda: "GPU 0 is not for gpuherd to use any more" in served.out_text())
    served.add(Job(name="later", argv=("true",), gpus=1))
    wait_until(lambda: "keeps all GPUs from gpuherd" in gpuherd("status", str(served.run.root)))
    policy.write_text("")
    served.process.send_signal(1)
    wait_until(lambda: set(served.states().values()) == {"done"})


def test_what_a_family_used_on_a_larger_gpu_keeps_no_job_from_a_smaller_one(
    standin: Standin, up: Callable[..., Up]
) -> None:
    standin("1x40GB")
    served = up("--max-checks", "1", "--check-interval", "0.02")
    with Queue(served.run.queue, check=False) as queue:
        queue.learn("f", 70_000)
    served.add(Job(name="j", argv=("true",), gpus=1, memory_mb=5_000, share=True, family="f"))
    wait_until(lambda: served.states() == {"j": "done"})


@pytest.mark.slow
def test_quiet_hours_begin_and_end_while_a_dispatcher_is_at_work(tmp_path: Path, standin: Standin) -> None:
    standin("1x40GB")
    settings('[limits]\nquiet_hours = ["12:00-12:01"]\n')
    clock, root = tmp_path / "clock", tmp_path / "run"

    def set_clock(hour: int, minute: int, second: float) -> None:
        wanted = datetime.now().replace(hour=hour, minute=minute, second=0, microsecond=0).timestamp() + second
        with clock.open("r+b" if clock.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("d", wanted - time.time()))

    set_clock(11, 30, 0.0)
    marks = tmp_path / "marks"
    marks.touch()
    words = ["/bin/sh", "-c", 'echo >>"$1"; sleep 0.3', "job", str(marks)]
    jobs = [{"name": f"j{i}", "argv": words, "needs": [], "retries": 0} for i in range(400)]
    options = {"max_checks": 1, "check_interval": 0.02}
    plan = {"jobs": jobs, "options": options, "root": str(root), "grace_s": 0.3, "clock": str(clock)}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    process = subprocess.Popen([sys.executable, str(_LAUNCHER), str(tmp_path / "plan.json")], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(marks.read_text()) > 1)
        set_clock(11, 59, 57.0)
        wait_until(lambda: "quiet hours" in (root / "standing.json").read_text())  # by itself
        begun = len(marks.read_text())
        assert begun < 2 * 400
        time.sleep(1.0)
        assert len(marks.read_text()) == begun  # quiet
        set_clock(12, 0, 50.0)
        poke(RunDirectory(root))
        time.sleep(0.5)
        assert len(marks.read_text()) == begun  # quiet still
        wait_until(lambda: len(marks.read_text()) > begun)  # by itself
    finally:
        process.terminate()
        process.wait(30)


def test_a_terminal_that_is_closed_leaves_the_run_at_work(tmp_path: Path) -> None:
    """Its controlling terminal goes: SIGHUP, and every write fails with EIO."""
    program = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from rich.console import Console
from gpuherd.jobs import DispatchOptions, Job, RunDirectory, run_jobs
from gpuherd.jobs.monitor.display import display
with display(Console(force_terminal=True)) as shown:
    jobs = [Job(name=f"j{i}", argv=("sleep", "0.5"), gpus=0) for i in range(4)]
    outcome = run_jobs(jobs, DispatchOptions(cpu_jobs=1), RunDirectory(sys.argv[1]), display=shown)
open(sys.argv[1] + ".done", "w").write(str(outcome.done))
"""
    ours, theirs = pty.openpty()
    root = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    wait_until(lambda: b"running" in os.read(ours, 65_536))
    os.close(ours)
    process.wait(100)
    assert root.with_name("run.done").read_text() == "4"


def test_a_batch_keeps_out_of_the_users_own_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuherd.batch.batch import run_folder
    from gpuherd.batch.options import BatchOptions

    monkeypatch.setenv("GPUHERD_QUEUE", str(tmp_path / "queue"))
    (tmp_path / "link").symlink_to(tmp_path / "queue")
    for name in ("queue", "link"):
        with pytest.raises(UsageError, match="your own queue"):
            run_folder("jobs.txt", BatchOptions(output_dir=str(tmp_path / name)))
    assert run_folder("jobs.txt", BatchOptions(output_dir=str(tmp_path / "other"))).root == tmp_path / "other"
