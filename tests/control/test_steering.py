"""Steering a run as users do it (cancel, pause, set and the like), on a dispatcher at work in a process of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuherd.errors import ExitCode
from gpuherd.jobs import Job, JobState, Queue
from gpuherd.standin.machine import SimulatedMachine

Command = Callable[..., Any]
NewJob = Callable[..., dict[str, Any]]
Standin = Callable[..., SimulatedMachine]


def test_cancel(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    bench.options["cpu_jobs"] = 1
    bench.start(
        job("runs", "trap '' TERM; sleep 300"),
        job("waits", f"touch {tmp_path}/ran"),
        job("needs-it", "true", needs=["waits"]),
    )
    bench.wait_for("runs", JobState.RUNNING)
    said = gpuherd("cancel", "--run", str(bench.root), "waits")
    assert (said.code, said.err) == (0, "")
    assert "waits" in said.out
    assert bench.job("waits").state is JobState.CANCELLED
    assert bench.job("needs-it").state is JobState.CANCELLED
    told = gpuherd("cancel", "--run", str(bench.root), "runs", "--json")
    assert (told.code, told.json["ok"], told.json["changed"]) == (0, True, ["runs"])
    assert told.json["applied_by"] == "dispatcher"
    bench.wait_for("runs", JobState.CANCELLED)
    assert bench.ends() == 1
    assert not (tmp_path / "ran").exists()


def test_what_can_not_be_cancelled_is_said(bench: Any, job: NewJob, gpuherd: Command) -> None:
    bench.start(job("done", "true"), job("long", "sleep 300"))
    bench.wait_for("done", JobState.DONE)
    said = gpuherd("cancel", "--run", str(bench.root), "done")
    assert said.code == ExitCode.FAILED
    assert "done is done already" in said.err


def test_retry(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    bench.start(
        job("bad", f"[ -e {tmp_path}/mended ]"),
        job("after", "true", needs=["bad"]),
        job("long", "sleep 300"),
    )
    bench.wait_for("after", JobState.CANCELLED)
    (tmp_path / "mended").touch()
    assert gpuherd("retry", "--run", str(bench.root), "--all").code == 0
    bench.wait_for("bad", JobState.DONE)
    bench.wait_for("after", JobState.DONE)


def test_pause_and_resume(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    bench.options["cpu_jobs"] = 1
    counter = tmp_path / "counter"
    bench.start(
        job("ticks", f"while true; do echo x >>{counter}; sleep 0.02; done", timeout_s=300),
        job("waits", "true"),
    )
    bench.wait_until(counter.exists)
    assert gpuherd("pause", "--run", str(bench.root), "ticks", "waits").code == 0
    assert bench.job("ticks").paused and bench.job("waits").paused
    assert bench.status().paused == 2
    told = gpuherd("status", str(bench.root)).out
    assert "2 paused" in told and "paused: waits (gpuherd resume)" in told
    assert "paused; ran for" in told
    bench.wait_until(lambda: _stands_still(counter))
    assert gpuherd("resume", "--run", str(bench.root), "--all").code == 0
    bench.wait_until(lambda: not _stands_still(counter))
    assert not bench.job("ticks").paused
    assert gpuherd("resume", "--run", str(bench.root), "ticks").code == ExitCode.FAILED


def _stands_still(file: Path) -> bool:
    size = file.stat().st_size
    time.sleep(0.2)
    return file.stat().st_size == size


def test_priority(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    bench.options["cpu_jobs"] = 1
    ran = tmp_path / "ran"
    bench.start(
        job("first", f"until [ -e {tmp_path}/go ]; do sleep 0.02; done"),
        *(job(name, f"echo {name} >>{ran}") for name in ("a", "b", "c")),
    )
    bench.wait_for("first", JobState.RUNNING)
    run = ("--run", str(bench.root))
    assert gpuherd("priority", *run, "c", "--to", "3").out == "with another priority: c\n"
    assert gpuherd("priority", str(bench.root), "a", "--to", "-1").code == 0
    wrong = gpuherd("priority", *run, "b", "--to", "high")
    assert (wrong.code, wrong.err) == (ExitCode.USAGE, "gpuherd: priority: 'high' is not a whole number\n")
    assert gpuherd("priority", *run, "b").code == ExitCode.USAGE
    (tmp_path / "go").touch()
    assert bench.ends() == 0
    assert ran.read_text().split() == ["c", "b", "a"]


@pytest.mark.slow
def test_the_run_is_a_word_or_a_flag_for_every_command(
    bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path
) -> None:
    own = {"GPUHERD_QUEUE": str(tmp_path / "own")}
    assert gpuherd("submit", "--name", "mine", "--", "true", **own).code == 0
    bench.start(job("first", "echo said"))
    assert bench.ends() == 0
    folder = str(bench.root)
    for words in (["status"], ["drain"], ["set", "--max-gpus", "2"], ["gpus"], ["resume", "--all"]):
        command, *more = words
        by_word, by_flag = gpuherd(command, folder, *more, **own), gpuherd(command, "--run", folder, *more, **own)
        assert (by_word.code, by_word.out, by_word.err) == (by_flag.code, by_flag.out, by_flag.err)
    for words in (["logs"], ["cancel"], ["retry"], ["pause"]):
        by_word, by_flag = gpuherd(*words, folder, "first", **own), gpuherd(*words, "--run", folder, "first", **own)
        assert (by_word.code, by_word.out, by_word.err) == (by_flag.code, by_flag.out, by_flag.err)
    assert gpuherd("logs", "first", "--run", folder, **own).out == "said\n"
    assert "name one run, not both" in gpuherd("drain", folder, "--run", folder, **own).err
    assert "name the jobs, or say --all" in gpuherd("cancel", folder, **own).err
    said = gpuherd("logs", folder, **own)
    assert said.code == ExitCode.USAGE
    assert said.err.endswith(f"{folder} is the folder of a run: gpuherd logs {folder} JOB\n")
    assert "folder of a run" not in gpuherd("cancel", "nosuch", **own).err


def test_a_word_that_is_a_run_and_a_job_is_neither(
    bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"GPUHERD_QUEUE": str(tmp_path / "own")}
    bench.start(job("first", "true"))
    assert bench.ends() == 0
    monkeypatch.chdir(bench.root.parent)
    name = bench.root.name
    assert gpuherd("submit", "--name", name, "--", "true", **own).code == 0
    said = gpuherd("cancel", name, **own)
    assert said.code == ExitCode.USAGE and f"--run {name}" in said.err and "--engine local" in said.err
    assert gpuherd("cancel", "--engine", "local", name, **own).out == f"cancelled {name}\n"


def test_a_name_that_begins_as_a_flag_does(bench: Any, job: NewJob, gpuherd: Command) -> None:
    # No job file and no submit gives such a name, but a program may.
    bench.start(job("-f", "echo said; exit 1"))
    assert bench.ends() != 0
    folder = str(bench.root)
    assert "-f" in gpuherd("status", folder).out
    assert gpuherd("logs", folder, "--", "-f").out == "said\n"
    assert gpuherd("retry", "--run", folder, "--", "-f").out == "to be tried again: -f\n"
    assert gpuherd("cancel", "--run", folder, "--", "-f").out == "cancelled -f\n"


def test_drain(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    bench.options["cpu_jobs"] = 1
    bench.start(job("first", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"), job("second", "true"))
    bench.wait_for("first", JobState.RUNNING)
    said = gpuherd("drain", "--run", str(bench.root))
    assert said.code == 0 and "nothing new is started" in said.out
    bench.wait_until(lambda: "it is draining" in gpuherd("status", str(bench.root)).out)
    (tmp_path / "go").touch()
    assert bench.ends() == 0, "nothing has failed, and what waits was to wait"
    assert bench.job("first").state is JobState.DONE
    assert bench.job("second").state is JobState.WAITING
    assert bench.job("second").reason == "no gpuherd works on this queue"


def test_a_drained_run_in_which_a_job_failed_says_so(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    bench.options["cpu_jobs"] = 1
    bench.start(job("first", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 65"), job("second", "true"))
    bench.wait_for("first", JobState.RUNNING)
    assert gpuherd("drain", str(bench.root)).code == 0
    (tmp_path / "go").touch()
    assert bench.ends() == ExitCode.FAILED


def test_set_in_mid_run(bench: Any, job: NewJob, gpuherd: Command, standin: Standin) -> None:
    machine = standin("4x40GB")
    bench.options |= {"gpu_list": ["0"], "max_gpus": 1}
    bench.start(*(job(f"j{i}", "sleep 300", gpus=1) for i in range(4)))
    bench.wait_until(lambda: bench.status().counts.running == 1)
    machine.occupy(1, 20_000)
    said = gpuherd("set", "--run", str(bench.root), "--gpus", "0,1", "2", "--max-gpus", "3", "--max-checks", "3")
    assert said.code == 0, said.err
    bench.wait_until(lambda: bench.status().counts.running == 2)
    bench.wait_until(lambda: bench.status().dispatcher.state.settings.get("max_gpus") == 3)
    dispatcher = gpuherd("status", str(bench.root), "--json").json["dispatcher"]
    assert dispatcher["settings"]["gpu_list"] == ["0,1,2"]
    assert dispatcher["settings"]["max_checks"] == 3
    bench.wait_until(lambda: any("20000 MB" in (each.reason or "") for each in bench.status().jobs))
    assert {each.label for each in bench.status().dispatcher.state.gpus} == {"0", "1", "2"}


@pytest.mark.parametrize(
    "words, part",
    [
        (["set"], "say what to set"),
        (["set", "--max-gpsu", "2"], "did you mean --max-gpus?"),
        (["set", "--max-gpus", "many"], "many"),
        (["set", "--order", "random"], "longest"),
        (["set", "--gpus", "77"], "77"),
        (["cancel"], "name the jobs, or say --all"),
        (["cancel", "a", "--all"], "not both"),
        (["cancel", "model-onw"], "did you mean model-one?"),
        (["pause", "--al"], "did you mean --all?"),
    ],
)
def test_wrong_words(bench: Any, job: NewJob, gpuherd: Command, standin: Standin, words: list[str], part: str) -> None:
    standin("2x40GB")
    bench.start(job("model-one", "sleep 300", gpus=1))
    command, *rest = words
    said = gpuherd(command, "--run", str(bench.root), *rest)
    assert said.code in (ExitCode.USAGE, ExitCode.FAILED)
    assert part in said.err
    assert "Traceback" not in said.err
    bench.wait_for("model-one", JobState.RUNNING)


def test_without_a_dispatcher_it_is_done_here(bench: Any, gpuherd: Command) -> None:
    bench.run.create()
    with Queue(bench.run.queue) as queue:
        queue.submit([Job(name="one", argv=("true",)), Job(name="two", argv=("true",))])
    told = gpuherd("cancel", "--run", str(bench.root), "one", "--json")
    assert (told.code, told.json["applied_by"], told.json["changed"]) == (0, "here", ["one"])
    assert bench.job("one").state is JobState.CANCELLED
    said = gpuherd("drain", "--run", str(bench.root))
    assert said.code == 0 and said.out.startswith("no gpuherd works on")


def test_the_own_queue_is_the_default(bench: Any, gpuherd: Command) -> None:
    said = gpuherd("pause", "--all")
    assert said.code == ExitCode.USAGE and "no queue of your own yet" in said.err
    bench.run.create()
    with Queue(bench.run.queue) as queue:
        queue.submit([Job(name="one", argv=("true",))])
    assert gpuherd("pause", "--all", GPUHERD_QUEUE=str(bench.root)).code == 0
    assert bench.job("one").paused


@pytest.mark.slow
def test_a_dispatcher_that_does_not_answer(bench: Any, job: NewJob, gpuherd: Command) -> None:
    """It is stopped (SIGSTOP); the request waits in the queue, and is carried out when it goes on."""
    bench.start(job("one", "sleep 300"))
    bench.wait_for("one", JobState.RUNNING)
    bench.process.send_signal(signal.SIGSTOP)
    try:
        said = gpuherd("pause", "--run", str(bench.root), "one")
    finally:
        bench.process.send_signal(signal.SIGCONT)
    assert said.code == ExitCode.BUSY
    assert "has not answered yet; the request waits in the queue" in said.err
    bench.wait_until(lambda: bench.job("one").paused)
