"""SIGKILL of the follower at any instant: each job runs once, and its end is recorded once."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest
from tests.jobs.remote.conftest import Cluster, Follower, MakeJob, Run
from tests.patience import Gate

from gpuherd.jobs import Job, Queue
from gpuherd.jobs.records import AttemptState

JOBS = 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_instants(run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, seed: int) -> None:
    """40 jobs, a third of them in chains, and up to 30 deaths: before and after each step of a hand-over, while the
    engine is being told, while ends are recorded."""
    chance = random.Random(seed)
    ran = tmp_path / "ran"
    ran.mkdir()
    # A second run of a job would fail here, and be a failure in the record.
    once = "set -C; : >{ran}/{name} || exit 9; sleep {s}"
    jobs = [
        sh(
            f"j{i}",
            once.format(ran=ran, name=f"j{i}", s=chance.choice([0, 0.2, 1.0])),
            retries=0,
            needs=(f"j{i - 1}",) if i % 3 == 2 else (),
            gpus=chance.choice([0, 1]),
        )
        for i in range(JOBS)
    ]
    # One job ends when there were enough deaths and not before, however fast all else is.
    gate = Gate(tmp_path / "gate")
    jobs.append(sh("last", f"set -C; : >{ran}/last || exit 9; {gate.wait}", retries=0))
    follower = Follower(run, cluster, tmp_path)
    kills = 0
    while kills < 30:
        if kills == 10:
            gate.open()
        follower.start(jobs, at_most=chance.choice([2, 3, 5]))
        follower.wait_for("begins")
        try:
            code = follower.join(chance.uniform(0.0, 0.6))
        except subprocess.TimeoutExpired:
            follower.signal(signal.SIGKILL)
            follower.join()
            kills += 1
            continue
        assert code == 0, follower.out()
        break
    assert follower.start(jobs).join() == 0, follower.out()
    _each_ran_once(run, ran, jobs)


_EFFECTS = {
    "the manifest": "gpuherd.jobs.remote.submit:private_write",
    "recorded": "gpuherd.jobs.queue.store:Queue.record_starts",
    "handed over": "tests.jobs.remote.process_engine:ProcessEngine.submit",
    "the handles": "gpuherd.jobs.queue.store:Queue.record_handles",
    "claimed by ourselves": "gpuherd.jobs.remote.tracker:take",
    "begun": "gpuherd.jobs.queue.store:Queue.record_begun",
    "settled": "gpuherd.jobs.queue.store:Queue.record_ends",
    "the files of a batch": "gpuherd.jobs.remote.spool:Spool._remove",
    "one file of them": "gpuherd.jobs.remote.spool:_unlink",
}


@pytest.mark.slow
@pytest.mark.parametrize("effect", _EFFECTS)
def test_killed_on_either_side_of_an_effect(
    run: Run, cluster: Cluster, sh: MakeJob, tmp_path: Path, effect: str
) -> None:
    """Also where the one before was killed when jobs were recorded and not yet handed over."""
    ran = tmp_path / "ran"
    ran.mkdir()
    once, gate = "set -C; : >{ran}/{name} || exit 9; {then}", Gate(tmp_path / "gate")
    needs = {"c": ("a",), "f": ("c", "d")}
    jobs = [
        sh(
            name,
            once.format(ran=ran, name=name, then=gate.wait if name == "e" else ""),
            retries=0,
            needs=needs.get(name, ()),
        )
        for name in "abcdef"
    ]
    follower, where = Follower(run, cluster, tmp_path), _EFFECTS[effect]
    for dies in ((_EFFECTS["recorded"], "after"), (where, "before"), (where, "after")):
        assert follower.start(jobs, at_most=2, dies=dies).join() == -signal.SIGKILL, follower.out()
    gate.open()
    assert follower.start(jobs).join() == 0, follower.out()
    _each_ran_once(run, ran, jobs)


def _each_ran_once(run: Run, ran: Path, jobs: list[Job]) -> None:
    assert sorted(path.name for path in ran.iterdir()) == sorted(job.name for job in jobs)
    with Queue(run.directory.queue) as queue:
        attempts = list(queue.attempts())
    done = [attempt for attempt in attempts if attempt.state is AttemptState.DONE]
    assert sorted(attempt.job for attempt in done) == sorted(job.name for job in jobs)
    assert all(attempt.state is AttemptState.REQUEUED for attempt in attempts if attempt not in done)
