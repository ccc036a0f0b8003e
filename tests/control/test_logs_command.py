"""``gpuherd logs``: whole, the end of it, followed over attempts; harmless on a terminal, exact in a pipe."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import Gate

from gpuherd.errors import ExitCode, UsageError
from gpuherd.jobs import JobState
from gpuherd.jobs.attempts.failures import tail
from gpuherd.jobs.monitor.logs import Growing, follow, read, start_of_last, terminal_line

Command = Callable[..., Any]
NewJob = Callable[..., dict[str, Any]]


def test_a_log_as_it_is_in_a_pipe(bench: Any, job: NewJob, gpuherd: Command) -> None:
    bench.start(job("one", r"printf 'a\n\033[31mred\033[0m\tb\r\nlast'"))
    assert bench.ends() == 0
    assert gpuherd("logs", str(bench.root), "one").out == "a\n\x1b[31mred\x1b[0m\tb\r\nlast"
    assert gpuherd("logs", str(bench.root), "one", "--last-lines", "1").out == "last"
    told = gpuherd("logs", str(bench.root), "one", "--json").json
    assert (told["job"], told["attempt"], told["state"]) == ("one", 1, "done")
    assert told["lines"][0] == "a" and told["log"].endswith("one.1.log")


def test_a_log_on_a_terminal_is_harmless(bench: Any, job: NewJob) -> None:
    bench.start(job("one", r"printf '\033[2J\033]0;title\007  indented\n 10%%|#\r 99%%|####\n'"))
    assert bench.ends() == 0
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "gpuherd", "logs", str(bench.root), "one"]
    subprocess.run(words, stdout=theirs, check=True, timeout=60)
    said = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert said.replace("\r\n", "\n") == "  indented\n 99%|####\n"


def test_bytes_that_are_no_text_come_through(bench: Any, job: NewJob) -> None:
    bench.start(job("one", r"printf '\377\376 x\n'"))
    assert bench.ends() == 0
    words = [sys.executable, "-m", "gpuherd", "logs", str(bench.root), "one"]
    assert subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=60).stdout == b"\xff\xfe x\n"


def test_attempts(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    script = f"echo try >>{tmp_path}/n; n=$(wc -l <{tmp_path}/n); echo this is $n; [ $n -ge 2 ]"
    bench.start(job("one", script, retries=1))
    assert bench.ends() == 0
    assert gpuherd("logs", str(bench.root), "one").out == "this is 2\n"
    assert gpuherd("logs", str(bench.root), "one", "--attempt", "1").out == "this is 1\n"
    said = gpuherd("logs", str(bench.root), "one", "--attempt", "7")
    assert said.code == ExitCode.USAGE and "no attempt 7; the latest is 2" in said.err
    assert gpuherd("logs", str(bench.root), "one", "-f").out == "this is 2\n", "what has ended is not waited for"


def test_following_over_a_retry_until_the_end(bench: Any, job: NewJob, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    begin = f"echo try >>{tmp_path}/n; n=$(wc -l <{tmp_path}/n); echo begin $n"
    bench.start(job("one", f"{begin}; {gate.wait}; echo end $n; [ $n -ge 2 ]", retries=1))
    bench.wait_for("one", JobState.RUNNING)
    words = [sys.executable, "-m", "gpuherd", "logs", str(bench.root), "one", "--follow", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline())]
        gate.open()
        lines += [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    assert [(line["attempt"], line["line"]) for line in lines] == [
        (1, "begin 1"),
        (1, "end 1"),
        (2, "begin 2"),
        (2, "end 2"),
    ]


def test_following_a_job_that_has_not_begun(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    bench.start(job("first", gate.wait), job("second", "echo here", needs=["first"]))
    said = gpuherd("logs", str(bench.root), "second")
    gate.open()
    assert said.code == ExitCode.USAGE and "has not been started yet" in said.err
    assert "".join(line for part in follow(bench.run, "second", look_s=0.01) for line in part.lines) == "here"


def test_following_a_job_that_waits_says_so_and_why(bench: Any, job: NewJob, gpuherd: Command, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    bench.start(job("first", gate.wait), job("second", "echo here", needs=["first"]))
    words = [sys.executable, "-m", "gpuherd", "logs", str(bench.root), "second", "-f"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        try:
            assert process.stderr.readline() == "gpuherd: job 'second' waits: needs first\n"
        finally:
            gate.open()
        assert process.stdout.read() == "here\n"
    assert process.returncode == 0


def test_following_a_job_that_never_begins(bench: Any, job: NewJob) -> None:
    bench.start(job("bad", "exit 65"), job("after", "true", needs=["bad"]))
    assert bench.ends() == 1
    said: list[str] = []
    assert list(follow(bench.run, "after", look_s=0.01, on_wait=said.append)) == []
    assert said == ["job 'after' was cancelled: needs bad, which failed"]


def test_unknown_jobs(bench: Any, job: NewJob, gpuherd: Command) -> None:
    bench.start(job("model-one", "true"))
    said = gpuherd("logs", str(bench.root), "model-onw")
    assert said.code == ExitCode.USAGE
    assert said.err == "gpuherd: there is no job 'model-onw' in this queue; did you mean model-one?\n"
    assert "did you mean" in gpuherd("logs", str(bench.root), "model-onw", "--json").json["error"]


def test_ctrl_c_ends_following_and_nothing_else(bench: Any, job: NewJob) -> None:
    bench.start(job("one", "echo x; sleep 300"))
    words = [sys.executable, "-m", "gpuherd", "logs", str(bench.root), "one", "-f"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"x\n"
    process.send_signal(2)
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
    process.stdout.close()
    process.stderr.close()
    assert bench.job("one").state is JobState.RUNNING


def test_a_log_that_was_removed(bench: Any, job: NewJob, gpuherd: Command) -> None:
    bench.start(job("one", "echo x"))
    assert bench.ends() == 0
    Path(bench.run.attempt_log("one", 1)).unlink()
    assert gpuherd("logs", str(bench.root), "one").out == ""
    (part,) = read(bench.run, "one")
    assert part.lines == []
    with pytest.raises(UsageError):
        next(read(bench.run, "two"))


@given(st.binary(max_size=300).map(lambda data: data.replace(b"x", b"\n")), st.integers(1, 8), st.integers(1, 60))
def test_growing_gives_every_byte_once(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, count: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(data[:cut])
    growing = Growing(path)
    lines = growing.more()
    with path.open("ab") as file:
        file.write(data[cut:])
    lines += growing.more() + growing.rest() + growing.rest()
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert [line.encode("utf-8", "surrogateescape") for line in lines] == expected
    got = Growing(path, start_of_last(path, count))
    last = got.more() + got.rest()
    assert [line.encode("utf-8", "surrogateescape") for line in last] == expected[-count:]


def test_the_end_of_a_large_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%d\n" % i for i in range(300_000)))
    growing = Growing(path, start_of_last(path, 30_000))
    lines = growing.more()
    assert (len(lines), lines[0], lines[-1]) == (30_000, "270000", "299999")
    assert tail(path, 10) == "98\n299999\n"
    assert start_of_last(tmp_path / "none", 3) == 0


def test_a_log_that_is_emptied_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    growing = Growing(path)
    assert growing.more() == ["one", "two"]
    path.write_text("x\n")
    assert growing.more() == ["x"]


def test_a_log_in_the_place_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    growing = Growing(path)
    assert growing.more() == ["one"]
    path.rename(tmp_path / "log.1")  # as a log is rotated; the new one has grown longer meanwhile
    path.write_text("two\nthree\n")
    assert growing.more() == ["two", "three"]


def test_a_long_line_comes_out_of_a_pipe_as_it_went_in(bench: Any, job: NewJob) -> None:
    bench.start(job("one", r"head -c 5000000 /dev/zero | tr '\0' x; printf '\ny'"))
    assert bench.ends() == 0
    words = [sys.executable, "-m", "gpuherd", "logs", str(bench.root), "one"]
    for more in ([], ["--follow"]):
        said = subprocess.run([*words, *more], stdout=subprocess.PIPE, check=True, timeout=60).stdout
        assert said == b"x" * 5_000_000 + b"\ny"


def test_a_job_that_never_stops_writing_can_be_read_to_where_it_is(bench: Any, job: NewJob) -> None:
    bench.start(job("one", "while :; do echo xxxxxxxx; done"))
    log = Path(bench.run.attempt_log("one", 1))
    bench.wait_until(lambda: log.exists() and log.stat().st_size > 10_000)
    parts = read(bench.run, "one")
    first = next(parts)
    there = log.stat().st_size
    bench.wait_until(lambda: log.stat().st_size > there + 100_000)
    read_on = sum(len(line) + 1 for part in (first, *parts) for line in part.lines)
    assert read_on <= there


def test_a_line_without_end_is_passed_on_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 3_000_000)
    growing = Growing(path)
    seen = 0
    while lines := growing.rest():
        seen += sum(map(len, lines))
    assert seen == 3_000_000


def test_what_is_shown_of_a_line() -> None:
    assert terminal_line("a\rb\r") == "b"
    assert terminal_line("\ta\u202eb\udcff") == "        a b"
    assert len(terminal_line("x" * 10_000)) == 4096


def test_a_reader_that_follows_does_not_hold_up_a_writer(bench: Any, job: NewJob) -> None:
    bench.start(*(job(f"j{i}", "true") for i in range(20)), job("last", "sleep 0.3"))
    followers = [threading.Thread(target=lambda: list(follow(bench.run, "last", look_s=0.001))) for _ in range(3)]
    for follower in followers:
        follower.start()
    began = time.monotonic()
    assert bench.ends() == 0
    for follower in followers:
        follower.join(timeout=60)
    assert time.monotonic() - began < 60
