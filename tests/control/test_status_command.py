"""``gpuherd status`` as users call it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpuherd.errors import ExitCode
from gpuherd.jobs import Job, JobState, Queue

Command = Callable[..., Any]
NewJob = Callable[..., dict[str, Any]]


@pytest.fixture
def busy(bench: Any, job: NewJob) -> Any:
    """One job of each state."""
    bench.options["cpu_jobs"] = 2
    bench.start(
        job("bad", "echo it broke; exit 65", priority=2),
        job("good", "true", priority=2),
        job("long", "sleep 300", title="the long one"),
        job("after", "true", needs=["bad"]),
        job("later", "true", needs=["long"]),
    )
    bench.wait_for("bad", JobState.FAILED)
    bench.wait_for("good", JobState.DONE)
    bench.wait_for("long", JobState.RUNNING)
    return bench


def test_a_table(busy: Any, gpuherd: Command) -> None:
    said = gpuherd("status", str(busy.root))
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0].strip() == str(busy.root)
    assert lines[1].startswith("1 of 5 done, 1 failed, 1 cancelled, 1 running, 1 waiting")
    assert lines[2].startswith(f"gpuherd (pid {busy.process.pid}) works on it since ")
    rows = {line.split()[0]: " ".join(line.split()) for line in lines[5:]}
    assert rows["running"].startswith("running the long one CPU for ")
    assert rows["failed"] == "failed bad CPU bad input, exit code 65: it broke"
    assert rows["waiting"] == "waiting later CPU needs long"
    assert rows["cancelled"] == "cancelled after CPU needs bad, which failed"
    assert rows["done"].startswith("done good CPU in ")


def test_it_is_whole_in_eighty_columns(busy: Any, gpuherd: Command) -> None:
    said = gpuherd("status", str(busy.root), COLUMNS="80")
    assert max(map(len, said.out.splitlines()[1:])) <= 80
    assert "needs bad, which failed" in " ".join(said.out.split())


def test_json(busy: Any, gpuherd: Command) -> None:
    told = gpuherd("status", str(busy.root), "--json").json
    assert told["folder"] == str(busy.root)
    assert told["counts"] == {
        "waiting": 1,
        "running": 1,
        "done": 1,
        "failed": 1,
        "cancelled": 1,
        "total": 5,
        "paused": 0,
        "in_line": 0,
    }
    assert told["dispatcher"]["pid"] == busy.process.pid
    jobs = {job["name"]: job for job in told["jobs"]}
    assert jobs["long"]["title"] == "the long one"
    assert jobs["long"]["command"] == ["/bin/sh", "-c", "sleep 300"]
    assert jobs["long"]["attempt"]["state"] == "running"
    assert jobs["bad"]["attempt"]["exit_code"] == 65
    assert jobs["bad"]["attempt"]["failure_class"] == "bad input"
    assert jobs["later"]["attempt"] is None


def test_states_and_names(busy: Any, gpuherd: Command) -> None:
    told = gpuherd("status", str(busy.root), "--json", "--state", "failed", "done").json
    assert [job["name"] for job in told["jobs"]] == ["bad", "good"]
    told = gpuherd("status", str(busy.root), "--json", "--match", "l").json
    assert {job["name"] for job in told["jobs"]} == {"long", "later"}
    assert "no job matches" in gpuherd("status", str(busy.root), "--match", "nothing").out
    wrong = gpuherd("status", str(busy.root), "--state", "broken")
    assert wrong.code == ExitCode.USAGE and "failed" in wrong.err


def test_a_long_queue_is_cut(bench: Any, gpuherd: Command) -> None:
    bench.run.create()
    queue = Queue(bench.run.queue)
    queue.submit([Job(name=f"job-{i:03}", argv=("true",)) for i in range(200)])
    queue.close()
    said = gpuherd("status", str(bench.root))
    assert "no gpuherd works on it now" in said.out
    assert len(said.out.splitlines()) < 20
    assert "and 192 waiting (gpuherd status --all" in said.out
    assert len(gpuherd("status", str(bench.root), "--all").out.splitlines()) > 200
    assert len(gpuherd("status", str(bench.root), "--json").json["jobs"]) == 200


def test_the_own_queue_is_the_default(bench: Any, gpuherd: Command, tmp_path: Any) -> None:
    said = gpuherd("status")
    assert said.code == ExitCode.USAGE and "no queue of your own yet" in said.err
    bench.run.create()
    queue = Queue(bench.run.queue)
    queue.submit([Job(name="mine", argv=("true",))])
    queue.close()
    assert "mine" in gpuherd("status", GPUHERD_QUEUE=str(bench.root)).out


def test_a_folder_without_a_queue(gpuherd: Command, tmp_path: Any) -> None:
    said = gpuherd("status", str(tmp_path / "none"))
    assert (said.code, said.out) == (ExitCode.USAGE, "")
    assert said.err.count("\n") == 1 and "there is no queue in" in said.err
    assert not (tmp_path / "none").exists()
    told = gpuherd("status", str(tmp_path), "--json")
    assert told.code == ExitCode.USAGE and "no queue" in told.json["error"]


def test_watch_on_a_terminal_until_ctrl_c(busy: Any) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "gpuherd", "status", str(busy.root), "--watch", "0.1"]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "100"})
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    while len(re.findall(rb"every 0.1 s; Ctrl-C ends it", seen)) < 3 and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            seen += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    os.close(ours)
    assert b"the long one" in seen and b"Traceback" not in seen
