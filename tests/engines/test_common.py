"""What every engine keeps to, seen by the commands of a user: one set of tests for this machine, SLURM, Ray and Grid
Engine. Each is real, and skipped with the reason where it can't be had.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.engines.sites import Site, submitting_once
from tests.patience import Gate, wait_until
from tests.slurm.running import attempts, run, start, states, write_jobs

SLOW = (pytest.mark.slow, pytest.mark.timeout(400))
CLUSTERS = [pytest.param("slurm", marks=SLOW), pytest.param("gridengine", marks=SLOW)]
ALL_SLOW = [pytest.param("local", marks=SLOW), *CLUSTERS, pytest.param("ray", marks=SLOW)]
# Ray takes ten seconds to start.
ALL = ["local", "slurm", "gridengine", pytest.param("ray", marks=SLOW)]
engines = pytest.mark.parametrize("site", ALL, indirect=True)
engines_slow = pytest.mark.parametrize("site", ALL_SLOW, indirect=True)
clusters = pytest.mark.parametrize("site", CLUSTERS, indirect=True)

# On a machine with much else to do a cluster takes long to begin a job.
BEGINS_S = 150.0
HOSTILE = "$(touch no) `touch no` ;&|<>*?[]{}~!#%^\\'\"\n\t\x1b[31m -rf é"
HOSTILE_NAME = "$(touch${IFS}no)`id`;|&'\\\"<>*?[]{}!#%é"


def job(folder: Path, name: str, script: str = "true", **more: object) -> dict[str, object]:
    """One that writes into the folder's account when it begins and when it is about to succeed, and tells of it where
    another of its attempts runs at the same time."""
    lock = f'exec 9>"{folder}/lock.{name}"; flock -n 9 || echo "twice {name}" >>"{folder}/account"'
    text = f'{lock}; echo "begin {name}" >>"{folder}/account"; {script} || exit; echo "end {name}" >>"{folder}/account"'
    return {"name": name, "command": ["bash", "-c", text], "gpus": 0, **more}


def account(folder: Path) -> list[str]:
    path = folder / "account"
    return path.read_text().splitlines() if path.exists() else []


def batch(site: Site, folder: Path, jobs: list[dict[str, object]], *more: str) -> list[str]:
    return ["batch", write_jobs(folder, jobs), *site.words, "--output-dir", str(folder / "out"), *more]


def log_of(folder: Path, name: str) -> str:
    (path,) = (folder / "out" / "logs").glob(f"{name}.*.log")
    return path.read_text()


@engines
def test_jobs_succeed_and_fail_have_their_logs_and_get_what_they_ask_for(site: Site, shared: Path) -> None:
    """One run for all of it: a command over a cluster takes seconds."""
    tell = 'echo "$0 has GPUs $CUDA_VISIBLE_DEVICES, cores $OMP_NUM_THREADS"'
    more: dict[str, Any] = {} if site.name == "local" else {"cpus": 3, "host-mem": "100MB"}
    jobs = [
        job(shared, "good", "echo well; echo ill >&2"),
        {"name": "bad", "command": ["bash", "-c", "echo oh no; exit 7"], "gpus": 0, "retries": 0},
        {"name": "missing", "command": ["/nowhere/program"], "gpus": 0, "retries": 0},
        {"name": "gpus", "command": ["bash", "-c", tell, "gpus"], "gpus": 2},
        {"name": "cpu", "command": ["bash", "-c", tell, "cpu"], "gpus": 0, **more},
        {"name": HOSTILE_NAME, "command": ["printf", "<%s>", HOSTILE, ""], "gpus": 0},
        job(shared, "later", needs=["good"]),
        job(shared, "never", needs=["bad"]),
    ]
    told = run(*batch(site, shared, jobs), code=1)
    ended = {
        "done": ("good", "gpus", "cpu", HOSTILE_NAME, "later"),
        "failed": ("bad", "missing"),
        "cancelled": ("never",),
    }
    assert states(shared / "out") == {name: state for state, names in ended.items() for name in names}, told
    assert account(shared) == ["begin good", "end good", "begin later", "end later"]
    assert sorted(log_of(shared, "good").split()) == ["ill", "well"]
    assert log_of(shared, "bad") == "oh no\n"
    assert "exit code 7: oh no" in told
    assert "/nowhere/program" in told
    gpus = log_of(shared, "gpus").split("GPUs ")[1].split(", cores")[0]
    assert len(set(gpus.split(","))) == 2
    assert "GPUs ," in log_of(shared, "cpu")
    if more:
        assert "cores 3" in log_of(shared, "cpu")
    assert f"<{HOSTILE}><>" in [path.read_text() for path in (shared / "out" / "logs").iterdir()]
    assert list(shared.rglob("no")) == []
    tried = [name for name, state in attempts(shared / "out") if str(state) != "cancelled"]
    assert len(tried) == len(set(tried))


@engines
def test_what_is_not_there_is_refused_in_a_clear_sentence(site: Site, shared: Path) -> None:
    words, said = site.wrong
    without = [word for at, word in enumerate(site.words) if "--ray-address" not in site.words[max(0, at - 1) : at + 1]]
    command = ["batch", write_jobs(shared, [job(shared, "a")]), *without, *words, "--output-dir", str(shared / "out")]
    assert said in " ".join(run(*command, code=2).split())
    assert account(shared) == []


@engines_slow
def test_a_job_that_runs_is_cancelled(site: Site, shared: Path) -> None:
    jobs = [job(shared, "long", f"echo $$ >'{shared}/pid'; sleep 600"), job(shared, "short")]
    with start(*batch(site, shared, jobs)) as process:
        wait_until(lambda: "begin long" in account(shared), within_s=BEGINS_S)
        run("cancel", "long", "--run", str(shared / "out"))
        process.communicate(timeout=200)
    assert states(shared / "out") == {"long": "cancelled", "short": "done"}
    assert "end long" not in account(shared)


@engines_slow
def test_needs_hold_across_the_death_of_the_dispatcher(site: Site, shared: Path) -> None:
    """It is killed while a job that others need runs; some have been submitted behind it, where the engine can."""
    gate = Gate(shared / "gate")
    jobs = [
        job(shared, "a", gate.wait),
        job(shared, "b", needs=["a"]),
        job(shared, "c", "false", needs=["a"], retries=0),
        job(shared, "d", needs=["b", "c"]),
    ]
    words = batch(site, shared, jobs)
    with start(*words) as process:
        wait_until(lambda: "begin a" in account(shared), within_s=BEGINS_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with start(*words) as process:
        gate.open()
        told, _ = process.communicate(timeout=300)
    assert states(shared / "out") == {"a": "done", "b": "done", "c": "failed", "d": "cancelled"}, told
    written = account(shared)
    assert "begin d" not in written
    assert written.index("begin b") > written.index("end a")
    assert written.index("begin c") > written.index("end a")
    assert not [line for line in written if line.startswith("twice")]
    ends = [line for line in written if line.startswith("end")]
    assert sorted(ends) == ["end a", "end b"]
    if site.keeps:
        assert written.count("begin a") == 1


@clusters
def test_nothing_runs_twice_after_a_death_between_submission_and_record(
    site: Site, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes the jobs, and the dispatcher dies before it can read their number."""
    assert site.program is not None
    jobs = [job(shared, name, "sleep 1") for name in ("a", "b", "c")]
    words = batch(site, shared, jobs)
    script = f'"$real" "$@" >"{shared}/answer"; kill -KILL "$PPID"; exit 1'
    environment = {**os.environ, **submitting_once(shared, site.program, script)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with start(*words) as process:
        assert process.wait(100) == -signal.SIGKILL
    assert (shared / "answer").read_text().strip() != ""
    told = run(*words)
    assert set(states(shared / "out").values()) == {"done"}, told
    assert sorted(account(shared)) == sorted(f"{word} {name}" for name in "abc" for word in ("begin", "end"))
    assert len(attempts(shared / "out")) == 3


@engines_slow
def test_a_job_is_told_before_its_time_is_up_and_goes_on_in_another_turn(site: Site, shared: Path) -> None:
    if not site.limits:
        pytest.skip("this machine grants jobs all the time they need")
    # Until the second turn it waits for the signal; then it has been told.
    script = f"""[ -e '{shared}/saved' ] && exit 0
        trap 'touch "{shared}/saved"; exit 143' TERM; for each in $(seq 3000); do sleep 0.1; done"""
    jobs = [{"name": "turns", "command": ["bash", "-c", script], "gpus": 0, "retries": 0}]
    told = run(*batch(site, shared, jobs, "--time-limit", "1m", "--notice", "55s"))
    assert states(shared / "out") == {"turns": "done"}, told
    assert len(attempts(shared / "out")) == 2


@clusters
def test_an_engine_that_is_down_is_waited_for(site: Site, shared: Path) -> None:
    assert site.outage is not None
    gate, last = Gate(shared / "gate"), Gate(shared / "last")
    jobs = [job(shared, "a", gate.wait), job(shared, "b", last.wait, needs=["a"])]
    with start(*batch(site, shared, jobs)) as process:
        wait_until(lambda: "begin a" in account(shared), within_s=BEGINS_S)
        assert process.stdout is not None
        with site.outage():
            away = next(line for line in process.stdout if "does not answer" in line)
            assert away.startswith(f"{site.title} does not answer: "), away
            gate.open()
            wait_until(lambda: "end a" in account(shared), within_s=BEGINS_S)
        # Until then the run must not end: nodes say by the shared folder what becomes of jobs.
        assert any(f"{site.title} answers again" in line for line in process.stdout)
        last.open()
        process.wait(100)
    assert states(shared / "out") == {"a": "done", "b": "done"}
    assert account(shared) == ["begin a", "end a", "begin b", "end b"]


@engines_slow
def test_what_can_never_be_had_is_refused_with_the_reason_and_the_rest_runs(site: Site, shared: Path) -> None:
    jobs = [job(shared, "fits"), job(shared, "many", gpus=9, retries=0)]
    told = run(*batch(site, shared, jobs), code=1)
    assert states(shared / "out") == {"fits": "done", "many": "failed"}, told
    assert "many: " in told
    assert "9" in told.split("many: ")[1].splitlines()[0]
