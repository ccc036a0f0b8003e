"""SIGKILL at any instant: no job is lost, none runs twice to success, no GPU is held twice, nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.patience import Gate

from gpuherd.errors import ExitCode
from gpuherd.standin.machine import SimulatedMachine

NewUser = Callable[[str], Any]
Overlaps = Callable[[list[list[str]]], list[str]]


def kill(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.communicate(timeout=60)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_killed_at_random_instants(
    new_user: NewUser, four_gpus: SimulatedMachine, find_overlaps: Overlaps, seed: int
) -> None:
    chance = random.Random(seed)
    user = new_user("run")
    jobs = [user.job(f"j{i}", chance.choice([0, 0.02, 0.1])) for i in range(30)]
    kills = 0
    for _ in range(25):
        process = user.start(jobs)
        try:
            process.communicate(timeout=chance.uniform(0.1, 0.35))
        except subprocess.TimeoutExpired:
            kill(process)
            kills += 1
            continue
        assert process.returncode == 0
        break
    else:
        code, told = user.run(jobs)
        assert code == 0, told
    assert kills > 0
    ends = Counter(line[1] for line in user.lines() if line[0] == "end")
    starts = Counter(line[1] for line in user.lines() if line[0] == "start")
    # A dispatcher's death does not touch what runs, so that nothing even starts a second time.
    assert ends == starts == {f"run-j{i}": 1 for i in range(30)}
    assert find_overlaps(user.lines()) == []
    assert user.processes() == []


def test_a_running_job_is_taken_over_with_its_exit_status(
    new_user: NewUser, four_gpus: SimulatedMachine, tmp_path: Path
) -> None:
    """Three fates while nobody watches: runs on, ends well, fails."""
    user, gate = new_user("run"), Gate(tmp_path / "gate")
    jobs = [user.job("long"), user.job("short", 0.4), user.job("bad", 0.4, retries=0)]
    ends = f"echo end run-long >>{user.events}; : >{jobs[0]['result']}"
    jobs[0]["argv"] = ["/bin/sh", "-c", f"echo start run-long >>{user.events}; {gate.wait}; {ends}"]
    jobs[2]["argv"] = ["/bin/sh", "-c", f"echo start run-bad >>{user.events}; sleep 0.4; echo 'KeyError: 3'; exit 65"]
    process = user.start(jobs)
    user.wait_until(lambda: sum(line[0] == "start" for line in user.lines()) == 3)
    kill(process)
    time.sleep(0.6)
    process, told = user.start([*jobs[:2], {**jobs[2], "priority": 1}]), ""
    assert process.stdout is not None
    for line in process.stdout:
        told += line
        if line.startswith("adopted long"):
            gate.open()
    assert process.wait(60) == ExitCode.FAILED
    process.stdout.close()
    assert "adopted long: left running by an earlier gpuherd; taken over" in told
    assert "failed bad: failed (bad input): exit code 65: KeyError: 3" in told
    assert "done short" in told
    assert Counter(line[1] for line in user.lines() if line[0] == "end") == {"run-long": 1, "run-short": 1}


def test_a_gpu_of_a_running_job_stays_taken_after_the_dispatchers_death(
    new_user: NewUser, four_gpus: SimulatedMachine, find_overlaps: Overlaps
) -> None:
    """The lease is the job's own: another user's dispatcher keeps off, though the first one is dead."""
    alice, bob = new_user("alice"), new_user("bob")
    process = alice.start([alice.job(f"j{i}", 20) for i in range(3)])
    alice.wait_until(lambda: len(alice.lines()) == 3)
    kill(process)
    assert bob.run([bob.job(f"j{i}", 0.05) for i in range(6)])[0] == 0
    assert find_overlaps(bob.lines()) == []
    assert len({line[2] for line in bob.lines() if line[1].startswith("bob")}) == 1
    for pid in alice.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_is_tried_again(new_user: NewUser, four_gpus: SimulatedMachine) -> None:
    user = new_user("run")
    process = user.start([user.job("j", 0.5)])
    user.wait_until(lambda: len(user.lines()) == 1)
    for pid in user.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "attempt 1 failed (killed)" in told
    assert [line[0] for line in user.lines()] == ["start", "start", "end"]


def test_dispatcher_and_job_killed_together(new_user: NewUser, four_gpus: SimulatedMachine) -> None:
    user = new_user("run")
    process = user.start([user.job("j", 0.5)])
    user.wait_until(lambda: len(user.lines()) == 1)
    pids = user.processes()
    kill(process)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code, told = user.run([user.job("j", 0.5)])
    assert code == 0
    assert "gone without leaving an exit status" in told
    assert [line[0] for line in user.lines()] == ["start", "start", "end"]


def test_after_a_reboot_what_ran_is_queued_again_without_losing_a_try(
    new_user: NewUser, four_gpus: SimulatedMachine
) -> None:
    user = new_user("run")
    process = user.start([user.job("j", 0.4)])
    user.wait_until(lambda: len(user.lines()) == 1)
    kill(process)
    user.wait_until(lambda: user.processes() == [])
    with sqlite3.connect(user.root / "queue.sqlite") as queue:  # as the file looks after a restart of the machine
        # The pid is now that of some other process.
        queue.execute("UPDATE attempts SET boot = 'an earlier boot', pid = ?", (os.getpid(),))
    queue.close()
    os.unlink(str(user.job("j")["result"]))
    code, told = user.run([user.job("j", 0.1, retries=0)])
    assert code == 0, told
    assert "requeued j: the machine was restarted while it ran" in told


def test_an_attempt_without_go_ahead_is_queued_again(new_user: NewUser, four_gpus: SimulatedMachine) -> None:
    """The instant between the record and the go-ahead, which no random kill is sure to hit."""
    user = new_user("run")
    assert user.run([user.job("j", 0)])[0] == 0
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with sqlite3.connect(user.root / "queue.sqlite") as queue:
        queue.execute("UPDATE attempts SET state = 'running', ended_at = NULL, pid = ?", (gone.pid,))
        queue.execute("UPDATE jobs SET state = 'running'")
    queue.close()
    code, told = user.run([user.job("j", 0, retries=0)])
    assert code == 0, told
    assert "requeued j: gpuherd ended before it gave the go-ahead" in told
    assert Counter(line[0] for line in user.lines()) == {"start": 2, "end": 2}


def test_the_first_interrupt_drains(new_user: NewUser, four_gpus: SimulatedMachine) -> None:
    user = new_user("run")
    jobs = [user.job(f"j{i}", 0.5) for i in range(8)]
    process = user.start(jobs)
    user.wait_until(lambda: len(user.lines()) == 4)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "nothing new is started; what runs goes on to its end (4 running)" in told
    assert Counter(line[0] for line in user.lines()) == {"start": 4, "end": 4}
    assert user.run(jobs)[0] == 0
    assert Counter(line[0] for line in user.lines()) == {"start": 8, "end": 8}


@pytest.mark.parametrize(("signals", "code"), [((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGTERM,), 143)])
def test_stopping_puts_running_jobs_back(
    new_user: NewUser, four_gpus: SimulatedMachine, signals: tuple[int, ...], code: int
) -> None:
    user = new_user("run")
    jobs = [user.job(f"j{i}", 30) for i in range(5)]
    # One that does not listen to SIGTERM.
    jobs[1]["argv"] = ["/bin/sh", "-c", f"trap '' TERM; echo start deaf >>{user.events}; while :; do sleep 0.05; done"]
    process = user.start(jobs)
    user.wait_until(lambda: len(user.lines()) == 4)
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.1)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert time.monotonic() - began < 25
    assert user.processes() == []
    assert told.count("requeued") == 4
    assert all(line[0] == "start" for line in user.lines())


def test_draining_costs_no_processor_time(new_user: NewUser, four_gpus: SimulatedMachine) -> None:
    """Jobs end while nothing new may be started: no reason for the loop to turn."""
    user = new_user("run")
    process = user.start([user.job("short", 0.6), *(user.job(f"j{i}", 2.5) for i in range(5))])
    user.wait_until(lambda: len(user.lines()) == 4)
    process.send_signal(signal.SIGINT)
    user.wait_until(lambda: ["end", "run-short", "0"] in user.lines() or len(user.lines()) == 5)
    before = cpu_s(process.pid)
    time.sleep(1.0)
    assert cpu_s(process.pid) - before < 0.2
    process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED


def test_an_interrupt_that_was_ignored_from_the_start_stays_ignored(
    new_user: NewUser, four_gpus: SimulatedMachine
) -> None:
    """In the background of a script: Ctrl-C at the terminal is for the script."""
    user = new_user("run")
    process = user.start([user.job("j", 0.5), user.job("k", 0.1, needs=["j"])], ignore_interrupt=True)
    user.wait_until(lambda: len(user.lines()) == 1)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told


def cpu_s(pid: int) -> float:
    """Processor seconds of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
