"""No job begins before what it needs has succeeded, and what was decided stays so, whatever is killed on the way.

Each job writes its begin and its end into one file of the test's own; the order of its lines is what is judged. The two
trials print what they did: ``pytest tests/slurm/test_needs.py -m slow -s``.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.patience import Gate, wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Plan
from tests.slurm.running import attempts, handle_of, has_handle, run, sh, start, states, write_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

OwnCluster = Callable[[Plan], Cluster]
# A controller forgets jobs once a minute, those that have ended at least so long ago.
FORGETFUL = Plan(accounting=False, min_job_age_s=2)
_FORGETS_WITHIN_S = 150.0


def account(folder: Path) -> list[tuple[str, str]]:
    """What the jobs have written: ("begin" or "end", name), in order."""
    path = folder / "account"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(word, name) for word, _, name in (line.partition(" ") for line in lines)]


def job(folder: Path, name: str, script: str = "true", **more: object) -> dict[str, object]:
    """One that writes the account: its end only when it is about to succeed."""
    tell = f"{folder}/account"
    return sh(name, f"echo begin {name} >>{tell}; {script} || exit; echo end {name} >>{tell}", **{"gpus": 0, **more})


def too_early(told: list[tuple[str, str]], needs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The jobs that have begun before one of their needs had ended."""
    over: set[str] = set()
    found = []
    for word, name in told:
        if word == "begin" and not over.issuperset(needs[name]):
            found.append(name)
        elif word == "end":
            over.add(name)
    return found


def forgotten(made: Cluster, handle: str) -> bool:
    return handle not in made.command("squeue", "-h", "-r", "--states=all", "-o", "%i").split()


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_what_slurm_has_forgotten_while_nobody_followed_is_followed_by_none(
    own_cluster: OwnCluster, shared: Path, death: signal.Signals
) -> None:
    """Its jobs are held, one is cancelled and forgotten, and the end of another makes room for what needs the first."""
    made = own_cluster(FORGETFUL)
    out = shared / "out"
    jobs = [job(shared, "a"), job(shared, "x", "sleep 5"), job(shared, "b", needs=["a"])]
    words = ["batch", write_jobs(shared, jobs), "--output-dir", str(out), "--engine", "slurm", "--at-most", "2"]
    words += ["--slurm-args=--hold"]
    with start(*words) as process:
        wait_until(lambda: has_handle(out, "a") and has_handle(out, "x"), every_s=0.2)
        process.send_signal(death)
        handle = handle_of(out, "a")
        made.command("scancel", handle)
        made.command("scontrol", "release", handle_of(out, "x"))
        wait_until(lambda: ("end", "x") in account(shared), every_s=0.2)
        wait_until(lambda: forgotten(made, handle), within_s=_FORGETS_WITHIN_S, every_s=0.5)
        if death is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            _release_until_over(made, process)
    if death is signal.SIGKILL:
        with start(*words) as process:
            _release_until_over(made, process)
    assert process.returncode == 0
    assert [name for word, name in account(shared) if word == "end" and name != "x"] == ["a", "b"]
    assert too_early(account(shared), {"a": (), "x": (), "b": ("a",)}) == []
    assert set(states(out).values()) == {"done"}


def _release_until_over(made: Cluster, process: subprocess.Popen[str]) -> None:
    """What is held in SLURM is let go until the command has ended."""

    def over() -> bool:
        for handle in made.command("squeue", "-h", "-r", "--states=pending", "-o", "%i").split():
            made.command("scontrol", "release", handle, check=False)
        return process.poll() is not None

    wait_until(over, within_s=200, every_s=0.5)


def test_what_slurm_begins_without_regard_to_its_needs_does_not_run(own_cluster: OwnCluster, shared: Path) -> None:
    """An administrator has taken its dependency away, as SLURM does itself where it has forgotten what it was."""
    made = own_cluster(FORGETFUL)
    out, gate = shared / "out", Gate(shared / "gate")
    jobs = [job(shared, "a", gate.wait), job(shared, "b", needs=["a"], retries=0)]
    words = ["batch", write_jobs(shared, jobs), "--output-dir", str(out), "--engine", "slurm"]
    with start(*words) as process:
        wait_until(lambda: has_handle(out, "b") and ("begin", "a") in account(shared), every_s=0.2)
        made.command("scontrol", "update", f"jobid={handle_of(out, 'b')}", "dependency=")
        wait_until(lambda: len(attempts(out)) == 3, every_s=0.2)
        gate.open()
        printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    assert "b: the cluster began it before what it needs had succeeded; it waits again" in printed
    assert account(shared) == [("begin", "a"), ("end", "a"), ("begin", "b"), ("end", "b")]


# --- trials -----------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """A run of the same command, again and again, and what befalls it."""

    made: Cluster
    words: list[str]
    log: Path
    done: Counter[str] = field(default_factory=Counter)
    process: subprocess.Popen[bytes] | None = None

    def follow(self) -> subprocess.Popen[bytes]:
        """The command runs, unless it has ended by itself; then it is given again."""
        if self.process is None or self.process.poll() is not None:
            self.done["starts"] += 1
            with self.log.open("ab") as out:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "gpuherd", *self.words], stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
        return self.process

    def kill_follower(self) -> None:
        process = self.follow()
        process.kill()
        process.wait()
        self.done["follower kills"] += 1

    def stop_follower(self, seconds: float) -> None:
        process = self.follow()
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        self.done["follower stops"] += 1

    def crash_controller(self) -> None:
        self.made.stop_controller(signal.SIGKILL)
        time.sleep(1.0)
        self.made.start_controller()
        self.done["controller kills"] += 1

    def crash_node(self, node: str) -> None:
        self.made.kill_node(node)
        time.sleep(1.0)
        self.made.start_node(node)
        self.done["node kills"] += 1

    def to_the_end(self, within_s: float = 400) -> int:
        process = self.follow()
        return process.wait(within_s)


def drawn(seed: int, folder: Path, count: int) -> tuple[list[dict[str, object]], dict[str, tuple[str, ...]]]:
    """Jobs that need up to two of those before them; some fail at their first try, and two for good."""
    dice = random.Random(seed)
    jobs, needs = [], {}
    for number in range(count):
        name = f"j{number}"
        before = [f"j{each}" for each in range(max(0, number - 6), number)]
        needs[name] = tuple(dice.sample(before, min(len(before), dice.choice([0, 1, 1, 2]))))
        script = f"sleep {dice.uniform(0.5, 6):.1f}"
        if number in (7, 13):
            script = f"{script}; false"
        elif dice.random() < 0.2:
            script = f"{script}; [ -e {folder}/once.{name} ] || {{ touch {folder}/once.{name}; false; }}"
        more = {"needs": list(needs[name])} if needs[name] else {}
        jobs.append(job(folder, name, script, retries=0 if number in (7, 13) else 4, **more))
    return jobs, needs


@pytest.mark.parametrize("seed", range(5))
def test_trial_of_needs_under_kills(own_cluster: OwnCluster, shared: Path, seed: int) -> None:
    """10 times the follower is killed, and once stopped for a while; controller and nodes are killed twice each."""
    made = own_cluster(Plan(nodes=3, apart=True, gpus=2, slurmd_timeout_s=8, accounting=False, min_job_age_s=2))
    jobs, needs = drawn(seed, shared, 30)
    words = ["batch", write_jobs(shared, jobs), "--output-dir", str(shared / "out"), "--engine", "slurm"]
    trial = Trial(made, [*words, "--at-most", "8"], shared / "log")
    dice = random.Random(1000 + seed)
    others: list[Callable[[], None]] = [
        lambda: trial.stop_follower(dice.uniform(2, 20)),
        trial.crash_controller,
        trial.crash_controller,
        lambda: trial.crash_node(dice.choice(made.names)),
        lambda: trial.crash_node(dice.choice(made.names)),
    ]
    dice.shuffle(others)
    began = time.monotonic()
    for number in range(10):
        trial.follow()
        time.sleep(dice.uniform(2, 8))
        if number % 2:
            others.pop()()
        trial.kill_follower()
        time.sleep(dice.uniform(0, 6))
    code = trial.to_the_end()
    assert code == 1, trial.log.read_text()
    told = account(shared)
    found = states(shared / "out")
    tried = Counter(name for name, _ in attempts(shared / "out"))
    print(
        f"\nplan {seed}: {len(jobs)} jobs, {sum(map(len, needs.values()))} needs, {dict(trial.done)},"
        f" {time.monotonic() - began:.0f} s; {dict(Counter(found.values()))}, {sum(tried.values())} attempts,"
        f" {sum(word == 'begin' for word, _ in told)} begun; begun before a need: {too_early(told, needs)}"
    )
    assert too_early(told, needs) == []
    lost = _lost(needs, {"j7", "j13"})
    assert {name for name, state in found.items() if state == "done"} == set(needs) - lost
    assert {name for name, state in found.items() if state == "failed"} <= {"j7", "j13"}
    assert not {name for _, name in told} & (lost - {"j7", "j13"}), "what needs a failed job has begun"


def _lost(needs: Mapping[str, tuple[str, ...]], failed: set[str]) -> set[str]:
    """These, and all that need one of them."""
    lost = set(failed)
    for name, before in needs.items():  # each comes after what it needs
        if lost & set(before):
            lost.add(name)
    return lost


def test_trial_of_60_jobs_with_cancellations_and_a_crash(own_cluster: OwnCluster, shared: Path) -> None:
    """What gpuherd or an administrator has cancelled stays so, and no job has more tries than it was given."""
    made = own_cluster(Plan(nodes=2, apart=True, gpus=2, slurmd_timeout_s=8))
    gate = Gate(shared / "gate")
    jobs, needs = [], {}
    for number in range(60):
        name = f"j{number}"
        script = f"sleep 0.2; {'false' if number % 10 == 0 else gate.wait if number >= 40 else 'true'}"
        needs[name] = (f"j{number - 1}",) if number % 10 in (1, 5) else ()
        more = {"needs": list(needs[name])} if needs[name] else {}
        jobs.append(job(shared, name, script, retries=2, **more))
    words = ["batch", write_jobs(shared, jobs), "--output-dir", str(shared / "out"), "--engine", "slurm"]
    trial = Trial(made, [*words, "--at-most", "24"], shared / "log")
    out = shared / "out"
    trial.follow()
    wait_until(lambda: has_handle(out, "j42") and has_handle(out, "j43"), within_s=120, every_s=0.3)
    here, there = ["j48", "j52", "j56"], ["j42", "j43"]
    run("cancel", "--run", str(out), *here[:2])
    handles = [handle_of(out, name) for name in there]
    made.command("scancel", handles[0])
    wait_until(lambda: states(out)["j42"] == "cancelled", every_s=0.3)
    for _ in range(3):
        time.sleep(2)
        trial.kill_follower()
        if trial.done["follower kills"] == 1:
            trial.crash_controller()
            run("cancel", "--run", str(out), here[2])
            made.command("scancel", handles[1])
        trial.follow()
    gate.open()
    assert trial.to_the_end() == 1, trial.log.read_text()
    found = states(out)
    tried = Counter(name for name, _ in attempts(out))
    failing = {f"j{number}" for number in range(0, 60, 10)}
    revived = [name for name in here + there if found[name] != "cancelled"]
    print(
        f"\n60 jobs: {dict(trial.done)}; {dict(Counter(found.values()))}; most attempts of a failing job:"
        f" {max(tried[name] for name in failing)}; revived: {revived}"
    )
    assert revived == [], trial.log.read_text()
    assert {name for name, state in found.items() if state == "failed"} == failing
    assert {tried[name] for name in failing} == {3}
    assert too_early(account(shared), needs) == []
    printed = run(*trial.words[:-2], code=1)
    assert "jobs that had failed or were cancelled wait again, with fresh tries" in printed
