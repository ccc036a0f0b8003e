"""``gpuherd --simulate``: what is made, what is said, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuherd.errors import UsageError
from gpuherd.standin import activate
from gpuherd.standin.machine import SimulatedMachine

ACTIVATE = "import sys\nfrom gpuherd.standin import activate\nmachine = activate(sys.argv[1])\n"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder


def simulate(spec: str, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ACTIVATE + code, spec],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_says_once_that_the_gpus_are_simulated_and_leaves_nothing(runtime: Path) -> None:
    code = """
import pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetCount())
"""
    out, err = simulate("3x40GB", code).communicate()
    assert out.strip() == "3"
    assert err == "gpuherd: 3 GPUs are simulated; jobs run on the CPU.\n"
    assert list(runtime.iterdir()) == []


def test_a_fork_leaves_the_machine_to_its_parent(runtime: Path) -> None:
    code = """
import os
pid = os.fork()
if pid == 0:
    sys.exit()
os.waitpid(pid, 0)
print(machine.path.exists())
"""
    out, err = simulate("1x40GB", code).communicate()
    assert out.strip() == "True", err
    assert list(runtime.iterdir()) == []


def test_a_job_that_outlives_the_command_keeps_its_machine(runtime: Path) -> None:
    code = """
import subprocess
child = "import sys; sys.stdin.readline(); import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
"""
    command = simulate("2x40GB", code)
    command.wait()
    (left,) = runtime.iterdir()
    assert command.stdin is not None
    assert command.stdout is not None
    command.stdin.write("go on\n")
    command.stdin.close()
    assert command.stdout.read().strip() == "2"
    deadline = time.monotonic() + 10
    while left.exists() and time.monotonic() < deadline:
        simulate("1x40GB", "").communicate()  # the next simulation sweeps it away
    assert list(runtime.iterdir()) == []
    for stream in (command.stdout, command.stderr):
        assert stream is not None
        stream.close()


def test_what_a_killed_command_left_is_swept_away_by_the_next(runtime: Path) -> None:
    command = simulate("2x40GB", "print('ready', flush=True)\nsys.stdin.readline()")
    assert command.stdout is not None
    command.stdout.readline()
    other = simulate("1x40GB", "")
    other.communicate()
    assert len(list(runtime.iterdir())) == 1, "the machine of a living command must stay"
    command.send_signal(signal.SIGKILL)
    command.communicate()
    assert len(list(runtime.iterdir())) == 1
    simulate("1x40GB", "").communicate()
    assert list(runtime.iterdir()) == []


def test_a_state_file_is_shared_and_stays_with_its_leases(runtime: Path, tmp_path: Path) -> None:
    machine = SimulatedMachine.create(tmp_path / "mine", "2x40GB")
    code = "import os\nprint(*machine.uuids, os.environ['GPUHERD_LEASE_DIR'])"
    out, _ = simulate(str(machine.path), code).communicate()
    assert out.split() == [*machine.uuids, str(tmp_path / "mine.leases")]
    assert machine.path.exists()
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("spec", ["4x40", "no/such/file", "README"])
def test_a_bad_spec_is_a_usage_error_and_makes_nothing(runtime: Path, spec: str) -> None:
    with pytest.raises(UsageError, match=r"^--simulate"):
        activate(spec)
    assert list(runtime.iterdir()) == []


def test_a_file_that_is_no_machine_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    _, err = simulate(str(tmp_path / "text"), "").communicate()
    assert "no state file of a simulated machine" in err


def test_the_machine_is_in_the_environment_of_jobs(runtime: Path) -> None:
    code = "import os\nprint(os.environ['GPUHERD_STANDIN'] == str(machine.path), os.environ['LD_LIBRARY_PATH'])"
    out, _ = simulate("1x40GB", code).communicate()
    assert out.startswith("True /")
    assert "GPUHERD_STANDIN" not in os.environ
