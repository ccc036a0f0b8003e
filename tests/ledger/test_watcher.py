"""``gpuherd run``: a small process records what its command uses, and is gone when the GPU is given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.patience import wait_until

from gpuherd.ledger.files import open_files_in
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.records import Kind, Use
from gpuherd.standin.machine import SimulatedMachine

RUN = [sys.executable, "-m", "gpuherd", "run", "--quiet", "--max-checks", "1", "--check-interval", "0.02"]


def uses() -> list[Use]:
    ledger = Ledger.existing()
    if ledger is None:
        return []
    return [record.use for record in believed(ledger.read(), os.geteuid())]


def watchers() -> list[psutil.Process]:
    """Recorders of commands in this test's own ledger."""
    mine = os.environ["GPUHERD_MACHINE_DIR"]
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GPUHERD_MACHINE_DIR") == mine and "gpuherd.ledger.watcher" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    yield
    wait_until(lambda: not watchers())


def test_a_command_of_a_moment_is_recorded(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    standin("1x40GB")
    done = subprocess.run([*RUN, "--project", "p1", "--", "sleep", "0.3"], capture_output=True, timeout=60, check=True)
    assert done.stdout == b""
    wait_until(lambda: len(uses()) == 1)
    (use,) = uses()
    assert use.kind is Kind.RUN
    assert (use.project, use.command, use.uid, use.label) == ("p1", "sleep", os.geteuid(), "0")
    assert 0.3 <= use.held_s < 20


@pytest.mark.slow
def test_a_longer_one_is_measured_and_its_end_is_exact(
    standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = standin("2x40GB", attribute=True)
    machine.set_power(0, 100)
    machine.set_power(1, 100)
    folder = tmp_path / "theory"
    folder.mkdir()
    command = subprocess.Popen([*RUN, "--num-gpus", "2", "--name", "mine", "--", "sleep", "600"], cwd=folder)
    wait_until(lambda: len(uses()) == 2)
    assert {use.project for use in uses()} == {"theory"}
    assert {use.job for use in uses()} == {"mine"}
    (watcher,) = watchers()
    # No lease, no terminal, nothing of the command's.
    opened = [os.readlink(f"/proc/{watcher.pid}/fd/{name}") for name in os.listdir(f"/proc/{watcher.pid}/fd")]
    assert not [path for path in opened if "leases" in path]
    assert os.getsid(watcher.pid) != os.getsid(0)
    command.send_signal(signal.SIGTERM)
    command.wait()
    ended = time.time()
    wait_until(lambda: not watchers())
    found = uses()
    assert len(found) == 2
    for use in found:
        assert use.until == pytest.approx(ended, abs=1.0)
        assert use.held_s == pytest.approx(use.span_s, abs=0.01)
        assert use.energy_j is not None
        assert use.energy_j == pytest.approx(100 * use.held_s, rel=0.02)
    ledger = Ledger.existing()
    assert ledger is not None
    assert list(open_files_in(ledger.folder)) == []


def test_children_that_keep_the_gpu_are_recorded_until_they_end(
    standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("1x40GB")
    gate = tmp_path / "gate"
    script = f"(until [ -e {gate} ]; do sleep 0.05; done) >/dev/null 2>&1 </dev/null &"
    began = time.time()
    subprocess.run([*RUN, "--", "sh", "-c", script], timeout=60, check=True)
    wait_until(lambda: len(watchers()) == 1)
    time.sleep(0.5)
    gate.touch()
    opened = time.time()
    wait_until(lambda: not watchers())
    (use,) = uses()
    assert use.until >= opened - 0.1
    assert use.held_s >= opened - began - 30
    assert use.command == "sh"


def test_what_a_killed_watcher_recorded_stays(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    standin("1x40GB")
    command = subprocess.Popen([*RUN, "--", "sleep", "600"])
    wait_until(lambda: len(uses()) == 1)
    (watcher,) = watchers()
    watcher.kill()
    wait_until(lambda: not watchers())
    seen = uses()
    assert len(seen) == 1
    assert command.poll() is None
    command.kill()
    command.wait()
    assert uses() == seen


def test_a_ledger_that_cannot_be_written_hinders_no_command(
    standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("1x40GB")
    monkeypatch.setenv("GPUHERD_MACHINE_DIR", "/proc/nowhere")
    done = subprocess.run([*RUN, "--", "echo", "here"], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"here\n"
    assert b"Traceback" not in done.stderr
