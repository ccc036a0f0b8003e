"""``gpuherd run`` as one job of a cluster whose log is followed: its output, its exit code, and how it is ended."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.remote.conftest import Cluster, cluster
from tests.patience import wait_until

from gpuherd.batch.options import RunOptions
from gpuherd.batch.run import NoGpuFree
from gpuherd.batch.run_remote import follow
from gpuherd.errors import ExitCode, JobCannotFit, UsageError

__all__ = ["cluster"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUHERD_QUEUE", str(tmp_path / "state" / "queue"))
    return tmp_path / "state"


def run(*argv: str, told: list[str] | None = None, **options: Any) -> int:
    return follow(RunOptions(engine="ray", **options), argv, (told if told is not None else []).append)


def test_its_output_and_its_exit_code_are_the_commands(
    cluster: Cluster, state: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    told: list[str] = []
    code = run("/bin/sh", "-c", "printf 'a\\377 b\\n'; echo c >&2; printf d; exit 7", num_gpus=2, nodes=None, told=told)
    assert code == 7
    assert capfdbinary.readouterr().out == b"a\xff b\nc\nd"
    assert [batch["gpus"] for batch in cluster.orders.batches()] == [2]
    assert any("started" in text for text in told)
    assert list(state.iterdir()) == []  # nothing is left


def test_a_signal_is_told_as_a_shell_does(cluster: Cluster) -> None:
    assert run("/bin/sh", "-c", "kill -9 $$") == 128 + 9
    assert run("true") == 0


def test_what_can_not_begin_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(JobCannotFit, match="the largest has 4"):
        run("true", num_gpus=5)
    with pytest.raises(UsageError, match="say --wait TIME"):
        run("true", no_wait=True)


def sent(number: signal.Signals, when: Callable[[], bool]) -> threading.Thread:
    def send() -> None:
        wait_until(when)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_ctrl_c_ends_the_job(
    cluster: Cluster, tmp_path: Path, state: Path, number: signal.Signals, code: ExitCode
) -> None:
    before = signal.getsignal(number)
    sender = sent(number, (tmp_path / "up").exists)
    script = f"trap 'touch {tmp_path}/ended; exit 3' TERM; touch {tmp_path}/up; sleep 60 & wait"
    assert run("/bin/sh", "-c", script) == code
    sender.join()
    assert (tmp_path / "ended").exists() and signal.getsignal(number) is before
    assert list(state.iterdir()) == []


@contextmanager
def piped_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard output is a pipe; its other end."""
    ours, theirs = os.pipe()
    with monkeypatch.context() as patched, open(theirs, "w", encoding="utf-8") as output:
        patched.setattr(sys, "stdout", output)
        yield ours


@pytest.mark.timeout(30)
def test_the_job_ends_when_nobody_reads_its_output(
    cluster: Cluster, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_a_line() -> None:
        os.read(output, 4)
        os.close(output)

    reader = threading.Thread(target=read_a_line)
    script = f"trap 'touch {tmp_path}/ended; exit 3' TERM; while true; do echo line; sleep 0.05; done"
    with piped_output(monkeypatch) as output:
        reader.start()
        assert run("/bin/sh", "-c", script) == 128 + signal.SIGPIPE
        reader.join()
    assert (tmp_path / "ended").exists()
    assert list(state.iterdir()) == []


@pytest.mark.timeout(30)
def test_ctrl_c_is_seen_while_the_reader_stands_still(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"trap 'touch {tmp_path}/ended; exit 3' TERM; yes | head -c 300000; touch {tmp_path}/up; sleep 60 & wait"
    with piped_output(monkeypatch) as output:
        sender = sent(signal.SIGINT, lambda: (tmp_path / "up").exists() and _held(output) >= 1 << 16)
        assert run("/bin/sh", "-c", script) == ExitCode.INTERRUPTED
        sender.join()
    assert (tmp_path / "ended").exists()
    os.close(output)


def _held(pipe: int) -> int:
    """The bytes that wait in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)


@pytest.mark.timeout(30)
def test_a_slow_reader_gets_all_of_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    read = bytearray()

    def read_slowly() -> None:
        while len(read) < 300_000:
            time.sleep(0.005)
            read.extend(os.read(output, 1 << 14))

    reader = threading.Thread(target=read_slowly, daemon=True)
    with piped_output(monkeypatch) as output:
        reader.start()
        assert run("/bin/sh", "-c", "yes | head -c 300000") == 0
        reader.join()
    assert bytes(read) == b"y\n" * 150_000
    os.close(output)


@pytest.mark.timeout(30)
def test_a_full_disk_behind_the_output_ends_the_job(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"):
            run("/bin/sh", "-c", f"trap 'touch {tmp_path}/ended; exit 3' TERM; echo line; sleep 60 & wait")
    assert (tmp_path / "ended").exists()


def test_what_has_not_begun_in_time_is_taken_back(cluster: Cluster) -> None:
    cluster.settings["slots"] = 0
    with pytest.raises(NoGpuFree, match=r"has not begun in 0\.2 s"):
        run("true", wait=0.2)
    handles = cluster.orders.handles()
    # It was told so before we left, and does it in a moment.
    wait_until(lambda: {cluster.orders.state.parcel(each).get("end") for each in handles} <= {"cancelled"})


_STUCK = """
import time
from gpuherd.batch.run_remote import follow
from gpuherd.batch.options import RunOptions
from gpuherd.jobs.remote import dispatcher

class Stuck:
    name, look_s, chains, remembers_s = "ray", 1.0, False, 60.0
    def check(self, wanted):
        print("asked", flush=True)
        time.sleep(1000)
    def close(self):
        time.sleep(1000)

dispatcher.make = lambda options: Stuck()
follow(RunOptions(engine="ray"), ["true"], lambda text: print(text, flush=True))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_a_second_ctrl_c_leaves_at_once_where_the_cluster_does_not_answer(
    state: Path, number: signal.Signals, code: ExitCode
) -> None:
    with subprocess.Popen([sys.executable, "-c", _STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.send_signal(number)
        assert process.stdout.readline() == "ending it\n"
        process.send_signal(number)
        assert process.stdout.readline().startswith("leaving at once; if ray does not answer, the job may still run")
        assert process.wait() == code
    assert list(state.iterdir()) == []
