"""Idle GPUs as commands find and show them: settings, CPU time, the line of the full screen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gpus.machines import gpu, process
from tests.ledger.uses import use

from gpuherd.errors import UsageError
from gpuherd.gpus.idle_held import IDLE_AFTER_S, IdleGpu
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Machine
from gpuherd.jobs.monitor.idle import IdleGpus, cpu_seconds, idle_seconds
from gpuherd.jobs.settings import load, user_file
from gpuherd.ledger import Recorded, Recorder
from gpuherd.standin.machine import SimulatedMachine
from gpuherd.top.look import GpuHistory, Snapshot, gpu_lines


def write(text: str) -> None:
    user_file().parent.mkdir(parents=True, exist_ok=True)
    user_file().write_text(text)


def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "policy" / "policy.toml"
    path.parent.mkdir(mode=0o755)
    path.write_text(text)
    path.chmod(0o644)
    monkeypatch.setenv("GPUHERD_POLICY", str(path))


def test_the_users_time_comes_before_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().idle_after_s == IDLE_AFTER_S == 1800.0
    policy(tmp_path, monkeypatch, "[idle]\nafter = '2h'\n")
    assert load().idle_after_s == 7200.0
    write("[idle]\nafter = '45m'\n")
    assert load().idle_after_s == 2700.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[idle]\nafter = '0s'\n", "after"), ("[idle]\nafterr = '1h'\n", "afterr"), ("idle = 3\n", "idle")],
)
def test_a_slip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str) -> None:
    write(text)
    with pytest.raises(UsageError, match=problem):
        load()
    assert IdleGpus().look([]) == {}  # to look at GPUs goes on
    user_file().unlink()
    policy(tmp_path, monkeypatch, text)
    with pytest.raises(UsageError, match=problem):
        load()


def test_looks_of_a_long_process_find_it_with_the_work_on_the_cpu(standin: Callable[..., SimulatedMachine]) -> None:
    machine, driver = standin("1x40GB"), GpuReader()
    machine.occupy(0, 3_000, pid=os.getpid())
    machine.set_utilisation(0, 0)
    idle = IdleGpus(after_s=0.2)
    assert idle.look(driver.snapshot().gpus) == {}
    until = time.process_time() + 0.4
    while time.process_time() < until:
        pass
    (found,) = idle.look(driver.snapshot().gpus).values()
    assert found.idle_s >= 0.2
    assert found.cores is not None and found.cores > 0
    machine.set_utilisation(0, 30)
    assert idle.look(driver.snapshot().gpus) == {}


def recorded(name: str, gpu_uuid: str, idle_since: float | None, until: float = 9e5, **how: object) -> Recorded:
    one = use(name, gpu=gpu_uuid, idle_since=idle_since, since=until - 100.0)
    return Recorded(one, **{"observer_uid": 1001, "is_open": True, **how})  # type: ignore[arg-type]


def test_the_ledger_knows_for_how_long_all_uses_of_a_gpu_have_been_idle() -> None:
    records = [
        recorded("a", "GPU-a", 899_000.0),
        recorded("b", "GPU-a", 899_900.0),
        recorded("c", "GPU-b", 899_000.0),
        recorded("d", "GPU-b", None),
        recorded("e", "GPU-c", 899_500.0, observer_uid=77),  # a third person says so
        recorded("f", "GPU-d", 899_500.0, is_open=False),
        recorded("g", "GPU-e", 950_000.0),  # the clock was set back
        recorded("h", "GPU-f", 1.0),  # before the machine was started
        recorded("i", "GPU-g", 899_000.0, until=900_000.0),
        recorded("i", "GPU-g", None, until=900_010.0, observer_uid=5),  # a later record of the same, by the reader
    ]
    assert idle_seconds(records, 5, 900_000.0, 5_000.0) == {
        "GPU-a": 100.0,
        "GPU-b": 0.0,
        "GPU-e": 0.0,
        "GPU-f": 5_000.0,
        "GPU-g": 0.0,
    }


def test_one_look_names_what_the_ledger_knows(standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 3_000, pid=os.getpid())
    machine.set_utilisation(0, 0)
    gpus = GpuReader().snapshot().gpus
    assert IdleGpus().look(gpus) == {}, "there is no ledger"
    now = time.time()
    recorder = Recorder()
    recorder.begin()
    known = use("a", gpu=gpus[0].uuid, uid=os.geteuid(), since=now - 9000.0, held_s=9000.0, idle_since=now - 3600.0)
    recorder.sample([known])
    (found,) = IdleGpus().look(gpus).values()
    assert found.idle_s == pytest.approx(3600.0, abs=60.0)
    recorder.close([known])
    assert IdleGpus().look(gpus) == {}


def test_cpu_seconds_of_processes_that_are_gone_are_missing() -> None:
    found = cpu_seconds([os.getpid(), 2**22 + 1, -1])
    assert found.keys() == {os.getpid()}
    assert found[os.getpid()] == pytest.approx(time.process_time(), abs=1.0)


def test_the_full_screen_names_who_holds_it() -> None:
    one = gpu(0, used_mb=30_720, utilisation_percent=0, processes=(process(memory_mb=30_720),))
    idle = {one.uuid: IdleGpu(one.uuid, 2520.0, 30_720, one.processes)}
    look = Snapshot(at=0.0, machine=Machine(gpus=(one,)), idle=idle)
    (line,) = gpu_lines(look, GpuHistory(), 200)[1:]
    assert line.plain.endswith("idle for 42 min: alice holds 30 GB (pid 4711, python)")
