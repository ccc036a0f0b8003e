"""A Hydra program, not ours, swept by the launcher: order, isolation, failures, and going on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launcher.conftest import AT_ONCE, ROOT, Sweeps
from tests.patience import wait_until


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["began"] < other["ended"] and other["began"] < one["ended"])


def test_jobs_return_in_order_and_one_that_fails_stops_no_other(sweeps: Sweeps) -> None:
    words = ("fail=1", "die=2", "locked=3")
    found = sweeps.returns(4, *words, "hydra.launcher.retries=0", "hydra.launcher.gpus_per_job=2")
    assert [each["overrides"][-1] for each in found] == ["seed=0", "seed=1", "seed=2", "seed=3"]
    assert [each["num"] for each in found] == [0, 1, None, 3]
    assert [each["value"] is None for each in found] == [False, True, True, True]
    assert found[0]["value"]["gpus"] in ("0,1", "2,3")
    assert found[1]["raised"] == "ValueError: no fit with seed 1"
    log = sweeps.sweep_dir / ".gpuherd" / "logs" / "1.1.log"
    assert found[1]["notes"] == [f"This was job #1 fail=1 die=2 locked=3 seed=1 (log: {log})."]
    assert "in fit\n    raise ValueError" in log.read_text()
    assert found[2]["raised"].startswith("JobFailed: #2 fail=1 die=2 locked=3 seed=2 failed: killed: killed by SIGKILL")
    # A return that no pickle holds is told, and the work is done.
    assert found[3]["raised"] is None
    assert "gpuherd: a Fit can't be handed to the sweeper" in log.with_name("3.1.log").read_text()
    # The folders are those of Hydra's own launcher.
    assert (sweeps.sweep_dir / "3" / "slope.txt").exists()
    assert (
        sweeps.sweep_dir / "3" / ".hydra" / "overrides.yaml"
    ).read_text() == "- fail=1\n- die=2\n- locked=3\n- seed=3\n"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "timeout=soon",
            "gpuherd: hydra.launcher.timeout: 'soon' is not a length of time; write 90s, 30m, 2h or 1h30m",
        ),
        ("gpus_per_job=5", "gpuherd: job #0 seed=1 asks for 5 GPUs; there are 4 to use"),
    ],
)
def test_options_that_mean_nothing_are_told_in_a_line(sweeps: Sweeps, word: str, told: str) -> None:
    done = sweeps.run("program/fit.py", "--multirun", *AT_ONCE, f"hydra.launcher.{word}", "seed=1,2")
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert sweeps.times_begun() == {}


def test_programs_that_do_not_sweep_do_not_pay(sweeps: Sweeps) -> None:
    program = (
        "import sys, runpy; sys.argv[:] = ['fit.py', 'hydra.run.dir=one'];"
        f"runpy.run_path({str(Path(__file__).parent / 'program' / 'fit.py')!r}, run_name='__main__');"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('gpuherd', 'cloudpickle', 'rich')),"
        " 'hydra_plugins.gpuherd_launcher.launcher' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=sweeps.folder, env=sweeps.env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] True"


@pytest.mark.slow
def test_sixteen_settings_on_four_gpus_by_a_program_that_is_not_ours(sweeps: Sweeps) -> None:
    found = sweeps.returns(16, "wait=0.5")
    assert [each["num"] for each in found] == list(range(16))
    values = [each["value"] for each in found]
    assert all(value is not None for value in values)
    # One GPU each, all four used, and none by two at a time.
    assert {value["gpus"] for value in values} == {"0", "1", "2", "3"}
    pairs = [(one, other) for one in values for other in values if one is not other and overlap(one, other)]
    assert pairs
    assert all(one["gpus"] != other["gpus"] for one, other in pairs)
    alone = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "program" / "fit.py"), "seed=7"],
        cwd=sweeps.folder,
        env=sweeps.env,
        capture_output=True,
        check=False,
    )
    assert alone.returncode == 0
    (slope,) = sweeps.folder.glob("outputs/*/*/slope.txt")
    assert (sweeps.sweep_dir / "7" / "slope.txt").read_text() == slope.read_text()


@pytest.mark.slow
def test_a_sweeper_reads_what_batches_of_jobs_return(sweeps: Sweeps) -> None:
    done = sweeps.run("program/fit.py", "--multirun", *AT_ONCE, "hydra/sweeper=climbing", "seed=3")
    assert done.returncode == 0, done.stderr
    climbed = json.loads((sweeps.sweep_dir / "climbed.json").read_text())
    losses = [loss for _, loss, _ in climbed["tried"]]
    assert len(losses) == 9
    assert min(losses[6:]) < min(losses[3:6]) < min(losses[:3])
    assert sweeps.times_begun() == {str(number): 1 for number in range(9)}


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_done_jobs_are_not_done_again(sweeps: Sweeps) -> None:
    gate = sweeps.folder / "gate"
    words = ("multirun.py", "6", *AT_ONCE, "hydra.launcher.max_gpus=2", f"wait_for={gate}")
    first = sweeps.start(*words)
    wait_until(lambda: len(sweeps.times_begun()) == 2)
    first.kill()
    first.wait()
    # Two are left running; the second launcher takes them over, and does the others.
    second = sweeps.start(*words)
    wait_until(lambda: (sweeps.sweep_dir / ".gpuherd" / "queue.lock").read_text().startswith(str(second.pid)))
    gate.touch()
    out, err = second.communicate(timeout=110)
    assert second.returncode == 0, err
    values = [json.loads(line)["value"] for line in out.splitlines() if line.startswith("{")]
    assert len(values) == 6
    assert sweeps.times_begun() == {str(number): 1 for number in range(6)}
    # Once more: nothing is left to do, and the values are the same.
    again = sweeps.run(*words)
    assert [json.loads(line)["value"] for line in again.stdout.splitlines() if line.startswith("{")] == values
    assert sweeps.times_begun() == {str(number): 1 for number in range(6)}


@pytest.mark.slow
def test_other_settings_in_the_same_folder_are_other_work(sweeps: Sweeps) -> None:
    gate = sweeps.folder / "gate"
    first = sweeps.start("multirun.py", "1", *AT_ONCE, f"wait_for={gate}", "optimizer=adam")
    wait_until(lambda: len(sweeps.times_begun()) == 1)
    first.kill()
    first.wait()
    second = sweeps.start("multirun.py", "1", *AT_ONCE, "optimizer=nesterov")
    wait_until(lambda: (sweeps.sweep_dir / ".gpuherd" / "queue.lock").read_text().startswith(str(second.pid)))
    gate.touch()
    out, err = second.communicate(timeout=110)
    assert second.returncode == 0, err
    # The job that ran was another one: its return is not this one's.
    (found,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert found["value"]["loss"] < 1
    assert sweeps.times_begun() == {"0": 2}


@pytest.mark.slow
def test_ctrl_c_lets_jobs_end_and_says_how_to_go_on(sweeps: Sweeps) -> None:
    gate = sweeps.folder / "gate"
    words = ("program/fit.py", "--multirun", *AT_ONCE, "hydra.launcher.max_gpus=1", f"wait_for={gate}", "seed=1,2")
    stopped = sweeps.start(*words)
    wait_until(lambda: len(sweeps.times_begun()) == 1)
    stopped.send_signal(signal.SIGINT)
    (log,) = sweeps.sweep_dir.glob(".gpuherd/logs/hydra_*.log")
    wait_until(lambda: "Ctrl-C" in log.read_text())
    gate.touch()
    out, err = stopped.communicate(timeout=110)
    assert stopped.returncode == 130, err
    assert f"hydra.sweep.dir={sweeps.sweep_dir} goes on from here" in out + err
    assert sweeps.run(*words).returncode == 0
    assert sweeps.times_begun() == {"0": 1, "1": 1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_package_is_found_by_hydra_where_it_is_installed(sweeps: Sweeps, tmp_path: Path) -> None:
    there = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(there)]
    subprocess.run([*install, str(ROOT / "launcher")], check=True, timeout=250)
    assert {path.name for path in there.iterdir()} == {"hydra_plugins", "gpuherd_launcher-0.1.0.dist-info"}
    assert not (there / "hydra_plugins" / "__init__.py").exists()
    sweeps.env["PYTHONPATH"] = f"{there}:{ROOT / 'src'}"
    done = sweeps.run("program/fit.py", "--multirun", *AT_ONCE, "seed=1,2")
    assert done.returncode == 0, done.stderr
    assert sweeps.times_begun() == {"0": 1, "1": 1}


@pytest.mark.slow
def test_a_second_launcher_in_the_folder_is_refused_and_changes_nothing(sweeps: Sweeps) -> None:
    gate = sweeps.folder / "gate"
    first = sweeps.start("multirun.py", "2", *AT_ONCE, "hydra.launcher.max_gpus=1", f"wait_for={gate}")
    wait_until(lambda: len(sweeps.times_begun()) == 1)
    second = sweeps.run("multirun.py", "2", *AT_ONCE, "optimizer=nesterov")
    assert second.returncode == 1
    assert f"gpuherd: another gpuherd (pid {first.pid}) works on" in second.stderr
    gate.touch()
    out, err = first.communicate(timeout=110)
    assert first.returncode == 0, err
    values = [json.loads(line)["value"] for line in out.splitlines() if line.startswith("{")]
    assert all(value["loss"] > 8 for value in values)  # of adam's small steps
    assert sweeps.times_begun() == {"0": 1, "1": 1}
