"""Asking something of a run: with a dispatcher at work in another process, and with none."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S, Gate, wait_until

from gpuherd.errors import UsageError
from gpuherd.jobs import Dispatcher, DispatchOptions, Job, Outcome, Queue, RunDirectory
from gpuherd.jobs.control.client import poke, send
from gpuherd.jobs.control.messages import ControlKind, Request, Response
from gpuherd.jobs.lock import DispatcherLock, LockRole


def sh(name: str, script: str, **more: object) -> Job:
    return Job(name=name, argv=("/bin/sh", "-c", script), **{"gpus": 0, **more})  # type: ignore[arg-type]


class Served:
    """A dispatcher that serves, in a thread, so that controls come from without."""

    def __init__(self, root: Path, options: DispatchOptions, *, serve: bool = True):
        self.run = RunDirectory(root)
        self.run.create()
        self.outcome: Outcome | None = None
        self._options, self._serve = options, serve
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        with Queue(self.run.queue) as queue:
            self.outcome = Dispatcher(queue, self.run, self._options, serve=self._serve, grace_s=0.3).run()

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: poke(self.run))

    def add(self, *jobs: Job) -> None:
        with Queue(self.run.queue, check=False) as queue:
            queue.add(jobs)
        poke(self.run)

    def ask(self, kind: ControlKind, *jobs: str, **settings: str) -> Response:
        return send(self.run, Request(kind, jobs, settings), wait_s=60.0)

    def state(self, name: str) -> str:
        with Queue(self.run.queue, check=False) as queue:
            found = queue.job(name)
        return "none" if found is None else str(found[1])

    def wait_for(self, name: str, state: str) -> None:
        wait_until(lambda: self.state(name) == state)

    def stands_still(self, name: str) -> bool:
        """Whether its main process is stopped (T), or waits (D) for a child that was stopped between vfork and exec."""
        with Queue(self.run.queue, check=False) as queue:
            found = next(each.process for each in queue.running() if each.queued.job.name == name)
        assert found is not None
        return _state(found.pid) in "TD"

    def log(self, name: str) -> str:
        path = self.run.attempt_log(name, 1)
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        if self._thread.is_alive():
            self.ask(ControlKind.STOP)
            self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "run", DispatchOptions(cpu_jobs=2))
    made.start()
    yield made
    made.end()


def test_jobs_added_to_a_run_that_serves_are_run_at_once(served: Served) -> None:
    served.add(sh("a", "true"), sh("b", "true", needs=("a",)))
    served.wait_for("b", "done")
    served.add(sh("c", "true", needs=("a", "b")))
    served.wait_for("c", "done")


def test_cancel_a_running_a_waiting_and_a_needed_job(served: Served) -> None:
    served.add(
        sh("long", "trap '' TERM; while :; do sleep 0.02; done"),
        sh("other", "sleep 300"),
        sh("next", "true"),
        sh("after", "true", needs=("long",)),
    )
    served.wait_for("other", "running")
    answer = served.ask(ControlKind.CANCEL, "next", "long")
    assert (answer.ok, answer.applied_by, answer.changed) == (True, "dispatcher", ("next", "long"))
    assert served.state("next") == "cancelled"
    served.wait_for("long", "cancelled")
    assert served.state("after") == "cancelled"
    assert served.state("other") == "running"
    again = served.ask(ControlKind.CANCEL, "next")
    assert not again.ok
    assert "next is cancelled already" in again.text
    # All of it comes back with the one.
    back = served.ask(ControlKind.RETRY, "long")
    assert back.changed == ("long", "after")
    served.wait_for("long", "running")
    assert served.state("after") == "waiting"


def test_pause_stops_the_clock_and_the_processes_and_resume_lets_them_go_on(served: Served) -> None:
    count = "i=0; while [ $i -lt 1000 ]; do i=$((i+1)); echo $i; sleep 0.02; done"
    served.add(sh("counts", count, timeout_s=6.0, retries=0), sh("b", "sleep 300"), sh("waits", "true"))
    wait_until(lambda: served.log("counts") != "")
    assert served.ask(ControlKind.PAUSE, "counts", "waits").ok
    wait_until(lambda: served.stands_still("counts"))
    before = served.log("counts")
    time.sleep(1.0)
    assert served.log("counts") == before
    assert served.state("counts") == "running"
    served.ask(ControlKind.CANCEL, "b")
    served.wait_for("b", "cancelled")
    assert served.state("waits") == "waiting"  # though there is a place
    answer = served.ask(ControlKind.RESUME)
    assert set(answer.changed) == {"counts", "waits"}
    served.wait_for("waits", "done")
    wait_until(lambda: served.log("counts") != before)
    served.wait_for("counts", "failed")  # its limit counts again
    with Queue(served.run.queue, check=False) as queue:
        row = next(row for row in queue.attempts() if row.job == "counts")
    assert row.failure_class == "timeout"
    assert row.run_s is not None
    assert row.paused_s > 1.0
    assert row.run_s - row.paused_s >= 6.0, "its pause cost it nothing"


def test_a_paused_job_can_be_cancelled(served: Served) -> None:
    served.add(sh("a", "sleep 300"))
    served.wait_for("a", "running")
    served.ask(ControlKind.PAUSE, "a")
    served.ask(ControlKind.CANCEL, "a")
    served.wait_for("a", "cancelled")


def test_set_max_concurrent_and_refuse_what_can_not_be_set(served: Served) -> None:
    assert served.ask(ControlKind.SET, **{"max-concurrent": "1"}).ok
    served.add(sh("a", "sleep 300"), sh("b", "sleep 300"))
    served.wait_for("a", "running")
    time.sleep(0.1)
    assert served.state("b") == "waiting"
    assert served.ask(ControlKind.SET, max_concurrent="none").ok
    served.wait_for("b", "running")
    for settings, message in [
        ({"max_gpu": "2"}, "did you mean max_gpus"),
        ({"max_gpus": "0"}, "whole number above 0"),
        ({"order": "oldest"}, "age, longest"),
        ({"timeout": "2h"}, "can't be changed while a run goes on"),
        ({}, "say what to set"),
    ]:
        with pytest.raises(UsageError, match=message):
            send(served.run, Request(ControlKind.SET, settings=settings))


def test_priority_changes_who_is_next(served: Served, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    served.ask(ControlKind.SET, max_concurrent="1")
    served.add(sh("now", gate.wait), sh("x", "sleep 300"), sh("y", "sleep 300"))
    served.wait_for("now", "running")
    assert served.ask(ControlKind.PRIORITY, "y", priority="7").changed == ("y",)
    gate.open()
    served.wait_for("y", "running")
    assert served.state("x") == "waiting"


def test_drain_lets_what_runs_end(tmp_path: Path) -> None:
    served = Served(tmp_path / "run", DispatchOptions(cpu_jobs=1))
    served.start()
    gate = Gate(tmp_path / "gate")
    served.add(sh("a", gate.wait), sh("b", "true"))
    served.wait_for("a", "running")
    assert "goes on to its end (1 running)" in served.ask(ControlKind.DRAIN).text
    gate.open()
    served._thread.join(PATIENCE_S)
    assert (served.state("a"), served.state("b")) == ("done", "waiting")
    assert not served.run.control_fifo.exists()


def test_set_gpus_moves_the_next_jobs_and_an_unknown_gpu_is_refused(
    tmp_path: Path, standin: Callable[..., object]
) -> None:
    standin("2x40GB")
    served = Served(tmp_path / "run", DispatchOptions(max_checks=1, check_interval=0.02, gpu_list=(0,)))
    served.start()
    served.add(sh("a", "echo $CUDA_VISIBLE_DEVICES; sleep 0.2", gpus=1))
    served.wait_for("a", "running")
    answer = served.ask(ControlKind.SET, gpus="7")
    assert not answer.ok
    assert "7" in answer.text
    assert served.ask(ControlKind.SET, gpus="1", max_gpus="1").ok
    served.add(sh("b", "echo $CUDA_VISIBLE_DEVICES", gpus=1))
    served.wait_for("b", "done")
    assert (served.log("a"), served.log("b")) == ("0\n", "1\n")
    assert served.state("a") == "done"  # one GPU at most, also while the old one was still in use
    served.end()


def test_without_a_dispatcher_it_is_done_here(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    with Queue(run.queue) as queue:
        queue.add([sh("a", "true"), sh("b", "true"), sh("c", "true", needs=("b",))])
    answer = send(run, Request(ControlKind.CANCEL, ("b",)))
    assert (answer.applied_by, answer.changed) == ("here", ("b", "c"))
    assert not send(run, Request(ControlKind.SET, settings={"max_gpus": "2"})).ok
    with pytest.raises(UsageError, match="no job 'bb' in this queue; did you mean b"):
        send(run, Request(ControlKind.CANCEL, ("bb",)))
    with pytest.raises(UsageError, match="holds no queue"):
        send(RunDirectory(tmp_path / "none"), Request(ControlKind.CANCEL))
    assert not (tmp_path / "none").exists()


_LEFT_RUNNING = """
import sys
from gpuherd.jobs import DispatchOptions, Dispatcher, Job, Queue, RunDirectory
run = RunDirectory(sys.argv[1]); run.create()
with Queue(run.queue) as queue:
    queue.add([Job(name=name, argv=("/bin/sleep", "60"), gpus=0) for name in ("a", "b")])
    Dispatcher(queue, run, DispatchOptions(cpu_jobs=2)).run()
"""


def test_a_job_that_a_dead_dispatcher_left_running_is_cancelled_here_and_the_other_runs_on(tmp_path: Path) -> None:
    served = Served(tmp_path / "run", DispatchOptions(cpu_jobs=2))
    process = subprocess.Popen([sys.executable, "-c", _LEFT_RUNNING, str(tmp_path / "run")])
    wait_until(lambda: served.state("b") == "running")
    with Queue(served.run.queue) as queue:
        pids = {record.queued.job.name: record.process.pid for record in queue.running() if record.process}
    # Recorded is not yet let go.
    wait_until(lambda: all(Path(f"/proc/{pid}/task/{pid}/children").read_text() for pid in pids.values()))
    process.kill()
    process.wait()
    answer = served.ask(ControlKind.CANCEL, "a")
    assert (answer.ok, answer.applied_by) == (True, "here")
    assert served.state("a") == "cancelled"
    assert not _is_alive(pids["a"])
    assert _is_alive(pids["b"])
    # Paused here, it stays so under the next dispatcher, and is cancelled by it.
    assert served.ask(ControlKind.PAUSE, "b").applied_by == "here"
    wait_until(lambda: "T" in _state(pids["b"]))
    served.start()
    time.sleep(0.2)
    assert "T" in _state(pids["b"])
    served.ask(ControlKind.RESUME, "b")
    wait_until(lambda: "S" in _state(pids["b"]))
    served.ask(ControlKind.CANCEL, "b")
    served.wait_for("b", "cancelled")
    served.end()


def _open_descriptors() -> int:
    """How many this process has open. What earlier tests left to the garbage collector may be closed at any time."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_what_its_owner_has_stopped_is_not_woken_and_no_descriptor_is_left_open(tmp_path: Path) -> None:
    """By a command that is about something else, or by the next dispatcher."""
    served = Served(tmp_path / "run", DispatchOptions(cpu_jobs=2))
    process = subprocess.Popen([sys.executable, "-c", _LEFT_RUNNING, str(tmp_path / "run")])
    wait_until(lambda: served.state("b") == "running")
    with Queue(served.run.queue) as queue:
        leaders = {record.queued.job.name: record.process.pid for record in queue.running() if record.process}
    children = Path(f"/proc/{leaders['b']}/task/{leaders['b']}/children")
    wait_until(lambda: bool(children.read_text()))
    process.kill()
    process.wait()
    (stopped,) = map(int, children.read_text().split())
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: _state(stopped) == "T")
    open_before = _open_descriptors()
    for kind in (ControlKind.PAUSE, ControlKind.RESUME, ControlKind.PAUSE, ControlKind.RESUME):
        assert served.ask(kind, "a").applied_by == "here"
    served.ask(ControlKind.PRIORITY, "a", priority="3")
    assert _open_descriptors() <= open_before
    assert _state(stopped) == "T"
    assert served.ask(ControlKind.CANCEL, "a").ok
    assert _open_descriptors() <= open_before
    assert not _is_alive(leaders["a"])
    served.start()
    time.sleep(0.3)
    assert _state(stopped) == "T"
    served.ask(ControlKind.CANCEL, "b")
    served.wait_for("b", "cancelled")
    assert not _is_alive(stopped)
    served.end()


def test_what_was_asked_of_a_dispatcher_that_died_first_is_done_by_the_next_once(tmp_path: Path) -> None:
    """Asked, and nobody there to hear it; and asked of the dispatcher itself, which is past."""
    served = Served(tmp_path / "run", DispatchOptions(cpu_jobs=1))
    with Queue(served.run.queue) as queue:
        queue.add([sh("a", "true"), sh("b", "true")])
        number = queue.add_request(Request("cancel", ("a",), by="me", at=time.time()))
        drain = queue.add_request(Request("drain", by="me", at=time.time()))
    served.start()
    served.wait_for("b", "done")
    with Queue(served.run.queue, check=False) as queue:
        reply, past = queue.response(number), queue.response(drain)
        assert queue.requests() == ()
    assert reply is not None
    assert (reply.ok, reply.changed, reply.applied_by) == (True, ("a",), "dispatcher")
    assert past is not None
    assert not past.ok
    assert served.state("a") == "cancelled"
    served.end()


def test_what_is_asked_of_a_dispatcher_that_is_about_to_begin_is_not_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bell hangs, and it takes over what runs: that can take a while."""
    served = Served(tmp_path / "run", DispatchOptions(cpu_jobs=2))
    adopt, may_go_on = Dispatcher._adopt, threading.Event()

    def adopt_slowly(dispatcher: Dispatcher) -> None:
        may_go_on.wait(60)
        adopt(dispatcher)

    monkeypatch.setattr(Dispatcher, "_adopt", adopt_slowly)
    served.start()
    threading.Timer(0.3, may_go_on.set).start()
    assert served.ask(ControlKind.SET, **{"max-concurrent": "1"}).ok
    served.end()


def test_a_wish_of_a_newer_gpuherd_is_answered_and_ends_nothing(served: Served) -> None:
    with Queue(served.run.queue, check=False) as queue:
        number = queue.add_request(Request("hibernate", ("a",), by="me", at=time.time()))
    served.add(sh("a", "true"))
    served.wait_for("a", "done")
    with Queue(served.run.queue, check=False) as queue:
        reply = queue.response(number)
    assert reply is not None
    assert not reply.ok
    assert "is an older one and can't hibernate" in reply.text


def test_a_dispatcher_that_does_not_react_is_said_so_and_the_wish_stands(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    with Queue(run.queue) as queue:
        queue.add([sh("a", "true")])
        lock = DispatcherLock(run.lock)
        answer = send(run, Request(ControlKind.CANCEL, ("a",)), wait_s=0.1)
        assert (answer.ok, answer.applied_by) == (False, None)
        assert str(os.getpid()) in answer.text
        lock.close()
        assert len(queue.requests()) == 1
        send(run, Request(ControlKind.PAUSE))
        assert queue.requests() == ()
        assert queue.states() == {"a": "cancelled"}


def test_a_dispatcher_waits_for_one_who_only_does_what_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = DispatcherLock(path, LockRole.CONTROL)
    assert DispatcherLock.holder(path) is None
    began = time.monotonic()
    threading.Timer(0.3, lock.close).start()
    other = DispatcherLock(path)
    assert time.monotonic() - began >= 0.25
    assert DispatcherLock.holder(path) == os.getpid()
    other.close()


def test_a_lock_that_is_just_given_back_is_waited_for(tmp_path: Path) -> None:
    """Its file is empty for a moment, however long its holder was waited for before."""
    path = tmp_path / "lock"
    lock = DispatcherLock(path, LockRole.CONTROL)
    threading.Timer(0.2, path.write_text, [""]).start()
    threading.Timer(0.3, lock.close).start()
    DispatcherLock(path).close()


def test_something_else_in_the_bells_place_is_left_alone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.control_fifo.write_text("mine")
    assert not poke(run)
    served = Served(tmp_path / "run", DispatchOptions(cpu_jobs=1))
    served._thread.start()
    served.add(sh("a", "true"))
    served.wait_for("a", "done")  # by looking every second
    assert run.control_fifo.read_text() == "mine"
    served.end()


def test_serving_costs_nothing_while_nothing_is_to_do(tmp_path: Path) -> None:
    code = """
import sys
from gpuherd.jobs import DispatchOptions, Dispatcher, Queue, RunDirectory
run = RunDirectory(sys.argv[1]); run.create()
with Queue(run.queue) as queue:
    Dispatcher(queue, run, DispatchOptions(), serve=True).run()
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")])
    served = Served(tmp_path / "run", DispatchOptions())
    wait_until(lambda: poke(served.run))
    wait_until(lambda: _settled(process.pid))
    before = _cpu_ticks(process.pid)
    time.sleep(1.5)
    assert _cpu_ticks(process.pid) - before <= 1  # one tick is 10 ms
    status = Path(f"/proc/{process.pid}/status").read_text()
    resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert resident < 40 * 1024
    process.send_signal(signal.SIGHUP)
    served.add(sh("a", "true"))
    served.wait_for("a", "done")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _is_alive(pid: int) -> bool:
    try:
        return _state(pid) not in "ZX"
    except OSError:
        return False


def _settled(pid: int) -> bool:
    """Whether it is done with its start: it uses nothing for half a second."""
    before = _cpu_ticks(pid)
    time.sleep(0.5)
    return _cpu_ticks(pid) == before


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
