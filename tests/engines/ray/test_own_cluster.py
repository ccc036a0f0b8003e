"""A cluster of our own on this machine, and what is left of it: nothing. And Ray that is not installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.engines.ray.parcels import Parcels
from tests.patience import wait_until

from gpuherd.engines.base import End, EngineMissing, Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.ray.engine import RayEngine
from gpuherd.errors import ExitCode, UsageError
from gpuherd.jobs.remote.agent import join, lead
from gpuherd.standin.machine import SimulatedMachine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_is_started_where_there_is_none_and_ray_is_left_as_it_was_found(
    tmp_path: Path, standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("2x40GB")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    environment, places = dict(os.environ), ours_in_tmp()
    engine = RayEngine(EngineOptions(engine="ray"), lead, join)
    assert engine.check([Placement(gpus=2), Placement(gpus=3)]).keys() == {Placement(gpus=3)}
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"'], Placement(gpus=1), count=4)
    engine.submit(jobs.batch)
    assert {each.end for each in jobs.to_the_end(engine).values()} == {End.OK}
    assert {jobs.log(number).strip() for number in range(4)} <= {"0", "1"}
    assert engine._channel is not None
    family = psutil.Process(engine._channel.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    assert not ours_in_tmp() <= places
    engine.close()
    wait_until(lambda: not [each for each in family if is_there(each)], told=lambda: str(family))
    assert ours_in_tmp() <= places
    assert os.environ == environment
    assert not (tmp_path / "home").exists() and not (tmp_path / "ray").exists()
    assert "ray" not in sys.modules or sys.modules["ray"].is_initialized() is False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_ctrl_c_leaves_a_ray_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process next to Ray stands still; when it goes on it ends the job."""
    monkeypatch.setenv("GPUHERD_QUEUE", str(tmp_path / "queue"))
    words = [sys.executable, "-m", "gpuherd", "run", "--engine=ray", "--num-gpus=0", "--"]
    script = f"echo $$ >{tmp_path}/job; sleep 1000"
    with subprocess.Popen([*words, "sh", "-c", script], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (tmp_path / "job").exists() and (tmp_path / "job").read_text() != "", 120)
        (beside,) = (
            each for each in psutil.Process(process.pid).children() if "gpuherd.engines.ray.driver" in each.cmdline()
        )
        beside.suspend()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("ending it" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == ExitCode.INTERRUPTED
    beside.resume()
    job = int((tmp_path / "job").read_text())
    wait_until(lambda: not psutil.pid_exists(job) and not is_there(beside), 120)


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    engine = RayEngine(EngineOptions(engine="ray", ray_address="head:6379"), lead)
    with pytest.raises(EngineMissing, match=r"pip install 'gpuherd\[ray\]'"):
        engine.check([Placement(gpus=1)])
    engine.close()


def test_words_are_refused_before_ray_is_touched() -> None:
    with pytest.raises(UsageError, match="ray:// is not taken"):
        RayEngine(EngineOptions(engine="ray", ray_address="ray://head:10001"), lead)
    with pytest.raises(UsageError, match="NAME=AMOUNT"):
        RayEngine(EngineOptions(engine="ray", ray_address="head:6379", ray_resources=("licence",)), lead)


def test_a_job_server_is_asked_less_often() -> None:
    """It reads all its jobs for an answer; tasks are told of by their own driver."""
    tasks = RayEngine(EngineOptions(engine="ray", ray_address="head:6379"), lead)
    server = RayEngine(EngineOptions(engine="ray", ray_address="http://head:8265"), lead)
    assert server.look_s >= 4 * tasks.look_s


def is_there(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ours_in_tmp() -> set[str]:
    """Folders of clusters of our own."""
    return {path.name for path in Path("/tmp").glob("gpuherd-ray.*")}
